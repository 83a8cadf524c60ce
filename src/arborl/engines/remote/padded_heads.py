"""The same model with larger attention heads, padded by zeros: its outputs stay the same.

Kernels support some head sizes only; vLLM's CPU kernels lack seedling's 40. In a head of 64 instead of 40, rotary
frequencies stay the same if the rotary base is raised to the power of 64/40, and scores if queries are multiplied by
√(64/40). Padding stays zero in training: each padded weight is multiplied by a zero, so its gradient is zero.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

MODEL_TYPES = ("llama", "mistral", "qwen2")
"""Model types with Llama's attention: no norm within heads."""
ROWS = re.compile(r"\.(q|k|v)_proj\.(base_layer\.)?(weight|bias|lora_B\..*)$")
COLUMNS = re.compile(r"\.o_proj\.(base_layer\.)?(weight|lora_A\..*)$")


class PaddedHeads:
    """Heads of size `small` in heads of size `large`."""

    def __init__(self, small: int, large: int):
        self.small, self.large = small, large
        half = torch.arange(small // 2)
        self.index = torch.cat([half, half + large // 2])
        """Target index of each element: the two of a rotary pair are half a head apart."""

    def config(self, config: Mapping[str, Any]) -> dict[str, Any]:
        rope = dict(config.get("rope_parameters") or {})
        theta = float(rope.get("rope_theta") or config.get("rope_theta") or 10000.0)
        rope_type = rope.get("rope_type", "default")
        if config.get("model_type") not in MODEL_TYPES or rope_type != "default" or config.get("rope_scaling"):
            raise ValueError(
                f"heads of {self.small} are only padded in models like {', '.join(MODEL_TYPES)} "
                "with plain rotary positions"
            )
        scaled_theta = theta ** (self.large / self.small)
        return {
            **config,
            "head_dim": self.large,
            "rope_parameters": {**rope, "rope_type": "default", "rope_theta": scaled_theta},
        }

    def tensor(self, name: str, tensor: Tensor) -> Tensor:
        if match := ROWS.search(name):
            scale = (self.large / self.small) ** 0.5 if match[1] == "q" else 1.0
            return self._pad(tensor * scale, 0)
        return self._pad(tensor, 1) if COLUMNS.search(name) else tensor

    def _pad(self, tensor: Tensor, axis: int) -> Tensor:
        heads = tensor.shape[axis] // self.small
        index = (torch.arange(heads)[:, None] * self.large + self.index).flatten().to(tensor.device)
        shape = list(tensor.shape)
        shape[axis] = heads * self.large
        return tensor.new_zeros(shape).index_copy_(axis, index, tensor.contiguous())


def head_size(config: Mapping[str, Any]) -> int:
    heads = config.get("num_attention_heads") or config.get("n_head") or 1
    return int(config.get("head_dim") or (config.get("hidden_size") or config.get("n_embd") or 0) // heads)


def export_padded(folder: Path, target: Path, large: int) -> Path:
    """Write the model of a folder with larger heads, in float32 because bfloat16 rounds the scaled queries. Tokenizer
    and template are copied; the result can be trained as `model.name`."""
    import shutil

    from safetensors.torch import load_file, save_file

    source = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    heads = PaddedHeads(head_size(source), large)
    config = {**heads.config(source), "dtype": "float32"}
    target.mkdir(parents=True, exist_ok=True)
    for file in folder.iterdir():
        if file.suffix == ".safetensors":
            tensors = {name: heads.tensor(name, tensor.float()) for name, tensor in load_file(file).items()}
            save_file(tensors, target / file.name, metadata={"format": "pt"})
        elif file.is_file():
            shutil.copyfile(file, target / file.name)
    (target / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    return target
