"""Models that say one number of a text: reward models, and what a critic begins as.

Both are transformers' sequence classifiers with one label: a trunk, and a linear layer `score` on its last token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import AutoModelForSequenceClassification, PreTrainedModel

from arborl.errors import ConfigError
from arborl.models.find import vocabulary
from arborl.models.load import device_of, load_model, quiet


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
        begin: the folder may hold a language model; the layer that says the number is then new, and says 0.
    """

    def __init__(self, folder: Path, dtype: str, device: str, begin: bool = False):
        place = device_of(device)
        with quiet():
            self.model = (
                _begun(folder, dtype)
                if begin
                else AutoModelForSequenceClassification.from_pretrained(folder, dtype=getattr(torch, dtype))
            )
        self.model.to(place).eval()
        self.pad: int | None = self.model.config.pad_token_id

    @torch.no_grad()
    def __call__(self, sequences: Sequence[Sequence[int]]) -> list[float]:
        """One number each."""
        found: list[float] = self.scores(sequences).float().tolist()
        return found

    def scores(self, sequences: Sequence[Sequence[int]]) -> Tensor:
        """The same with their gradient. Where the model has no token to fill up with, they are read one by one."""
        if self.pad is None and len(sequences) > 1:
            return torch.cat([self.scores([one]) for one in sequences])
        longest = max(len(one) for one in sequences)
        tokens = [[*one, *[self.pad or 0] * (longest - len(one))] for one in sequences]
        mask = [[1] * len(one) + [0] * (longest - len(one)) for one in sequences]
        ids, seen = (torch.tensor(rows, device=self.model.device) for rows in (tokens, mask))
        found: Tensor = self.model(input_ids=ids, attention_mask=seen, use_cache=False).logits[:, 0]
        return found


def _begun(folder: Path, dtype: str) -> PreTrainedModel:
    """A classifier of one label, with the trunk of the model in `folder`, and its layer `score` where it has one."""
    head = head_of(folder)
    if head is not None and len(head[0]) != 1:
        raise ConfigError(f"{folder}: its head has {len(head[0])} labels, and a reward is one number. Give another.")
    try:
        model, found = AutoModelForSequenceClassification.from_pretrained(
            folder, dtype=getattr(torch, dtype), num_labels=1, trust_remote_code=False, output_loading_info=True
        )
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # files of others break in any way they like
        why = str(error).strip().splitlines()[0] if str(error).strip() else ""
        raise ConfigError(
            f"{folder}: cannot be read as a classifier ({type(error).__name__}: {why}). Give a language model that "
            "transformers has as …ForSequenceClassification."
        ) from error
    missing = sorted(name for name in found["missing_keys"] if not name.startswith("score."))
    if missing or not hasattr(model, "score"):
        what = f"its weight {missing[0]} is missing" if missing else "its classifier has no layer called score"
        raise ConfigError(f"{folder}: {what}. Give a language model with all its weights.")
    if head is None:
        torch.nn.init.zeros_(model.score.weight)
    if model.config.pad_token_id is None:
        ends = model.config.eos_token_id
        model.config.pad_token_id = ends[0] if isinstance(ends, list) else ends
    return model  # type: ignore[no-any-return]


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
    with quiet():
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
