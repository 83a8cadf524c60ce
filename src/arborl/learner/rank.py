"""A rank other than the first as a process of its own: `python -m arborl.learner.rank RANK COUNT ADDRESS DEVICE`.

The environment holds the secret of the run. Its standard input is a line to the process that started it: when that is
cut, so is this.
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
    secret = os.environ.pop("ARBORL_RANKS_SECRET")
    threading.Thread(target=_watch_parent, args=(address,), daemon=True).start()
    from arborl.errors import ConfigError
    from arborl.learner.rank_worker import serve_rank
    from arborl.learner.run_store import JoinInfo

    try:
        serve_rank(int(rank), int(count), JoinInfo(address, secret), device)
    except ConfigError:  # the first rank has been told, and says it
        sys.exit(1)


def _watch_parent(address: str) -> None:
    while os.read(0, 1):
        pass
    from arborl.learner.run_store import remove_folder

    remove_folder(address)  # of the store, whose process has been killed
    os._exit(1)


if __name__ == "__main__":
    main()
