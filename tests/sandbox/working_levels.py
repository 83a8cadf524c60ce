"""The levels of the sandbox that work on this machine."""

from arborl.sandbox import LEVELS, SandboxError, try_level


def works(level: str) -> bool:
    try:
        try_level(level)
    except SandboxError:
        return False
    return True


WORKING_LEVELS = [level for level in LEVELS if works(level)]
