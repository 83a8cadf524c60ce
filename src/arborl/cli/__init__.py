"""The command line: each command parses its arguments, calls the package and prints. Start with `main.py`.

A command imports heavy packages inside its function, so that `--help` is quick.
"""
