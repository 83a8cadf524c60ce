"""A line to whoever asked, and what is refused."""

from __future__ import annotations

import json
import os
import select
import sys

MARK = "\x1e"
"""Before every line that is an answer."""


class Refused(Exception):
    """What was asked cannot be done here; the text is for the user."""


def tell(**what):
    """One line to whoever asked."""
    sys.stdout.write(MARK + json.dumps(what) + "\n")
    sys.stdout.flush()


def pause(seconds):
    """Wait; leave where whoever asked has gone, which ssh tells by the end of standard input."""
    ready, _, _ = select.select([0], [], [], seconds)
    if ready and not os.read(0, 1):
        sys.exit(0)
