"""What stands around an advantage and a loss: penalties, guards, the critic's loss, a trust region."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field, model_validator

from arborl.config.base import Config


class KLConfig(Config):
    """Penalty for leaving the reference policy (the policy at the start of the run, adapters included)."""

    coef: float = Field(0.0, ge=0)
    """0 keeps no reference model."""
    estimator: Literal["k1", "k2", "k3", "mse", "abs"] = "k3"
    where: Literal["loss", "reward"] = "loss"
    """Added to each token's loss, or taken off the reward before advantages are computed."""
    target: float | None = Field(None, gt=0)
    """With `where=reward`: `coef` is moved step by step until an episode's KL is this; without it, `coef` stays."""
    horizon: int = Field(10_000, ge=1)
    """With a `target`: episodes over which `coef` may change by a fifth."""

    @model_validator(mode="after")
    def _fits_together(self) -> KLConfig:
        if self.target is not None and (self.where != "reward" or self.coef == 0):
            raise ValueError("target moves a penalty in the reward. Write where=reward and a coef above 0 to start at.")
        if self.horizon != 10_000 and self.target is None:
            raise ValueError("horizon is read with a target only. Write target too, or leave horizon out.")
        return self


class ValueConfig(Config):
    """The critic's loss: half the squared distance from its target."""

    coef: float = Field(0.5, gt=0)
    clip: float | None = Field(None, gt=0)
    """An estimate earns nothing for moving further than this from what it was before the update."""


class ImportanceWeightConfig(Config):
    """Against the gap between the policy that sampled and the one that learns, by the ratio of the two. A bare string
    is the kind.

    `tis` cuts the ratio at `high`; `mis` drops what is outside `low` to `high`; `icepop` does the same, token by token,
    with closer bounds.
    """

    shorthand: ClassVar[str] = "kind"

    kind: Literal["none", "tis", "mis", "icepop"] = "none"
    level: Literal["token", "sequence"] = "token"
    """`sequence`: one ratio for all tokens of an episode (or call, see `sequence`), the geometric mean of theirs."""
    low: float | None = Field(None, ge=0)
    """Without one: 0 for `mis`, 0.5 for `icepop`."""
    high: float | None = Field(None, gt=0)
    """Without one: 2 for `tis` and `mis`, 5 for `icepop`."""

    @property
    def bounds(self) -> tuple[float, float]:
        """The bounds in force."""
        low, high = {"icepop": (0.5, 5.0)}.get(self.kind, (0.0, 2.0))
        return low if self.low is None else self.low, high if self.high is None else self.high

    @model_validator(mode="after")
    def _fits_together(self) -> ImportanceWeightConfig:
        given = [name for name in ("low", "high") if getattr(self, name) is not None]
        if self.kind == "none" and (given or self.level != "token"):
            raise ValueError(f"{(given or ['level'])[0]} is given without a kind. Write kind=tis, mis or icepop.")
        if self.kind == "tis" and self.low is not None:
            raise ValueError("tis cuts at high only. Leave low out, or write kind=mis.")
        if self.kind == "icepop" and self.level == "sequence":
            raise ValueError("icepop looks at tokens one by one. Leave level out, or write kind=mis.")
        low, high = self.bounds
        if low >= high:
            raise ValueError(f"low={low:g} is not below high={high:g}.")
        return self


class OverlongConfig(Config):
    """What becomes of episodes that ran out of room."""

    filter: bool = False
    """Leave episodes that were cut short (context full, turns used up, reply too long) out of baseline and loss."""
    penalty: float = Field(0.0, ge=0)
    """Taken off the reward of an episode with `max_tokens` sampled tokens or more; grows over the last `buffer`."""
    max_tokens: int = Field(0, ge=0)
    buffer: int = Field(0, ge=0)

    @model_validator(mode="after")
    def _fits_together(self) -> OverlongConfig:
        if self.penalty and not 0 < self.buffer <= self.max_tokens:
            raise ValueError("a penalty needs to know where it begins. Write max_tokens and a buffer of at most that.")
        if not self.penalty and (self.max_tokens or self.buffer):
            raise ValueError("max_tokens and buffer are read with a penalty only. Write penalty=1, or leave them out.")
        return self


class TrustRegionConfig(Config):
    """TRPO's step: as far as the natural gradient leads inside a bound on the KL from the policy before the update."""

    max_kl: float = Field(0.01, gt=0)
    """Mean KL over terms, by their weight, that a step may cause."""
    damping: float = Field(0.1, ge=0)
    """Added to the Fisher matrix's diagonal."""
    cg_iterations: int = Field(10, ge=1)
    """Conjugate-gradient iterations."""
    backtracks: int = Field(10, ge=0)
    """Times the step may be shortened until surrogate and KL are right; after that the weights stay."""
    backtrack_ratio: float = Field(0.5, gt=0, lt=1)
    """By how much it is shortened each time."""
