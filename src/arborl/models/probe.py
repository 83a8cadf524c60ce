"""Whether a model can be run over trees and caches at all: asked of the model itself, before a run begins.

The library has hundreds of kinds of models, and any of them may do something between tokens, or behind its head, that
the hook does not see. So a small tree is run through the hook, and its branches one by one through the library's own
forward pass; a model that says something else about the tree is refused.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedModel

from arborl.errors import ConfigError
from arborl.models.attention import FREE, NAME, Bounds, attention, layout, library_hidden_states, logits
from arborl.models.find import check_positions
from arborl.models.load import quiet

STEM, TWIG = 6, 4
"""Tokens of the tree: a stem, and two branches that leave from it."""
TOLERANCE = {torch.float64: 1e-4, torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.05}
"""Norm of a difference over the norm, in the middle of a branch's tokens. Branches that saw each other differ by far
more; of experts that are chosen otherwise because of rounding there are few."""
OTHERS = "Choose a model of another kind; those that are known to work are listed in docs/models.md."


class _Fork:
    """Attention over that tree."""

    def __init__(self, device: torch.device):
        self.position = torch.tensor([*range(STEM + TWIG), *range(STEM, STEM + TWIG)], device=device)
        place = torch.arange(len(self.position), device=device)
        second = place >= STEM + TWIG
        twig = (place >= STEM) & ~second
        self.sees = (place[None] <= place[:, None]) & ~(second[:, None] & twig[None])

    def __call__(
        self, layer: int, q_NHD: Tensor, k_NKD: Tensor, v_NKD: Tensor, scale: float, bounds: Bounds = FREE
    ) -> Tensor:
        sees = self.sees
        if bounds.window is not None:
            sees = sees & (self.position[:, None] - self.position[None] < bounds.window)
        q, k, v = (x.transpose(0, 1)[None] for x in (q_NHD, k_NKD, v_NKD))
        return attention(q, k, v, scale, sees, cap=bounds.cap)[0].transpose(0, 1)


def check_runs(model: PreTrainedModel, name: str, max_context: int) -> None:
    """ConfigError, in one sentence, for a model that engine and learner cannot run as the library does.

    Args:
        name: what the configuration calls it.
        max_context: the longest prompt and completion that will be asked of it.
    """
    config = model.config
    check_positions(config.to_dict(), name, max_context)
    kind = type(model).__name__
    try:
        with quiet():
            found = layout(model)
            gap = _gap(model)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # a model that is none of ours may fail in any way it likes
        why = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ConfigError(f"model.name={name}: {kind} cannot be run over trees of tokens: {why}. {OTHERS}") from error
    if not gap <= TOLERANCE.get(model.dtype, 1e-3):
        raise ConfigError(
            f"model.name={name}: {kind} says something else about a tree of tokens than about its branches one by one "
            f"(by {gap:.1e}). {OTHERS}"
        )
    window, kinds = getattr(config, "sliding_window", None), getattr(config, "layer_types", None)
    slides = getattr(config, "use_sliding_window", True) and (not kinds or "sliding_attention" in kinds)
    if window is not None and slides and not found.windows and max_context > window:
        raise ConfigError(
            f"sampling.max_context={max_context}: {kind} has a window of {window} tokens that it does not tell "
            f"attention. Write sampling.max_context={window} or less."
        )


@torch.no_grad()
def _gap(model: PreTrainedModel) -> float:
    """How far what we read off the tree is from what the library says of its branches."""
    fork = _Fork(model.device)
    tokens = (torch.arange(len(fork.position), device=model.device) * 7 + 3) % model.config.vocab_size
    ours = logits(model, library_hidden_states(model, tokens, fork.position, fork))
    first = slice(0, STEM + TWIG)
    second = torch.cat([tokens[:STEM], tokens[STEM + TWIG :]])
    try:
        model.set_attn_implementation("eager")
        theirs = [model(ids[None], use_cache=False).logits[0].to(ours.dtype) for ids in (tokens[first], second)]
    finally:
        model.set_attn_implementation(NAME)
    pairs = ((ours[first], theirs[0]), (ours[STEM + TWIG :], theirs[1][STEM:]))
    return max(float(((a - b).norm(dim=-1) / b.norm(dim=-1)).median()) for a, b in pairs)
