"""`python -m chatserve`."""

from chatserve.cli import main

if __name__ == "__main__":
    main()
