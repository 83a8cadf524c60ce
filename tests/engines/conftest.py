"""Every step of every engine in these tests keeps the invariants of `InputBatch`."""

from __future__ import annotations

import numpy as np
import pytest

from arborl.engines.local import LocalEngine


@pytest.fixture(autouse=True)
def batch_is_checked(monkeypatch):
    step = LocalEngine._step

    def checked(self):
        step(self)
        self.batch.check(np.fromiter(self.scheduler.running, np.int64), self.pool.block_size)

    monkeypatch.setattr(LocalEngine, "_step", checked)
