"""The `paceline` command, also as `python -m paceline`."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line. An installation without what a command needs says what is missing."""
    try:
        from paceline.cli import main as run

        run()
    except ModuleNotFoundError as error:
        extra = "'paceline[serve]', or 'paceline[cli]' to be a server's client"
        sys.exit(f"paceline: {error.name} is not installed; try: pip install {extra}")


if __name__ == "__main__":
    main()
