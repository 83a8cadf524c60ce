"""A rank other than the first as a process of its own: `python -m arborl.learner.rank RANK COUNT ADDRESS DEVICE`.

Its standard input is a line to the process that started it: when that is cut, so is this.
"""

from __future__ import annotations

import os
import signal
import sys
import threading


def main() -> None:
    rank, count, address, device = sys.argv[1:5]
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # the first rank is told, and tells the others
    threading.Thread(target=_watch_parent, daemon=True).start()
    from arborl.errors import ConfigError
    from arborl.learner.rank_worker import serve_rank

    try:
        serve_rank(int(rank), int(count), address, device)
    except ConfigError:  # the first rank has been told, and says it
        sys.exit(1)


def _watch_parent() -> None:
    while os.read(0, 1):
        pass
    os._exit(1)


if __name__ == "__main__":
    main()
