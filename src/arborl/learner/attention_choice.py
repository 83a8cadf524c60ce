"""Which execution path a model is trained on: the fastest that has been shown to be right.

The first time a path is used for a model, it is compared with the library's code and dense attention on a small tree,
layer by layer, in value and, where gradients are enabled, in gradient (`models/path_check.py`). A path that differs
or fails is not used again, and is reported."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from arborl.learner.executor import DENSE, EXECUTORS, Way, cheapest
from arborl.learner.fused_layers import FUSED, fused_logprobs, fusing_fits
from arborl.learner.kernel_attention import KernelAttend
from arborl.learner.packing import MicroBatch
from arborl.models.attention import AttentionFunction, attention_layout, library_hidden_states, raw_head_logits
from arborl.models.execution_paths import FastPath, first_line, record_path, report_fallback
from arborl.models.fast_forward import has_fast_forward, layer_runner, use_library_forward
from arborl.models.model_loading import compute_device
from arborl.models.path_check import HIGHER, Outputs, check_attention, check_layers, excess, norm_error, sample_tokens
from arborl.types import Terms

CHECKED, LARGE = 24, 200
"""Tokens of the tree's stem; the second for kernels whose blocks are large."""
HEAD_ROWS = 16
"""Tokens whose log-probabilities are compared."""

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
        has_fast_forward(model)  # so that whoever has asked once has had everything checked
        known = _right.setdefault(model, {})
        for way in self._candidates(model, batch):
            key = (way, torch.is_grad_enabled())
            if key not in known:
                known[key] = way == DENSE or self._is_right(model, way)
            if known[key]:
                record_path(model, "learner", str(way))
                return replace(way, recompute=self.recompute)
        return replace(DENSE, recompute=self.recompute)

    @staticmethod
    def _is_right(model: PreTrainedModel, way: Way) -> bool:
        why = why_wrong(model, way)
        if why is not None:
            report_fallback(model, FastPath.TRAINING_FUSED if way.fused else FastPath.TRAINING_TREES, f"{way}: {why}")
        return why is None

    @staticmethod
    def settle(model: PreTrainedModel) -> None:
        """Check every way now, by the library's own code, and none later: once a model is sharded, a check would be a
        meeting of all processes, and its gradients are no longer where a check looks for them."""
        use_library_forward(model)
        known = _right.setdefault(model, {})
        known.clear()
        for way in (Way(name) for name in EXECUTORS):
            for graded in (True, False):
                with torch.set_grad_enabled(graded):
                    fits = EXECUTORS[way.attend].fits(model)
                    known[way, graded] = fits and (way == DENSE or Ways._is_right(model, way))

    def _candidates(self, model: PreTrainedModel, batch: MicroBatch) -> Iterator[Way]:
        if self.attention == "auto":
            device = compute_device(model).device
            names = [cheapest(batch, device)]
            if names == ["kernel"] or device.type == "cpu":
                other = "blocks" if names == ["kernel"] else names[0]
                names = ["kernel", other] if EXECUTORS["kernel"].fits(model) else [other]
        else:
            names = [DENSE.attend if self.attention == "causal" and not batch.is_chains else self.attention]
        fuses = has_fast_forward(model) and fusing_fits(model)
        for name in names:
            if fuses and name != DENSE.attend:
                yield Way(name, fused=True)
            yield Way(name)


def why_wrong(model: PreTrainedModel, way: Way) -> str | None:
    """Why this way gives other numbers than the library's code with dense attention; None where it does not."""
    large = way.attend == "kernel" and model.device.type != "cpu"  # so are the blocks of a GPU's kernels
    batch = sample(model, chain=way.attend == "causal", size=LARGE if large else CHECKED)
    device, dtype = compute_device(model)
    attend, dense = EXECUTORS[way.attend].make(batch, device), EXECUTORS[DENSE.attend].make(batch, device)
    if isinstance(attend, KernelAttend):
        attend.prepare(attention_layout(model).windows, attention_layout(model).size, dtype)
    tokens, positions = batch.tokens.tolist(), batch.depth.tolist()
    try:
        if not has_fast_forward(model):
            return check_attention(model, attend, dense, tokens, positions)
        run = partial(layer_runner, ops=FUSED if way.fused else None)
        why = check_layers(model, run, attend, dense, tokens, positions)
        return _why_head_is_wrong(model, tokens, positions, dense) if way.fused and why is None else why
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # a kernel's compiler may fail in any way
        return first_line(error)


def _why_head_is_wrong(
    model: PreTrainedModel, tokens: list[int], positions: list[int], attend: AttentionFunction
) -> str | None:
    """The same for log-probabilities and entropies, from identical logits."""
    token_N, position_N = (torch.tensor(x, device=model.device) for x in (tokens, positions))
    with torch.no_grad():
        hidden_NE = library_hidden_states(model, token_N, position_N, attend)[-HEAD_ROWS:]
        logit_NV = raw_head_logits(model.get_output_embeddings(), None, hidden_NE)
    graded, target_N = torch.is_grad_enabled(), token_N[-HEAD_ROWS:]

    def numbers(run: Callable[[Tensor], tuple[Tensor, Tensor]], dtype: torch.dtype) -> Outputs:
        given = logit_NV.to(dtype).requires_grad_(graded)
        logprob_N, entropy_N = run(given)
        found = {"log-probabilities": logprob_N.detach()[None], "entropies": entropy_N.detach()[None]}
        if graded:
            weight = torch.linspace(-1, 1, len(logprob_N), device=given.device)
            found["gradients of logits"] = torch.autograd.grad((logprob_N * weight).sum(), given)[0]
        return found

    def plain(logits: Tensor) -> tuple[Tensor, Tensor]:
        log_NV = torch.log_softmax(logits.to(torch.promote_types(logits.dtype, torch.float32)), -1)
        return log_NV.gather(1, target_N[:, None])[:, 0], -(log_NV.exp() * log_NV).sum(-1)

    dtype = logit_NV.dtype
    exact = numbers(plain, HIGHER.get(dtype, dtype))
    found = numbers(
        lambda logits: fused_logprobs(logits, target_N, torch.ones(len(target_N), device=logits.device)), dtype
    )
    ratio, name = excess(found, numbers(plain, dtype), exact, dtype, norm_error)
    return None if ratio <= 1.0 else f"{name} are {ratio:.1f} times as far off as rounding explains"


def sample(model: PreTrainedModel, chain: bool, size: int) -> MicroBatch:
    """A small tree: a stem of `size` tokens and three branches, one of which branches again; or its first branch."""
    chance = np.random.default_rng(0)  # never the run's own: a resumed run would draw others
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
    tokens = np.asarray(sample_tokens(model, len(depth_N)))
    zeros, ints = np.zeros(len(position)), np.zeros(len(position), dtype=np.int64)
    target = chance.integers(0, model.config.vocab_size, len(position))
    terms = Terms(ints, position, target, zeros, zeros, zeros, ints, ints, ints, ints, *[zeros] * 6)  # type: ignore[arg-type]
    return MicroBatch(tokens, depth_N, end_N, (len(depth_N),), terms, np.arange(len(position)))
