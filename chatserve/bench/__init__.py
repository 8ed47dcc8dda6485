"""Load generators and measurements behind `chatserve bench NAME`.

Each module has `main(argv: list[str]) -> int | None`: it parses its own options, prints its figures, and returns an
exit code. Modules whose names start with an underscore are shared helpers.
"""
