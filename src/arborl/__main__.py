"""`python -m arborl` is `arborl`."""

from arborl.cli.main import main

main()
