"""Which execution paths a model runs on, and which faster ones it does not, with the reason.

Every path that is left for a slower one is reported in one line: what is lost, why, and what to do. A run shows these
lines, counts them in its metrics (`engine/fallbacks`, `learner/fallbacks`) and keeps them in `summary.json`."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from enum import Enum
from weakref import WeakKeyDictionary

from transformers import PreTrainedModel

log = logging.getLogger(__name__)


class FastPath(Enum):
    """A faster way of running a model: the part that has it, its name, and how much slower that part is without it, by
    device. The engine's figures are measured (docs/results/real-model.md, engine.md), the learner's are estimates."""

    SAMPLING_LAYERS = ("engine", "fused layers", {"cuda": "about 3 times", "cpu": "about 2 times"})
    SAMPLING_GRAPHS = ("engine", "CUDA graphs", {"cuda": "about 7 times"})
    SAMPLING_COMPILED = ("engine", "compiled steps", {"cpu": "about 2 times"})
    TRAINING_LAYERS = ("learner", "short forward pass", {"cuda": "about 2 times", "cpu": "about 1.3 times"})
    TRAINING_FUSED = ("learner", "fused layers", {"cuda": "about 1.5 times", "cpu": "about 1.3 times"})
    TRAINING_TREES = ("learner", "tree kernels", {"cuda": "10 times and more", "cpu": "about 2 times"})

    @property
    def part(self) -> str:
        return self.value[0]

    @property
    def title(self) -> str:
        return self.value[1]

    def slower(self, device: str) -> str:
        return self.value[2].get(device, "several times")


@dataclass(slots=True)
class _Paths:
    used: dict[str, dict[str, None]] = field(default_factory=dict)
    """By part; names in order."""
    missing: dict[FastPath, str] = field(default_factory=dict)
    """Why each is not used."""


_paths: WeakKeyDictionary[PreTrainedModel, _Paths] = WeakKeyDictionary()


def note_path(model: PreTrainedModel, part: str, name: str) -> None:
    """The part runs this model this way."""
    _paths.setdefault(model, _Paths()).used.setdefault(part, {})[name] = None


def report_fallback(model: PreTrainedModel, path: FastPath, why: str, remedy: str = "") -> None:
    """This path is not used for the model: say so, once."""
    known = _paths.setdefault(model, _Paths())
    if path in known.missing:
        return
    known.missing[path] = why
    log.warning(
        "%s runs %s without %s: it is %s slower. Reason: %s. %s",
        path.part, type(model).__name__, path.title, path.slower(model.device.type), why,
        remedy or "Try model.dtype=float32; if that does not help, please report this line.",
    )  # fmt: skip


def execution_paths(model: PreTrainedModel) -> dict[str, str]:
    """What each part runs the model with, and what it does not have."""
    known = _paths.get(model, _Paths())
    parts = dict.fromkeys((*known.used, *(path.part for path in known.missing)))
    found = {}
    for part in parts:
        without = [f"no {path.title} ({why})" for path, why in known.missing.items() if path.part == part]
        found[part] = ", ".join([*known.used.get(part, {}), *without])
    return found


def fallbacks(model: PreTrainedModel, part: str) -> int:
    """How many faster paths this part has left."""
    return sum(path.part == part for path in _paths.get(model, _Paths()).missing)


def first_line(error: Exception) -> str:
    """An error in one line."""
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0][:200]}" if text else type(error).__name__
