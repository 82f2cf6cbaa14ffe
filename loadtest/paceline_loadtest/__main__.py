"""The `paceline-loadtest` command, also as `python -m paceline_loadtest`."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line. A client's installation, which has no tables, says what is missing."""
    try:
        from paceline_loadtest.cli import main as run
    except ModuleNotFoundError as error:
        sys.exit(f"paceline-loadtest: {error.name} is not installed; try: pip install 'paceline[loadtest]'")
    run()


if __name__ == "__main__":
    main()
