"""`python -m blockdraft.cli`: the command, without its script."""

from blockdraft.cli import main

main()
