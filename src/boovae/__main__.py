"""`python -m boovae` is the command `boovae`."""

from boovae.cli.main import main

main()
