"""Models that say one number of a text: reward models, and what a critic begins as.

Both are transformers' sequence classifiers with one label: a trunk, and a linear layer `score` on its last token.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import AutoModelForSequenceClassification, PreTrainedModel
from transformers.utils import logging as library

from arborl.errors import ConfigError
from arborl.models.find import vocabulary
from arborl.models.load import device_of, load_model


@dataclass(frozen=True, slots=True)
class Origin:
    """What a critic begins as."""

    trunk: PreTrainedModel
    weight: Tensor | None
    """`[1, hidden]`, of the layer that says the number; None where the model has none."""
    bias: Tensor | None


class Scorer:
    """A sequence classifier of one label, as transformers runs it.

    Args:
        folder: of the model.
        dtype, device: as in `model`.
    """

    def __init__(self, folder: Path, dtype: str, device: str):
        with _quiet():
            self.model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=getattr(torch, dtype))
        self.model.to(device_of(device)).eval()
        self.pad: int | None = self.model.config.pad_token_id

    @torch.no_grad()
    def __call__(self, sequences: Sequence[Sequence[int]]) -> list[float]:
        """One number each. Where the model has no token to fill up with, they are read one by one."""
        if self.pad is None and len(sequences) > 1:
            return [self([one])[0] for one in sequences]
        longest = max(len(one) for one in sequences)
        tokens = [[*one, *[self.pad or 0] * (longest - len(one))] for one in sequences]
        mask = [[1] * len(one) + [0] * (longest - len(one)) for one in sequences]
        ids, seen = (torch.tensor(rows, device=self.model.device) for rows in (tokens, mask))
        found: list[float] = self.model(input_ids=ids, attention_mask=seen).logits[:, 0].float().tolist()
        return found


def load_origin(folder: Path, policy: PreTrainedModel, policy_folder: Path) -> Origin:
    """The model in `folder` as the trunk of the policy's critic, and the layer that says its number if it has one."""
    head = head_of(folder)
    if head is not None and len(head[0]) != 1:
        raise ConfigError(
            f"learner.critic_from={folder}: its head has {len(head[0])} labels, and a value is one number. Give a "
            "model with one label, or without such a head."
        )
    ours, theirs = vocabulary(policy_folder), vocabulary(folder)
    if ours is not None and theirs is not None and ours != theirs:
        raise ConfigError(
            f"learner.critic_from={folder}: it reads other tokens than the policy, which a critic cannot. Give a model "
            "with the policy's tokenizer."
        )
    with _quiet():
        trunk = load_model(folder, str(policy.dtype).removeprefix("torch."), str(policy.device), headless=True)
    if trunk.config.vocab_size < policy.config.vocab_size:
        raise ConfigError(
            f"learner.critic_from={folder}: knows {trunk.config.vocab_size} tokens, and the policy "
            f"{policy.config.vocab_size}. Give a model with the policy's tokenizer."
        )
    return Origin(trunk, *(head or (None, None)))


def head_of(folder: Path) -> tuple[Tensor, Tensor | None] | None:
    """Weight and bias of the layer `score`, where the folder has it."""
    found: dict[str, Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as tensors:
            for name in ("score.weight", "score.bias"):
                if name in tensors.keys():  # noqa: SIM118 (it is no mapping)
                    found[name] = tensors.get_tensor(name)
    return (found["score.weight"], found.get("score.bias")) if "score.weight" in found else None


@contextmanager
def _quiet() -> Iterator[None]:
    """The library reports that a head is missing or left over, which is as it should be here."""
    before = library.get_verbosity()
    library.set_verbosity_error()
    try:
        yield
    finally:
        library.set_verbosity(before)
