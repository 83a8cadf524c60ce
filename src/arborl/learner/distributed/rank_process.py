"""A rank other than 0 as a process: `python -m arborl.learner.distributed.rank_process RANK COUNT ADDRESS DEVICE`.

The environment holds the secret of the run. Standard input is a pipe from the parent process: when it closes, this
process exits. Heavy imports come after the pipe is watched.
"""

from __future__ import annotations

import os
import signal
import sys
import threading


def ignore_stop_signals() -> None:
    """Rank 0 handles them: it needs the other ranks for the last checkpoint, and then stops them."""
    for name in ("SIGINT", "SIGTERM", "SIGHUP"):
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_IGN)


def main() -> None:
    rank, count, address, device = sys.argv[1:5]
    ignore_stop_signals()
    secret = os.environ.pop("ARBORL_RANKS_SECRET")
    threading.Thread(target=_watch_parent, args=(address,), daemon=True).start()
    from arborl.errors import ConfigError
    from arborl.learner.distributed.rank_worker import serve_rank
    from arborl.learner.distributed.run_store import JoinInfo

    try:
        serve_rank(int(rank), int(count), JoinInfo(address, secret), device)
    except ConfigError:  # rank 0 reports it
        sys.exit(1)


def _watch_parent(address: str) -> None:
    while os.read(0, 1):
        pass
    from arborl.learner.distributed.run_store import remove_folder

    remove_folder(address)  # of the store, whose process was killed
    os._exit(1)


if __name__ == "__main__":
    main()
