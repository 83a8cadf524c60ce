"""Runs one command so that nothing of it outlives who asked: `python guard.py PROGRAM …`. Standard library only.

Standard input and output are the command's own. Of what it writes to standard error the last lines are kept, and
written out when it ends with an error, and its exit code behind them; else nothing is. When the command ends, or the
process that started this one is gone (killed, perhaps, with no time to clean up), the whole process group is killed.
Must be started as the leader of one.
"""

import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque

LINES, LONGEST = 20, 4096


def main() -> None:
    parent = os.getppid()
    said: deque[bytes] = deque(maxlen=LINES)
    child = subprocess.Popen(sys.argv[1:], stderr=subprocess.PIPE)

    def listen() -> None:
        assert child.stderr is not None
        said.extend(iter(lambda: child.stderr.readline(LONGEST), b""))  # type: ignore[union-attr]

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os.killpg(0, signal.SIGKILL)

    hearing = threading.Thread(target=listen, daemon=True)
    hearing.start()
    threading.Thread(target=watch, daemon=True).start()
    try:
        if code := child.wait():
            hearing.join(0.1)
            sys.stderr.buffer.write(b"%s (exit code %d)\n" % (b"".join(said.copy()).rstrip(), code))
            sys.stderr.flush()
    finally:
        os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main()
