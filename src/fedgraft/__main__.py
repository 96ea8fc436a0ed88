"""`python -m fedgraft` is the command `fedgraft`."""

from fedgraft.cli import main

main()
