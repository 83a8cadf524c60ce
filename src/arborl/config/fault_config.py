"""Faults that a run injects into its own parts: which part, what happens, how often and when."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, model_validator

from arborl.config.config_base import Config, as_list
from arborl.errors import did_you_mean

Part = Literal["environment", "tool", "reward", "engine", "disk"]
FAULT_KINDS: dict[str, tuple[str, ...]] = {
    "environment": ("raise", "hang", "late", "lie", "die"),
    "tool": ("raise", "hang", "late"),
    "reward": ("raise", "hang", "late", "nan"),
    "engine": ("raise", "late", "die"),
    "disk": ("full",),
}
"""What can happen to each part."""
WRITES = ("checkpoint", "episodes")
"""Names of the files of `part: disk`."""


def _as_steps(value: object) -> object:
    return (value,) if isinstance(value, int) else value


class FaultTime(Config):
    """When a fault may happen."""

    step: Annotated[tuple[int, ...], BeforeValidator(_as_steps)] = ()
    """Steps, from 1: those whose weights the episode is sampled for. Empty for all."""

    @model_validator(mode="after")
    def _check_steps(self) -> FaultTime:
        if any(step < 1 for step in self.step):
            raise ValueError(f"step={min(self.step)}: steps are counted from 1.")
        return self


class FaultConfig(Config):
    """One rule: a part, what happens to it, and how often."""

    part: Part
    kind: str
    """`raise` an error; `hang` until the deadline; `late`: answer after `seconds`; `lie`: an environment returns a
    reward of NaN or no observation; `nan`: a reward is NaN; `die`: the process of the environment, or of
    the engine on Ray, is killed; `full`: a file cannot be written because the disk is full."""
    name: str | None = None
    """Only the environment, tool or reward of this name; for `disk` `checkpoint` or `episodes`. Default: all."""
    rate: float = Field(1.0, gt=0, le=1)
    """Share of the calls that are hit. Which ones follows from the seed, the episode and the number of the call."""
    at: FaultTime = FaultTime()
    """When: `{step: 12}` or `{step: [3, 7]}`. Default: always."""
    once: bool = False
    """Only the first call that is hit."""
    seconds: float | None = Field(None, gt=0, le=3600)
    """How late, for `late`. Default: 1."""

    @model_validator(mode="after")
    def _check_kind(self) -> FaultConfig:
        kinds = FAULT_KINDS[self.part]
        if self.kind not in kinds:
            near = did_you_mean(self.kind, kinds)
            raise ValueError(f"kind={self.kind}: part={self.part} can {', '.join(kinds)}.{near}")
        if self.part == "engine" and self.name is not None:
            raise ValueError(f"name={self.name}: a run has one engine. Leave it out.")
        if self.part == "disk" and self.name not in (None, *WRITES):
            raise ValueError(f"name={self.name}: part=disk writes {' or '.join(WRITES)}.")
        if self.seconds is not None and self.kind != "late":
            raise ValueError(f"seconds is for kind=late; given with kind={self.kind}. Leave it out.")
        return self

    @property
    def delay(self) -> float:
        """Seconds of `late`."""
        return 1.0 if self.seconds is None else self.seconds

    @property
    def label(self) -> str:
        """Name of its metric."""
        return f"faults/{self.part}/{self.kind}"


class FaultsConfig(Config):
    """Faults that are injected on purpose, to see how a run behaves. See docs/faults.md."""

    seed: int | None = Field(None, ge=0)
    """Seed of the choice of calls. Default: the seed of the run."""
    rules: Annotated[tuple[FaultConfig, ...], BeforeValidator(as_list)] = ()
    """The faults. Empty: none; a run with rules is marked in `config.yaml`, its title and `summary.json`."""
