"""How reward becomes gradient: an advantage, a loss, and what both read.

`name` is a preset: a row of `PRESETS`, settings that go together. Whatever is written beside it wins. A setting that
the chosen advantage and loss do not read is an error, so none is silently ignored.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, get_args

from pydantic import BeforeValidator, Field, model_validator

from arborl.config.algorithm_parts import (
    ImportanceWeightConfig,
    KLConfig,
    OverlongConfig,
    TrustRegionConfig,
    ValueConfig,
)
from arborl.config.base import Config, spelt_out
from arborl.config.presets import (
    ADVANTAGE_READS,
    BY_ADVANTAGE,
    BY_LOSS,
    COMPARES,
    LOSS_READS,
    OWN_ADVANTAGE,
    OWN_LOSS,
    PRESETS,
)
from arborl.errors import did_you_mean


def _whitening(given: Any) -> Any:
    known = {"true": True, "false": False, "episode": True, "none": False, "token": "token"}
    name = str(given).lower() if isinstance(given, bool | str) else ""
    if name not in known:
        near = did_you_mean(name, known)
        raise ValueError(f"must be one of false, true, episode, token; given {given!r}.{near}")
    return known[name]


Advantage = Literal[
    "grpo", "rloo", "reinforce", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "remax", "gae", "opo", "maxrl",
    "gdpo", "gigpo", "starpo", "step_reinforce", "turn_discounted", "rae",
]  # fmt: skip
Loss = Literal[
    "ppo", "gspo", "cispo", "sapo", "topr", "a2c", "pg", "decoupled_ppo", "trpo", "dpo", "ipo", "kto", "sft", "distill"
]
Preset = Literal[
    "grpo", "dr_grpo", "dapo", "bnpo", "gspo", "cispo", "sapo", "topr", "decoupled_ppo", "rloo", "reinforce",
    "reinforce_plus_plus", "reinforce_plus_plus_baseline", "remax", "ppo", "a2c", "trpo", "opo", "maxrl", "gdpo",
    "gigpo", "starpo", "step_reinforce", "turn_discounted", "rae", "dpo", "ipo", "kto", "sft", "distill",
]  # fmt: skip


def is_own(name: str) -> bool:
    """Whether a name leads to a function of the user's own: `package.module:function`, or one that was handed in."""
    return ":" in name


def _named(table: tuple[str, ...]) -> BeforeValidator:
    def check(given: Any) -> str:
        if isinstance(given, str) and (given in table or is_own(given)):
            return given
        near = did_you_mean(str(given), table)
        raise ValueError(
            f"must be one of {', '.join(table)}, or your own as package.module:function; given {given!r}.{near}"
        )

    return BeforeValidator(check)


