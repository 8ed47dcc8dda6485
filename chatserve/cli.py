"""The command line `chatserve`.

Owns the commands and how a failure is shown: one line and a non-zero exit code; `cli_options` has the options. Each
command imports what it needs when it runs, so that `--help` is quick and nothing here loads torch.
"""

from __future__ import annotations

import pkgutil
import sys
from pathlib import Path
from typing import Any

import click

from chatserve import __version__
from chatserve.cli_options import DEFAULTS, FILE, option, settings
from chatserve.config import Limits, ServeSettings
from chatserve.errors import StartupError


class _Cli(click.Group):
    """Shows a start-up error as one line."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except StartupError as error:
            click.echo(f"chatserve: {error}", err=True)
            ctx.exit(1)


@click.group(cls=_Cli, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="chatserve")
def cli() -> None:
    """An interactive chat server for your own model, whose conversation tree owns its KV cache."""


@cli.command()
@settings()
def serve(data_dir: Path, cache_dir: Path, **options: Any) -> None:
    """Serve the chat page, the chat.v1 protocol and the OpenAI API."""
    import asyncio  # noqa: PLC0415

    from chatserve.supervisor.supervisor import Supervisor  # noqa: PLC0415

    options["host"] = options["host"].strip("[]")  # an IPv6 address as URLs have it
    if options["kv_snapshot"] is not None:
        options["kv_snapshot"] = options["kv_snapshot"].absolute()
    limits = Limits(**{name: options.pop(name) for name in Limits.__struct_fields__ if name in options})
    chosen = ServeSettings(data_dir=data_dir.absolute(), cache_dir=cache_dir.absolute(), limits=limits, **options)

    async def run() -> int:
        return await Supervisor(chosen).run()

    sys.exit(asyncio.run(run()))


@cli.command()
@option("--url", default="http://127.0.0.1:8000", help="The server's address.")
@option("--token", help="Your token, where the server asks for one.")
@option("--session", help="The id of a conversation to open, instead of a new one.")
def chat(url: str, token: str | None, session: str | None) -> None:
    """Chat in the terminal. /help inside lists the commands; Ctrl-C stops an answer."""
    from chatserve.terminal.app import run  # noqa: PLC0415

    sys.exit(run(url, token=token, session=session))


@cli.group()
def model() -> None:
    """Fetch and list models."""


@model.command("pull")
@click.argument("name", default=DEFAULTS.model)
@settings("cache_dir")
def model_pull(name: str, cache_dir: Path) -> None:
    """Fetch and convert the model NAME, once."""
    from chatserve.model import catalog  # noqa: PLC0415
    from chatserve.progress import pull_progress  # noqa: PLC0415

    with pull_progress(name) as progress:
        path = catalog.pull(name, cache_dir.absolute(), progress)
    click.echo(f"{name} is at {path}", err=True)


@model.command("list")
@settings("cache_dir")
def model_list(cache_dir: Path) -> None:
    """List the models that --model takes by name, and what is here already."""
    from chatserve.model import catalog  # noqa: PLC0415

    for entry in catalog.list_models(cache_dir.absolute()):
        where = str(entry.path) if entry.path else f"not here yet; `chatserve model pull {entry.name}` fetches it"
        click.echo(f"{entry.name}  {entry.num_bytes / 1e6:.0f} MB  {entry.about}\n  {where}")


@cli.command()
@settings("host", "port", "model", "data_dir", "cache_dir", "device", "redis_url", "tokens_file")
def doctor(data_dir: Path, cache_dir: Path, **options: Any) -> None:
    """Check all that `chatserve serve` with the same options needs, and say what to do."""
    from chatserve.doctor import examine, show  # noqa: PLC0415

    chosen = ServeSettings(data_dir=data_dir.absolute(), cache_dir=cache_dir.absolute(), **options)
    sys.exit(show(examine(chosen)))


@cli.command()
@click.argument("user")
@option(
    "--tokens-file",
    type=FILE,
    required=True,
    help="The file to add the token's hash to; `chatserve serve` takes the same option.",
)
def token(user: str, tokens_file: Path) -> None:
    """Make a token for USER, show it once, and add its hash to the token file."""
    from chatserve.server import auth  # noqa: PLC0415

    click.echo(auth.add_token(tokens_file, user))


@cli.command(context_settings={"ignore_unknown_options": True, "help_option_names": []}, add_help_option=False)
@click.argument("name", required=False)
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
def bench(name: str | None, args: tuple[str, ...]) -> None:
    """Run the measurement NAME; without a name, list them. `bench NAME --help` shows its options."""
    import importlib  # noqa: PLC0415

    from chatserve import bench as package  # noqa: PLC0415

    names = sorted(found.name for found in pkgutil.iter_modules(package.__path__) if not found.name.startswith("_"))
    if name is None or name in {"-h", "--help"}:
        click.echo("chatserve bench NAME [options], where NAME is one of:")
        for each in names:
            click.echo(f"  {each}")
        return
    if name not in names:
        raise StartupError(f"there is no measurement {name}; there are: {', '.join(names)}")
    sys.exit(importlib.import_module(f"chatserve.bench.{name}").main(list(args)) or 0)


def main() -> None:
    """The console script."""
    # A launcher's own name would be shown in help and errors otherwise.
    cli.main(args=sys.argv[1:], prog_name="chatserve")
