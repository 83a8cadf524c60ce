"""Lines to the caller; refused requests."""

from __future__ import annotations

import json
import os
import select
import sys

MARK = "\x1e"
"""First character of every reply."""


class RequestRefused(Exception):
    """The request cannot be fulfilled; the text is for the user."""


def send(**what):
    """Send one line to the caller."""
    sys.stdout.write(MARK + json.dumps(what) + "\n")
    sys.stdout.flush()


def pause(seconds):
    """Wait; exit if the caller is gone, which closes standard input."""
    ready, _, _ = select.select([0], [], [], seconds)
    if ready and not os.read(0, 1):
        sys.exit(0)