class AlgorithmConfig(Config):
    """How reward becomes gradient."""

    shorthand: ClassVar[str] = "name"

    name: Preset = "grpo"
    """A preset: an advantage, a loss and settings that go together. What is written beside it wins."""
    advantage: Annotated[str, _named(get_args(Advantage))] = "grpo"
    """How much better than it might have been: see `arborl.algorithms.ADVANTAGES`; or a function of your own,
    `package.module:function` (docs/algorithms.md)."""
    loss: Annotated[str, _named(get_args(Loss))] = "ppo"
    """See `arborl.algorithms.LOSSES`; or a function of your own. `dpo`, `ipo`, `kto`, `sft` and `distill` read no
    advantage."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Settings of an advantage or a loss of your own; checked against their signatures."""

    baseline: Literal["mean", "none"] = "mean"
    """What is taken off an episode's reward: the mean of its group, or nothing."""
    std: Literal["none", "group", "batch"] = "none"
    """What the difference is divided by: nothing, the group's standard deviation (as `grpo` and its kin are published,
    and their presets say), or that of the batch. `dr_grpo` and the presets by turn divide by nothing."""
    gamma: float = Field(1.0, ge=0, le=1)
    """Discount, by turn (with `gae_level=token`, by token)."""
    gae_lambda: float = Field(0.95, ge=0, le=1)
    """0 trusts the critic, 1 the rewards."""
    gae_level: Literal["turn", "token"] = "turn"
    """What one step of GAE is."""
    bootstrap: bool = False
    """Whether GAE takes the critic's word for what would have followed in an episode that was cut short (`truncated` by
    its environment, turns used up, context full), instead of nothing. See docs/algorithms.md."""
    whiten: Annotated[bool | Literal["token"], BeforeValidator(_whitening)] = False
    """Bring the batch's advantages to mean 0 and deviation 1. `true`, or `episode`: with one vote an episode, and those
    that compare the episodes of a group, which lie around 0 already, are only divided. `token`: with one vote a token,
    as verl and ROLL do; a flat group then need not stay at 0."""
    step_weight: float = Field(1.0, ge=0)
    """GiGPO's omega: weight of the comparison between equal states beside that between whole episodes."""
    baseline_decay: float = Field(0.95, ge=0, lt=1)
    """How much of a role's running baseline survives a step."""
    reward_weights: dict[str, float] = Field(default_factory=dict)
    """By reward name, for `gdpo`, which takes each reward to the same scale first; others weigh 1."""
    split: Literal["broadcast", "last", "uniform", "geometric"] = "broadcast"
    """How an episode's advantage reaches its branches: all to each, all to the last, equal or growing parts."""
    split_ratio: float = Field(0.9, gt=0, le=1)
    """With `split=geometric`: what a branch gets of the next one's part."""

    clip_low: float = Field(0.2, ge=0, lt=1)
    clip_high: float = Field(0.2, ge=0)
    dual_clip: float | None = Field(None, gt=1)
    """Largest ratio that counts against a bad token."""
    advantage_clip: float | None = Field(None, gt=0)
    """No advantage counts for more than this, good or bad; they are held to it after all else is done to them."""
    sequence: Literal["episode", "call"] = "episode"
    """What a sequence is, for ratios over sequences."""
    tau_positive: float = Field(1.0, gt=0)
    """SAPO's temperature for good tokens."""
    tau_negative: float = Field(1.05, gt=0)
    """SAPO's temperature for bad tokens."""
    behaviour_cap: float | None = Field(5.0, gt=1)
    """`decoupled_ppo` leaves out tokens that the policy before the update found this many times as likely as the
    policy that sampled them."""
    anchor: Literal["auto", "rollout", "proximal"] = "auto"
    """Policy that ratios are taken against: the one that sampled, or the one the update began with. `auto` is the
    latter with a guard, which makes up for the difference, and where the loss holds ratios to less than a tenth around
    1 (`gspo`), which the difference alone could leave; else the former."""
    teacher: str | None = None
    """Whom `distill` learns from: a model as in `model.name`, with the policy's tokenizer; or the address of a server
    that says how likely a prompt's tokens are (vLLM), such as `http://127.0.0.1:8000/v1?model=NAME`."""
    beta: float = Field(0.1, gt=0)
    """How close preferences hold the policy to the reference."""
    pairs: Literal["best_worst", "all"] = "best_worst"
    """Which two episodes of a group are a preference."""
    min_gap: float = Field(0.0, ge=0)
    """Rewards of a pair differ by more than this."""
    reward_threshold: float = 0.5
    """Episodes with at least this reward are good: `sft` learns from them alone, `kto` prefers them."""

    aggregation: Literal["token", "episode", "call", "fixed"] = "episode"
    """One vote an episode (its tokens share it), a token (long episodes then weigh more), or a call; `fixed` sums an
    episode's tokens and divides by `fixed_length`."""
    fixed_length: int = Field(1024, ge=1)
    skip_zero_variance: bool = True
    """Leave groups whose episodes all scored alike out of the learner's batch and of the loss's denominator."""
    entropy_coef: float = Field(0.0, ge=0)
    """Bonus for staying uncertain."""
    staleness_decay: float = Field(1.0, gt=0, le=1)
    """What a token's loss keeps for each version that its policy is older than the batch's newest."""
    kl: KLConfig = KLConfig()
    value: ValueConfig = ValueConfig()
    importance_weights: ImportanceWeightConfig = ImportanceWeightConfig()
    overlong: OverlongConfig = OverlongConfig()
    trust_region: TrustRegionConfig = TrustRegionConfig()
    by_source: dict[str, AlgorithmConfig] = Field(default_factory=dict)
    """Another algorithm, whole, for tasks of a source by its name. Sources weigh by their episodes."""

    @model_validator(mode="before")
    @classmethod
    def _from_preset(cls, given: Any) -> Any:
        """Fill in what is not written. Of the following, the later goes over the earlier:

        1. what suits the preset's own advantage and loss (`BY_ADVANTAGE`, `BY_LOSS`);
        2. the preset (`PRESETS`);
        3. what suits an advantage or loss that is written in place of the preset's;
        4. what is written.

        Of 1 to 3 only settings that the chosen advantage and loss read.
        """
        given = spelt_out(cls, given)
        if not isinstance(given, Mapping) or str(given.get("name", "grpo")) not in PRESETS:
            return given
        preset = {"advantage": "grpo", "loss": "ppo"} | PRESETS[str(given.get("name", "grpo"))]
        chosen = preset | dict(given)
        below: dict[str, Any] = {}
        above: dict[str, Any] = {}
        for key, table in (("loss", BY_LOSS), ("advantage", BY_ADVANTAGE)):
            (below if chosen[key] == preset[key] else above).update(table.get(str(chosen[key]), {}))
        if is_own(str(chosen["advantage"])):  # nobody knows whether it compares, so no group is dropped unasked
            above["skip_zero_variance"] = False
        reads = reads_of(chosen)
        return {key: value for key, value in (below | preset | above).items() if key in reads} | dict(given)

    @model_validator(mode="after")
    def _no_setting_in_vain(self) -> AlgorithmConfig:
        reads = reads_of({name: getattr(self, name) for name in type(self).model_fields})
        for name, field in type(self).model_fields.items():
            value = getattr(self, name)
            if name not in reads and value != field.get_default(call_default_factory=True):
                raise ValueError(self._in_vain(name, value))
        return self

    def _in_vain(self, name: str, value: Any) -> str:
        shown = "" if isinstance(value, Config | dict) else f"={value}"
        credited = "advantage" in loss_reads(self.loss)
        mine = f"advantage={self.advantage} and loss={self.loss}" if credited else f"loss={self.loss}"
        by_loss = [key for key, read in LOSS_READS.items() if name in read]
        by_advantage = [key for key, read in ADVANTAGE_READS.items() if name in read]
        if name in SWITCHED:
            instead = SWITCHED[name]
        elif by_loss:
            instead = f"loss={any_of(by_loss)}"
        else:
            instead = f"advantage={any_of(by_advantage)}" + ("" if credited else " and a loss that reads it, as ppo")
        return f"{name}{shown} is not read with {mine}. Leave it out, or write {instead}."

    @model_validator(mode="after")
    def _fits_together(self) -> AlgorithmConfig:
        if self.anchor == "rollout" and self.importance_weights.kind != "none":
            raise ValueError(
                f"importance_weights={self.importance_weights.kind} makes up for the gap between rollout and learner, and anchor=rollout would "
                "do so again. Leave anchor out."
            )
        if self.loss == "a2c" and self.advantage != "gae":
            raise ValueError(f"loss=a2c has a critic, advantage={self.advantage} none. Write advantage=gae or loss=pg.")
        if self.advantage == "maxrl" and self.kl.where == "reward":
            raise ValueError(
                "advantage=maxrl divides by the mean reward, which a penalty could turn. Write where=loss."
            )
        for source, other in self.by_source.items():
            if other.by_source:
                raise ValueError(f"by_source.{source} has a by_source of its own. Write its sources beside it.")
            if "trpo" in (self.loss, other.loss) and self.loss != other.loss:
                raise ValueError("loss=trpo takes the step of the whole batch. Write it for every source or for none.")
        return self

    @property
    def all(self) -> tuple[AlgorithmConfig, ...]:
        """This one, and those of sources."""
        return (self, *self.by_source.values())

    @property
    def compares(self) -> bool:
        """Whether an episode alone in its group would learn nothing."""
        if self.loss in ("dpo", "ipo"):
            return True
        return self.baseline == "mean" and self.advantage in COMPARES and "advantage" in loss_reads(self.loss)

    @property
    def drops_flat(self) -> bool:
        """Whether groups whose episodes all scored alike are left out."""
        return self.skip_zero_variance and (self.compares or is_own(self.advantage))

    @property
    def kl_in_reward(self) -> bool:
        """Whether tokens pay for leaving the reference before advantages are computed."""
        return self.kl.where == "reward" and self.kl.coef > 0

    @property
    def leeway(self) -> float:
        """How far from 1 the loss lets a ratio go before it holds it, or its gate closes; infinite if it does not."""
        reads = loss_reads(self.loss)
        clips = [getattr(self, name) for name in ("clip_low", "clip_high") if name in reads]
        gates = [1.0 / getattr(self, name) for name in ("tau_positive", "tau_negative") if name in reads]
        return min([*clips, *gates], default=float("inf"))

    @property
    def values(self) -> bool:
        """Whether advantages are taken from a critic's estimates; one of a user's own says so itself."""
        return self.advantage == "gae" and "advantage" in loss_reads(self.loss)

    @property
    def against(self) -> Literal["rollout", "proximal"]:
        """The policy that ratios are taken against.

        The engine's log-probabilities are not the learner's to the last bit: in bfloat16 they differ by 1e-3 and more.
        A loss with less leeway than `NARROW` would take that for a policy that has moved.
        """
        if self.anchor != "auto":
            return self.anchor
        return "proximal" if self.importance_weights.kind != "none" or self.leeway < NARROW else "rollout"


