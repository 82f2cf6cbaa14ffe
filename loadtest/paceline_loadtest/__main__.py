"""`python -m paceline_loadtest`."""

from paceline_loadtest.cli import main

main()
