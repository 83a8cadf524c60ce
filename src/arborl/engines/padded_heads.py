"""The same model with larger attention heads: zeros are added, and what it says stays the same.

Kernels are made for some head sizes only; vLLM's on a CPU lack seedling's 40. A head of 40 numbers in a head of 64: its
numbers keep their rotary frequencies where the base of the embedding is raised to the power of 64/40, scores keep their
scale where queries are multiplied by √(64/40), and the rest is zero. Training leaves it zero: each of these weights is
multiplied with another zero, so that none has a gradient.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

KINDS = ("llama", "mistral", "qwen2")
"""Whose attention is that of Llama: no norm and no bound inside a head."""
ROWS = re.compile(r"\.(q|k|v)_proj\.(base_layer\.)?(weight|bias|lora_B\..*)$")
COLUMNS = re.compile(r"\.o_proj\.(base_layer\.)?(weight|lora_A\..*)$")


class PaddedHeads:
    """Heads of `small` numbers in heads of `large`.

    Example:
        heads = PaddedHeads(40, 64)
        weights = {name: heads.tensor(name, tensor) for name, tensor in model.state_dict().items()}
    """

    def __init__(self, small: int, large: int):
        self.small, self.large = small, large
        half = torch.arange(small // 2)
        self.place = torch.cat([half, half + large // 2])
        """Where each number of a head goes: the two of a rotary pair are half a head apart."""

    def config(self, about: Mapping[str, Any]) -> dict[str, Any]:
        """The model's `config.json` with such heads."""
        rope = dict(about.get("rope_parameters") or {})
        theta = float(rope.get("rope_theta") or about.get("rope_theta") or 10000.0)
        kind = rope.get("rope_type", "default")
        if about.get("model_type") not in KINDS or kind != "default" or about.get("rope_scaling"):
            raise ValueError(
                f"heads of {self.small} are only padded in models like {', '.join(KINDS)} with plain rotary positions"
            )
        raised = theta ** (self.large / self.small)
        return {
            **about,
            "head_dim": self.large,
            "rope_parameters": {**rope, "rope_type": "default", "rope_theta": raised},
        }

    def tensor(self, name: str, tensor: Tensor) -> Tensor:
        """A weight, or a factor of its adapter, as it is with such heads."""
        if found := ROWS.search(name):
            scale = (self.large / self.small) ** 0.5 if found[1] == "q" else 1.0
            return self._spread(tensor * scale, 0)
        return self._spread(tensor, 1) if COLUMNS.search(name) else tensor

    def _spread(self, tensor: Tensor, axis: int) -> Tensor:
        heads = tensor.shape[axis] // self.small
        index = (torch.arange(heads)[:, None] * self.large + self.place).flatten().to(tensor.device)
        shape = list(tensor.shape)
        shape[axis] = heads * self.large
        return tensor.new_zeros(shape).index_copy_(axis, index, tensor.contiguous())


def head_size(about: Mapping[str, Any]) -> int:
    """Numbers of an attention head."""
    heads = about.get("num_attention_heads") or about.get("n_head") or 1
    return int(about.get("head_dim") or (about.get("hidden_size") or about.get("n_embd") or 0) // heads)


def export_padded(folder: Path, target: Path, large: int) -> Path:
    """Write the model of a folder with larger heads, tokenizer and template beside it; any program that loads models
    runs the result, and a run may train it as `model.name`. It is in float32: bfloat16 cannot hold scaled queries.

    Example:
        export_padded(resolve("seedling"), Path("seedling-64"), 64)
    """
    import shutil

    from safetensors.torch import load_file, save_file

    about = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    heads = PaddedHeads(head_size(about), large)
    config = {**heads.config(about), "dtype": "float32"}
    target.mkdir(parents=True, exist_ok=True)
    for file in folder.iterdir():
        if file.suffix == ".safetensors":
            tensors = {name: heads.tensor(name, tensor.float()) for name, tensor in load_file(file).items()}
            save_file(tensors, target / file.name, metadata={"format": "pt"})
        elif file.is_file():
            shutil.copyfile(file, target / file.name)
    (target / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    return target