NARROW = 0.1
"""Twice the mean gap between engine and learner that is still in order."""

ALWAYS = frozenset({"name", "loss", "overlong", "by_source"})

SWITCHED = {
    "split_ratio": "split=geometric",
    "fixed_length": "aggregation=fixed",
    "sequence": "loss=gspo or importance_weights.level=sequence",
    "args": "an advantage or a loss of your own, package.module:function",
}
"""Settings that another setting switches on."""


def any_of(names: Sequence[str]) -> str:
    """Names as words: `a, b or c`."""
    return " or ".join(filter(None, (", ".join(names[:-1]), names[-1])))


def loss_reads(loss: str) -> frozenset[str]:
    """The settings that a loss reads."""
    return OWN_LOSS if is_own(loss) else LOSS_READS.get(loss, frozenset())


def reads_of(settings: Mapping[str, Any]) -> set[str]:
    """The settings that count, given `advantage`, `loss` and those that switch others on."""
    advantage, reads = str(settings["advantage"]), set(ALWAYS | loss_reads(str(settings["loss"])))
    if "advantage" in reads:
        reads |= OWN_ADVANTAGE if is_own(advantage) else ADVANTAGE_READS.get(advantage, frozenset())
    guard = settings.get("importance_weights")
    level = guard.get("level") if isinstance(guard, Mapping) else getattr(guard, "level", None)
    if "importance_weights" in reads and level == "sequence":
        reads.add("sequence")
    if "split" in reads and settings.get("split") == "geometric":
        reads.add("split_ratio")
    if "aggregation" in reads and settings.get("aggregation") == "fixed":
        reads.add("fixed_length")
    return reads
