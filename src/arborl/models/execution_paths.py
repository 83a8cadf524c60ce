"""The execution paths of a model and the fallbacks from faster ones.

Every fallback is logged in one line with its cost, reason and remedy. A run counts fallbacks in its metrics
(`engine/fallbacks`, `learner/fallbacks`) and stores them in `summary.json`.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from enum import Enum
from weakref import WeakKeyDictionary

from transformers import PreTrainedModel

log = logging.getLogger(__name__)


class FastPath(Enum):
    """A fast execution path: its part, title, and the slowdown without it by device, measured with SmolLM2 on an H200
    and with seedling on two CPU cores (docs/results/real-model.md, engine.md)."""

    SAMPLING_LAYERS = ("engine", "fused layers", {"cuda": "about 3 times", "cpu": "about 2 times"})
    SAMPLING_GRAPHS = ("engine", "CUDA graphs", {"cuda": "about 7 times"})
    SAMPLING_COMPILED = ("engine", "compiled steps", {"cpu": "about 2 times"})
    TRAINING_LAYERS = ("learner", "short forward pass", {"cuda": "about 2 times", "cpu": "hardly"})
    TRAINING_FUSED = ("learner", "fused layers", {"cuda": "hardly", "cpu": "about 1.1 times"})
    TRAINING_TREES = ("learner", "tree kernels", {"cuda": "3 times or more", "cpu": "about 1.2 times"})

    @property
    def part(self) -> str:
        return self.value[0]

    @property
    def title(self) -> str:
        return self.value[1]

    def slower(self, device: str) -> str:
        return self.value[2].get(device, "several times")


@dataclass(slots=True)
class _ModelPaths:
    used: dict[str, dict[str, None]] = field(default_factory=dict)  # names of used paths by part
    missing: dict[FastPath, str] = field(default_factory=dict)  # reasons of fallbacks


_paths: WeakKeyDictionary[PreTrainedModel, _ModelPaths] = WeakKeyDictionary()


def record_path(model: PreTrainedModel, part: str, name: str) -> None:
    _paths.setdefault(model, _ModelPaths()).used.setdefault(part, {})[name] = None


def report_fallback(model: PreTrainedModel, path: FastPath, reason: str, remedy: str = "") -> None:
    known = _paths.setdefault(model, _ModelPaths())
    if path in known.missing:
        return
    known.missing[path] = reason
    log.warning(
        "%s runs %s without %s and is %s slower. Reason: %s. %s",
        path.part, type(model).__name__, path.title, path.slower(model.device.type), reason,
        remedy or "Try model.dtype=float32; if that does not help, please report this line.",
    )  # fmt: skip


def execution_paths(model: PreTrainedModel) -> dict[str, str]:
    known = _paths.get(model, _ModelPaths())
    parts = dict.fromkeys((*known.used, *(path.part for path in known.missing)))
    found = {}
    for part in parts:
        without = [f"no {path.title} ({reason})" for path, reason in known.missing.items() if path.part == part]
        found[part] = ", ".join([*known.used.get(part, {}), *without])
    return found


def count_fallbacks(model: PreTrainedModel, part: str) -> int:
    return sum(path.part == part for path in _paths.get(model, _ModelPaths()).missing)


def first_line(error: Exception) -> str:
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0][:200]}" if text else type(error).__name__
