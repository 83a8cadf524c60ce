"""What the loss of a float16 model is multiplied by: without that, its gradients would be rounded to nothing.

The smallest number above 0 that float16 has is 6e-8, and a token's share of a gradient is often less. So the loss is
multiplied before the backward pass, and the gradients, by then in float32, are divided again. Where the larger numbers
overflow, the pass is done again with a smaller factor: no step is lost, and none depends on how the last one went.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from arborl.learner.peers import ALONE, Peers

START, MOST = 2.0**16, 2.0**24
SHRINK, GROW = 4.0, 2.0
GOOD = 1000
"""Passes without an overflow after which the factor grows again."""


class LossScale:
    """The factor: 1 for every precision but float16."""

    def __init__(self, dtype: torch.dtype):
        self.needed = dtype == torch.float16
        self.value = self.kept = START if self.needed else 1.0
        self.good = 0

    def settled(self, gradients: list[Tensor], peers: Peers = ALONE) -> bool:
        """Divide the gradients; False where they overflowed and are to be computed again with the factor as it is now.

        What is not finite at a factor of 1 is none of this one's fault: it is left as it is, and the factor as before.
        """
        if not self.needed:
            return True
        mine = bool(torch.stack(torch._foreach_norm(gradients)).isfinite().all()) if gradients else True
        finite = all(peers.gather(mine))
        if not finite and self.value > 1.0:
            self.value, self.good = max(1.0, self.value / SHRINK), 0
            return False
        if not finite:
            self.value = self.kept
            return True
        if gradients:
            torch._foreach_mul_(gradients, 1.0 / self.value)
        self.good += 1
        if self.good >= GOOD:
            self.value, self.good = min(MOST, self.value * GROW), 0
        self.kept = self.value
        return True

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value, "good": self.good}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = self.kept = float(state["value"])
        self.good = int(state["good"])
