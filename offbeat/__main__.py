"""`python -m offbeat`, for where the command is not on the path."""

from offbeat.cli import main

main()
