"""Output heads: value head, float32 logits, sequence classifiers as reward models, and the initial critic.

A reward model is transformers' sequence classifier with one label: a trunk and a linear layer `score` at the last
token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers import AutoModelForSequenceClassification, PreTrainedModel

from arborl.errors import ConfigError
from arborl.models.execution_paths import first_line
from arborl.models.model_files import tokenizer_vocabulary
from arborl.models.model_loading import device_of, load_model, weight_loading


class ValueHead(nn.Module):
    """One value per hidden state, initially 0 or by the given weights; in float32, or float64 as the model."""

    def __init__(self, model: PreTrainedModel, weight: Tensor | None = None, bias: Tensor | None = None):
        super().__init__()
        dtype = torch.float64 if model.dtype == torch.float64 else torch.float32
        size = model.get_output_embeddings().weight.shape[-1]
        self.weight = nn.Parameter(torch.zeros(1, int(size), dtype=dtype, device=model.device))
        self.bias = nn.Parameter(torch.zeros(1, dtype=dtype, device=model.device))
        with torch.no_grad():
            for parameter, initial in ((self.weight, weight), (self.bias, bias)):
                if initial is not None:
                    parameter.copy_(initial)

    def forward(self, hidden_ME: Tensor) -> Tensor:
        return linear(hidden_ME.to(self.weight.dtype), self.weight, self.bias)[:, 0].clone()  # hooks allow no view


class Float32Linear(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return linear(input.float(), self.weight.float(), None if self.bias is None else self.bias.float())


def float32_head(model: PreTrainedModel) -> None:
    """Compute the model's logits in float32 from now on, in engine and learner; names and tied weights stay."""
    head = model.get_output_embeddings()
    if type(head) is not nn.Linear:
        raise ValueError(f"the output head is a {type(head).__name__} and not a plain linear layer")
    if head.weight.dtype in (torch.bfloat16, torch.float16):
        head.__class__ = Float32Linear


class SequenceScorer:
    def __init__(self, folder: Path, dtype: str, device: str, begin: bool = False):
        place = device_of(device)
        with weight_loading():
            self.model = (
                _new_classifier(folder, dtype)
                if begin
                else AutoModelForSequenceClassification.from_pretrained(folder, dtype=getattr(torch, dtype))
            )
        self.model.to(place).eval()
        self.pad: int | None = self.model.config.pad_token_id

    @torch.no_grad()
    def __call__(self, sequences: Sequence[Sequence[int]]) -> list[float]:
        found: list[float] = self.scores(sequences).float().tolist()
        return found

    def scores(self, sequences: Sequence[Sequence[int]]) -> Tensor:
        if self.pad is None and len(sequences) > 1:
            return torch.cat([self.scores([one]) for one in sequences])
        longest = max(len(one) for one in sequences)
        tokens = [[*one, *[self.pad or 0] * (longest - len(one))] for one in sequences]
        mask = [[1] * len(one) + [0] * (longest - len(one)) for one in sequences]
        ids, attention_mask = (torch.tensor(rows, device=self.model.device) for rows in (tokens, mask))
        found: Tensor = self.model(input_ids=ids, attention_mask=attention_mask, use_cache=False).logits[:, 0]
        return found


def _new_classifier(folder: Path, dtype: str) -> PreTrainedModel:
    """A classifier with one label from the model in `folder`, with its `score` layer if it has one."""
    head = score_head(folder, "")
    try:
        model, info = AutoModelForSequenceClassification.from_pretrained(
            folder, dtype=getattr(torch, dtype), num_labels=1, trust_remote_code=False, output_loading_info=True
        )
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # broken files raise anything
        raise ConfigError(
            f"{folder}: cannot be read as a classifier ({first_line(error)}). Give a language model that transformers "
            "has as …ForSequenceClassification."
        ) from error
    missing = sorted(name for name in info["missing_keys"] if not name.startswith("score."))
    if missing or not hasattr(model, "score"):
        problem = f"its weight {missing[0]} is missing" if missing else "its classifier has no layer called score"
        raise ConfigError(f"{folder}: {problem}. Give a language model with all its weights.")
    if head is None:
        torch.nn.init.zeros_(model.score.weight)
    if model.config.pad_token_id is None:
        ends = model.config.eos_token_id
        model.config.pad_token_id = ends[0] if isinstance(ends, list) else ends
    return model  # type: ignore[no-any-return]


@dataclass(frozen=True, slots=True)
class CriticInit:
    trunk: PreTrainedModel
    weight: Tensor | None  # `[1, hidden]`, of the `score` layer; None without one
    bias: Tensor | None


def load_critic_init(folder: Path, policy: PreTrainedModel, policy_folder: Path) -> CriticInit:
    """The model in `folder` as the trunk of the policy's critic, with its `score` layer if it has one."""
    head = score_head(folder, "learner.critic_from=")
    ours, theirs = tokenizer_vocabulary(policy_folder), tokenizer_vocabulary(folder)
    if ours is not None and theirs is not None and ours != theirs:
        raise ConfigError(
            f"learner.critic_from={folder}: its tokenizer differs from the policy's. Give a model with the policy's "
            "tokenizer."
        )
    with weight_loading():
        trunk = load_model(folder, str(policy.dtype).removeprefix("torch."), str(policy.device), headless=True)
    if trunk.config.vocab_size < policy.config.vocab_size:
        raise ConfigError(
            f"learner.critic_from={folder}: its vocabulary has {trunk.config.vocab_size} tokens, and the policy's "
            f"{policy.config.vocab_size}. Give a model with the policy's tokenizer."
        )
    return CriticInit(trunk, *(head or (None, None)))


def score_head(folder: Path, setting: str) -> tuple[Tensor, Tensor | None] | None:
    """Weight and bias of the `score` layer, if the folder has one; ConfigError if it has several labels."""
    found: dict[str, Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as tensors:
            for name in ("score.weight", "score.bias"):
                if name in tensors.keys():  # noqa: SIM118 (it is no mapping)
                    found[name] = tensors.get_tensor(name)
    if "score.weight" not in found:
        return None
    if (labels := len(found["score.weight"])) != 1:
        raise ConfigError(
            f"{setting}{folder}: its head has {labels} labels, and a value is one number. Give a model with one label."
        )
    return found["score.weight"], found.get("score.bias")
