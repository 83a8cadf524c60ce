"""Which way to run a model: the quickest that has been shown to be right.

The first time a model goes a way, the way is compared with the dense one on a small tree, log-probabilities and, where
they are asked for, gradients; one that differs or breaks is not gone again, with a warning that says so.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from arborl.learner.executor import DENSE, EXECUTORS, Way, cheapest
from arborl.learner.fused_layers import fusing_fits
from arborl.learner.packing import MicroBatch
from arborl.learner.score import score
from arborl.models.lean import is_lean, leave_to_library
from arborl.models.place import place_of
from arborl.types import Sampling, Terms

log = logging.getLogger(__name__)

TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.03}
"""Norm of the difference over the norm, of log-probabilities and of gradients. A wrong mask differs by far more."""
PROBED = 8
"""Parameters whose gradients are compared."""

_right: WeakKeyDictionary[PreTrainedModel, dict[tuple[Way, bool], bool]] = WeakKeyDictionary()


class Ways:
    """Chooses for each model and micro-batch.

    Args:
        attention: a name in `EXECUTORS`, or `auto`: the cheapest for each batch.
        recompute: run layers again for their gradients instead of keeping what they computed.
    """

    def __init__(self, attention: str = "auto", recompute: bool = False):
        self.attention, self.recompute = attention, recompute

    def __call__(self, model: PreTrainedModel, batch: MicroBatch) -> Way:
        is_lean(model)  # so that whoever has asked once has had everything checked
        known = _right.setdefault(model, {})
        for way in self._candidates(model, batch):
            key = (way, torch.is_grad_enabled())
            if key not in known:
                known[key] = way == DENSE or agrees(model, way)
            if known[key]:
                return replace(way, recompute=self.recompute)
        return replace(DENSE, recompute=self.recompute)

    @staticmethod
    def settle(model: PreTrainedModel) -> None:
        """Check every way now, by the library's own code, and none later: once a model is sharded, a check would be a
        meeting of all processes, and its gradients are no longer where a check looks for them."""
        leave_to_library(model)
        known = _right.setdefault(model, {})
        known.clear()
        for way in (Way(name) for name in EXECUTORS):
            for graded in (True, False):
                with torch.set_grad_enabled(graded):
                    fits = EXECUTORS[way.attend].fits(model)
                    known[way, graded] = fits and (way == DENSE or agrees(model, way))

    def _candidates(self, model: PreTrainedModel, batch: MicroBatch) -> Iterator[Way]:
        if self.attention == "auto":
            device = place_of(model).device
            names = [cheapest(batch, device)]
            if names == ["kernel"] or device.type == "cpu":
                other = "blocks" if names == ["kernel"] else names[0]
                names = ["kernel", other] if EXECUTORS["kernel"].fits(model) else [other]
        else:
            names = [DENSE.attend if self.attention == "causal" and not batch.is_chains else self.attention]
        fuses = is_lean(model) and fusing_fits(model)
        for name in names:
            if fuses and name != DENSE.attend:
                yield Way(name, fused=True)
            yield Way(name)


def agrees(model: PreTrainedModel, way: Way) -> bool:
    """Whether this way gives the dense way's numbers for this model."""
    large = way.attend == "kernel" and model.device.type != "cpu"  # so are the blocks of a GPU's kernels
    batch = sample(model, chain=way.attend == "causal", size=200 if large else 40)
    try:
        ours = _numbers(model, batch, way)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # a kernel's compiler may fail in any way it likes
        what = str(error).strip().splitlines()[0][:200] if str(error).strip() else ""
        log.warning("%s is not used for %s: %s: %s", way, type(model).__name__, type(error).__name__, what)
        return False
    gap = max(_gap(a, b) for a, b in zip(ours, _numbers(model, batch, DENSE), strict=True))
    if not gap <= TOLERANCE.get(place_of(model).dtype, 1e-3):
        log.warning("%s is not used for %s: it differs from the dense way by %.1e", way, type(model).__name__, gap)
        return False
    return True


def _numbers(model: PreTrainedModel, batch: MicroBatch, way: Way) -> list[Tensor]:
    """Log-probabilities of the sample's terms, and gradients of some of the first parameters."""
    logprob_M = score(model, batch, Sampling(), way).logprob_M
    probed = [p for p in model.parameters() if p.requires_grad and p.ndim > 1][:PROBED]
    if not (probed and torch.is_grad_enabled()):
        return [logprob_M.detach()]
    weight_M = torch.linspace(-1.0, 1.0, len(logprob_M), device=logprob_M.device)
    return [logprob_M.detach(), *torch.autograd.grad((logprob_M * weight_M).sum(), probed)]


def _gap(ours: Tensor, theirs: Tensor) -> float:
    a, b = ours.double(), theirs.double()
    size = float(b.norm())
    return float((a - b).norm()) / size if size > 0 else float(a.norm())


def sample(model: PreTrainedModel, chain: bool, size: int) -> MicroBatch:
    """A small tree: a stem of `size` tokens and three branches, one of which branches again; or its first branch."""
    chance = np.random.default_rng(0)  # never the run's own: resuming must not depend on when a way was checked
    twig = size // 3
    depth = [np.arange(size + twig)]
    if not chain:
        depth += [size + np.arange(twig), size + twig + np.arange(twig), size + np.arange(twig)]
        depth[2] -= twig // 2  # branches off in the middle of the second
    depth_N = np.concatenate(depth)
    end_N = np.full(len(depth_N), len(depth_N))
    for k in range(len(depth_N)):
        after = np.flatnonzero(depth_N[k + 1 :] <= depth_N[k])
        end_N[k] = k + 1 + after[0] if len(after) else len(depth_N)
    position = np.arange(0, len(depth_N), 2)
    tokens = chance.integers(0, model.config.vocab_size, len(depth_N))
    zeros, ints = np.zeros(len(position)), np.zeros(len(position), dtype=np.int64)
    target = chance.integers(0, model.config.vocab_size, len(position))
    terms = Terms(ints, position, target, zeros, zeros, zeros, ints, ints, ints, ints, *[zeros] * 6)  # type: ignore[arg-type]
    return MicroBatch(tokens, depth_N, end_N, (len(depth_N),), terms, np.arange(len(position)))
