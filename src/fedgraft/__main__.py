"""`python -m fedgraft` is the command `fedgraft`."""

from fedgraft.cli.main import main

main()
