"""The `paceline` command, also as `python -m paceline`."""

from __future__ import annotations

import os
import sys


def main() -> None:
    """Run the command line. An installation without what a command needs says what is missing."""
    # Before grpc is imported: its C core writes lines of its own to stderr, among ours, of what we tell as errors.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    try:
        from paceline.cli import main as run

        run()
    except ModuleNotFoundError as error:
        extra = "'paceline[serve]', or 'paceline[cli]' to be a server's client"
        sys.exit(f"paceline: {error.name} is not installed; try: pip install {extra}")


if __name__ == "__main__":
    main()
