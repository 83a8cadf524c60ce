"""The levels of the sandbox that work on this machine, and modules of `guest_process`."""

import importlib.util
import sys

from arborl.sandbox import LEVELS, SandboxError, try_level
from arborl.sandbox.sandbox import GUEST_FOLDER


def works(level: str) -> bool:
    try:
        try_level(level)
    except SandboxError:
        return False
    return True


WORKING_LEVELS = [level for level in LEVELS if works(level)]


def guest_module(name: str):
    """A module of the sandboxed process; no bytecode is written into its folder."""
    spec = importlib.util.spec_from_file_location(f"sandbox_{name}", GUEST_FOLDER / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    before, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    spec.loader.exec_module(module)
    sys.dont_write_bytecode = before
    return module
