"""Every step of every engine in these tests leaves its rows as `Rows` says they are."""

from __future__ import annotations

import numpy as np
import pytest

from arborl.engines.local import LocalEngine


@pytest.fixture(autouse=True)
def rows_are_checked(monkeypatch):
    step = LocalEngine._step

    def checked(self):
        step(self)
        self.rows.check(np.fromiter(self.scheduler.running, np.int64), self.pages.size)

    monkeypatch.setattr(LocalEngine, "_step", checked)
