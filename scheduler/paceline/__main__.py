"""The `paceline` command, also as `python -m paceline`."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line. A client's installation, which has no engine, says what is missing."""
    try:
        from paceline.cli import main as run
    except ModuleNotFoundError as error:
        sys.exit(f"paceline: {error.name} is not installed; try: pip install 'paceline[serve]'")
    run()


if __name__ == "__main__":
    main()
