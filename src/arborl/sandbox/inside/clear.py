"""Removing what a guest has written, whatever it did to make that hard."""

from __future__ import annotations

import os

FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def remove(folder: str) -> None:
    """Remove a folder that a guest without a file system of its own has had to itself.

    From folder to folder by descriptor, one open at a time: however deep a guest has dug, no path is long and nothing
    recurses. What is left after an error is left: there is nobody to tell.
    """
    try:
        os.rmdir(folder)  # empty, as a rule
        return
    except FileNotFoundError:
        return
    except OSError:
        pass
    above: list[tuple[str, list[str]]] = []
    """On the way down: the name of each folder, and what else its parent holds."""
    try:
        os.chmod(folder, 0o700)
        here = os.open(folder, FOLDER)
        names = os.listdir(here)
        while names or above:
            if not names:
                here, (name, names) = _enter("..", here), above.pop()
                os.rmdir(name, dir_fd=here)
            elif not _unlinked(name := names.pop(), here):
                above.append((name, names))
                os.chmod(name, 0o700, dir_fd=here)  # one that its owner cannot look into
                here = _enter(name, here)
                names = os.listdir(here)
        os.close(here)
        os.rmdir(folder)
    except OSError:
        pass


def _unlinked(name: str, here: int) -> bool:
    """Remove what is no folder."""
    try:
        os.unlink(name, dir_fd=here)
    except IsADirectoryError:
        return False
    return True


def _enter(name: str, here: int) -> int:
    there = os.open(name, FOLDER, dir_fd=here)
    os.close(here)
    return there
