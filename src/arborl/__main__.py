"""`python -m arborl` is `arborl`."""

import os
import sys

if not sys.flags.safe_path and sys.path[:1] == [os.getcwd()]:
    del sys.path[0]  # the current folder may be untrusted: see arborl.registry.search_current_folder

from arborl.cli.main import main

main()
