"""Settings of the algorithm: presets, advantage, loss, KL penalty, importance weights, arguments of single algorithms.

`name` selects a preset, a row of `PRESETS`. Settings written beside it take precedence. A setting that the chosen
advantage and loss do not read is an error.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, ValidationInfo, field_validator, model_validator

from arborl.config.config_base import Config, KeysOf, check_args, expand_shorthand
from arborl.errors import did_you_mean

PRESETS: dict[str, dict[str, Any]] = {
    "grpo": {"std": "group"},
    "dr_grpo": {"aggregation": "fixed"},
    "dapo": {"std": "group", "clip_high": 0.28, "aggregation": "token"},
    "bnpo": {"std": "group", "aggregation": "token"},
    "gspo": {"loss": "gspo", "std": "group"},
    "gmpo": {"loss": "gmpo", "std": "group"},
    "gpg": {"loss": "pg", "aggregation": "token"},
    "cispo": {"loss": "cispo", "std": "group", "aggregation": "token"},
    "sapo": {"loss": "sapo", "std": "group"},
    "topr": {"loss": "topr", "std": "group"},
    "decoupled_ppo": {"loss": "decoupled_ppo", "std": "group"},
    "rloo": {"advantage": "rloo"},
    "reinforce": {"advantage": "reinforce", "loss": "pg"},
    "reinforce_plus_plus": {"advantage": "reinforce_plus_plus", "aggregation": "token"},
    "reinforce_plus_plus_baseline": {"advantage": "reinforce_plus_plus_baseline", "aggregation": "token"},
    "remax": {"advantage": "remax", "loss": "pg"},
    "ppo": {"advantage": "gae", "whiten": True, "aggregation": "token"},
    "a2c": {"advantage": "gae", "loss": "a2c", "aggregation": "token"},
    "trpo": {"loss": "trpo", "std": "group"},
    "opo": {"advantage": "opo", "loss": "pg", "aggregation": "token"},
    "maxrl": {"advantage": "maxrl"},
    "pass_k": {"advantage": "pass_k"},
    "gdpo": {"advantage": "gdpo", "whiten": True},
    "gigpo": {"advantage": "gigpo"},
    "starpo": {"advantage": "starpo"},
    "step_reinforce": {"advantage": "step_reinforce", "loss": "pg"},
    "turn_discounted": {"advantage": "turn_discounted"},
    "rae": {"advantage": "rae", "loss": "pg"},
    "dpo": {"loss": "dpo"},
    "ipo": {"loss": "ipo"},
    "kto": {"loss": "kto"},
    "sft": {"loss": "sft"},
    "distill": {"loss": "distill"},
}
"""Settings of each preset; all others keep their defaults."""

BY_ADVANTAGE: dict[str, dict[str, Any]] = {
    "gigpo": {"gamma": 0.95, "std": "none"},
    "step_reinforce": {"gamma": 0.95, "std": "none"},
    "turn_discounted": {"gamma": 0.9, "std": "none"},
    "starpo": {"std": "group"},
}
"""Defaults of settings with this advantage."""

BY_LOSS: dict[str, dict[str, Any]] = {
    "gspo": {"clip_low": 3e-4, "clip_high": 4e-4},
    "gmpo": {"clip_low": 0.4, "clip_high": 0.4},
    "cispo": {"clip_high": 4.0},
}
"""Defaults of settings with this loss; the ratio of a sequence moves less than that of a token."""

_SPLIT = frozenset({"split"})
_GROUP = frozenset({"skip_zero_variance"})
_VALUE = frozenset({"value_coef", "value_clip"})

ADVANTAGE_READS: dict[str, frozenset[str]] = {
    "grpo": _SPLIT | _GROUP | {"baseline", "std"},
    "rloo": _SPLIT | _GROUP,
    "reinforce": _SPLIT,
    "reinforce_plus_plus": frozenset(),
    "reinforce_plus_plus_baseline": _GROUP,
    "remax": _SPLIT,
    "gae": _VALUE | {"gamma", "gae_lambda", "gae_level", "bootstrap"},
    "opo": _SPLIT | _GROUP,
    "maxrl": _SPLIT | _GROUP,
    "pass_k": _SPLIT | _GROUP | {"std"},
    "gdpo": _SPLIT | _GROUP | {"reward_weights"},
    "gigpo": _GROUP | {"std", "gamma", "step_weight"},
    "starpo": _SPLIT | _GROUP | {"std", "gamma"},
    "step_reinforce": _GROUP | {"baseline", "std", "gamma"},
    "turn_discounted": _GROUP | {"std", "gamma"},
    "rae": _SPLIT | {"baseline_decay"},
}
"""Settings that each advantage reads, beside those that all algorithms read."""

GROUP_ADVANTAGES = frozenset(name for name, reads in ADVANTAGE_READS.items() if "skip_zero_variance" in reads)
"""Advantages that compare the episodes of a group; a group of one has advantage 0."""

_POLICY = frozenset({"advantage", "advantage_clip", "whiten", "aggregation", "entropy_coef", "staleness_decay", "kl"})
_RATIO = _POLICY | {"importance_weights", "anchor"}
_PAIRS = frozenset({"beta", "pairs", "min_gap"})

OFFLINE_LOSSES = frozenset({"sft", "dpo", "ipo", "kto"})
"""Losses that need no sampled tokens."""

LOSS_READS: dict[str, frozenset[str]] = {
    "ppo": _RATIO | {"clip_low", "clip_high", "dual_clip"},
    "gspo": _RATIO | {"clip_low", "clip_high", "sequence"},
    "gmpo": _RATIO | {"clip_low", "clip_high", "sequence"},
    "cispo": _RATIO | {"clip_high"},
    "sapo": _RATIO | {"tau_positive", "tau_negative"},
    "topr": _RATIO,
    "a2c": _POLICY | {"importance_weights"},
    "pg": _POLICY | {"importance_weights"},
    "decoupled_ppo": _POLICY | {"clip_low", "clip_high", "behaviour_cap"},
    "trpo": _RATIO | {"max_kl", "damping", "cg_iterations", "backtracks", "backtrack_ratio"},
    "dpo": _PAIRS,
    "ipo": _PAIRS,
    "kto": frozenset({"beta", "reward_threshold"}),
    "sft": frozenset({"reward_threshold", "aggregation"}),
    "distill": frozenset({"aggregation", "teacher"}),
}
"""Settings that each loss reads. A loss without `advantage` reads no setting of an advantage."""

CUSTOM_ADVANTAGE_READS = _SPLIT | _GROUP | _VALUE
CUSTOM_LOSS_READS = _RATIO
"""Settings that custom functions (`package.module:function`) read."""


class KLConfig(Config):
    """KL penalty towards the reference model: the policy at the start of the run, adapters included."""

    coef: float = Field(0.0, ge=0)
    """Coefficient; with 0 no reference model is kept."""
    estimator: Literal["k1", "k2", "k3", "mse", "abs"] = "k3"
    """Estimator of the KL divergence (Schulman, "Approximating KL divergence")."""
    where: Literal["loss", "reward"] = "loss"
    """`loss`: added to the loss of each token. `reward`: subtracted from the reward before advantages are computed."""
    target: float | None = Field(None, gt=0)
    """With `where=reward`: `coef` is adapted until the KL of an episode is this value. None keeps `coef` constant."""
    horizon: int = Field(10_000, ge=1)
    """With `target`: number of episodes in which `coef` changes by at most 20 %."""

    @model_validator(mode="after")
    def _fits_together(self) -> KLConfig:
        if self.target is not None and (self.where != "reward" or self.coef == 0):
            raise ValueError("target moves a penalty in the reward. Write where=reward and an initial coef above 0.")
        if self.horizon != 10_000 and self.target is None:
            raise ValueError("horizon is read with a target only. Write target too, or leave horizon out.")
        return self


class ImportanceWeightConfig(Config):
    """Importance weights that correct the difference between the sampling engine and the learner. A bare string is the
    `kind`.

    The weight is the ratio of the learner's probability to the engine's. `tis` truncates it at `high`; `mis` masks
    tokens outside `low` to `high`; `icepop` masks single tokens with tighter bounds.
    """

    shorthand: ClassVar[str] = "kind"

    kind: Literal["none", "tis", "mis", "icepop"] = "none"
    level: Literal["token", "sequence"] = "token"
    """`sequence`: one ratio for all tokens of an episode or call (`args.sequence`), the geometric mean of theirs."""
    low: float | None = Field(None, ge=0)
    """Lower bound. Default: 0 for `mis`, 0.5 for `icepop`."""
    high: float | None = Field(None, gt=0)
    """Upper bound. Default: 2 for `tis` and `mis`, 5 for `icepop`."""

    @property
    def bounds(self) -> tuple[float, float]:
        """Lower and upper bound, defaults filled in."""
        low, high = {"icepop": (0.5, 5.0)}.get(self.kind, (0.0, 2.0))
        return low if self.low is None else self.low, high if self.high is None else self.high

    @model_validator(mode="after")
    def _fits_together(self) -> ImportanceWeightConfig:
        bounds = [name for name in ("low", "high") if getattr(self, name) is not None]
        if self.kind == "none" and (bounds or self.level != "token"):
            raise ValueError(f"{(bounds or ['level'])[0]} is given without a kind. Write kind=tis, mis or icepop.")
        if self.kind == "tis" and self.low is not None:
            raise ValueError("tis truncates at high only. Leave low out, or write kind=mis.")
        if self.kind == "icepop" and self.level == "sequence":
            raise ValueError("icepop masks single tokens. Leave level out, or write kind=mis.")
        low, high = self.bounds
        if low >= high:
            raise ValueError(f"low={low:g} is not below high={high:g}.")
        return self


class OverlongConfig(Config):
    """Treatment of episodes that reached a length limit."""

    filter: bool = False
    """Exclude episodes that were cut off (context full, `max_turns`, completion too long) from baseline and loss."""
    penalty: float = Field(0.0, ge=0)
    """Subtracted from the reward of an episode with `max_tokens` sampled tokens or more; it grows linearly over the
    last `buffer` tokens (DAPO)."""
    max_tokens: int = Field(0, ge=0)
    buffer: int = Field(0, ge=0)

    @model_validator(mode="after")
    def _fits_together(self) -> OverlongConfig:
        if self.penalty and not 0 < self.buffer <= self.max_tokens:
            raise ValueError("penalty needs max_tokens and buffer. Write max_tokens and a buffer of at most that.")
        if not self.penalty and (self.max_tokens or self.buffer):
            raise ValueError("max_tokens and buffer are read with a penalty only. Write penalty=1, or leave them out.")
        return self


class AlgorithmArgs(Config):
    """Arguments of single advantages and losses. One that the chosen advantage and loss do not read is an error."""

    baseline: Literal["mean", "none"] = "mean"
    """`advantage=grpo` and `step_reinforce`: what is subtracted from the reward, the mean of the group or nothing."""
    gae_lambda: float = Field(0.95, ge=0, le=1)
    """`advantage=gae`: 0 is the one-step TD error, 1 the Monte Carlo return."""
    gae_level: Literal["turn", "token"] = "turn"
    """`advantage=gae`: time step."""
    bootstrap: bool = False
    """`advantage=gae`: bootstrap from the critic at the end of a truncated episode (`truncated` by the environment,
    `max_turns`, context full). See docs/algorithms.md."""
    value_coef: float = Field(0.5, gt=0)
    """`advantage=gae`: coefficient of the value loss, half the squared error of the critic."""
    value_clip: float | None = Field(None, gt=0)
    """`advantage=gae`: clip range of the value relative to the estimate before the update, as in PPO."""
    step_weight: float = Field(1.0, ge=0)
    """`advantage=gigpo`: omega, the weight of the step-level advantage (equal states) relative to the episode-level
    one."""
    baseline_decay: float = Field(0.95, ge=0, lt=1)
    """`advantage=rae`: decay of the running baseline per role and step."""
    reward_weights: dict[str, float] = Field(default_factory=dict)
    """`advantage=gdpo`, which normalises each reward first: weights by reward name. Default 1."""
    split_ratio: float = Field(0.9, gt=0, le=1)
    """`split=geometric`: ratio of a branch's part to that of the next."""
    fixed_length: int = Field(1024, ge=1)
    """`aggregation=fixed`: the divisor."""
    dual_clip: float | None = Field(None, gt=1)
    """`loss=ppo`: upper bound of the ratio for tokens with negative advantage (dual-clip PPO)."""
    sequence: Literal["episode", "call"] = "episode"
    """`loss=gspo`, `loss=gmpo` and `importance_weights.level=sequence`: unit of sequence-level ratios."""
    tau_positive: float = Field(1.0, gt=0)
    """`loss=sapo`: temperature for tokens with positive advantage."""
    tau_negative: float = Field(1.05, gt=0)
    """`loss=sapo`: temperature for tokens with negative advantage."""
    behaviour_cap: float | None = Field(5.0, gt=1)
    """`loss=decoupled_ppo`: tokens whose ratio between proximal and sampling policy exceeds this value are masked."""
    max_kl: float = Field(0.01, gt=0)
    """`loss=trpo`: bound of the weighted mean KL divergence over terms from the policy before the update."""
    damping: float = Field(0.1, ge=0)
    """`loss=trpo`: added to the diagonal of the Fisher matrix."""
    cg_iterations: int = Field(10, ge=1)
    """`loss=trpo`: conjugate-gradient iterations."""
    backtracks: int = Field(10, ge=0)
    """`loss=trpo`: maximum number of backtracking line-search steps; if all fail, the weights stay."""
    backtrack_ratio: float = Field(0.5, gt=0, lt=1)
    """`loss=trpo`: factor of the step length in each backtracking step."""
    beta: float = Field(0.1, gt=0)
    """`loss=dpo`, `ipo` and `kto`: strength of the regularisation towards the reference model."""
    pairs: Literal["best_worst", "all"] = "best_worst"
    """`loss=dpo` and `ipo`: which pairs of episodes of a group are preferences."""
    min_gap: float = Field(0.0, ge=0)
    """`loss=dpo` and `ipo`: minimum difference of the rewards of a pair."""
    reward_threshold: float = 0.5
    """Minimum reward of a good episode: `loss=sft` trains on these only, `loss=kto` treats them as desirable."""
    teacher: str | None = None
    """`loss=distill`: a model as in `model.name`, with the tokenizer of the policy; or the address of a server that
    returns prompt log-probabilities (vLLM), such as `http://127.0.0.1:8000/v1?model=NAME`."""


def _whiten_mode(value: Any) -> Any:
    known = {"true": True, "false": False, "episode": True, "none": False, "token": "token"}
    name = str(value).lower() if isinstance(value, bool | str) else ""
    if name not in known:
        raise ValueError(f"must be one of false, true, episode, token; given {value!r}.{did_you_mean(name, known)}")
    return known[name]


def is_custom(name: str) -> bool:
    """Whether a name denotes a custom function: `package.module:function`, or a Python object."""
    return ":" in name


def _one_of(table: Mapping[str, Any]) -> BeforeValidator:
    def check(value: Any) -> str:
        if isinstance(value, str) and (value in table or is_custom(value)):
            return value
        near = did_you_mean(str(value), table)
        raise ValueError(
            f"must be one of {', '.join(table)}, or your own as package.module:function; given {value!r}.{near}"
        )

    return BeforeValidator(check)


def _preset(value: Any) -> Any:
    if not isinstance(value, str) or value not in PRESETS:
        raise ValueError(f"must be one of {', '.join(PRESETS)}; given {value!r}.{did_you_mean(str(value), PRESETS)}")
    return value


class AlgorithmConfig(Config):
    """The algorithm: advantage, loss and their settings."""

    shorthand: ClassVar[str] = "name"

    name: Annotated[str, BeforeValidator(_preset)] = "grpo"
    """Preset of an advantage, a loss and their settings. Settings written beside it take precedence."""
    advantage: Annotated[str, _one_of(ADVANTAGE_READS)] = "grpo"
    """Advantage estimator: see `arborl.algorithms.ADVANTAGES`, or your own as `package.module:function`
    (docs/algorithms.md)."""
    loss: Annotated[str, _one_of(LOSS_READS)] = "ppo"
    """Loss: see `arborl.algorithms.LOSSES`, or your own. `dpo`, `ipo`, `kto`, `sft` and `distill` read no advantage."""

    std: Literal["none", "group", "batch"] = "none"
    """Divisor of the advantage: none, the standard deviation of the group (as in the GRPO paper, and in its presets),
    or that of the batch. `dr_grpo` and the turn-level presets have none."""
    gamma: float = Field(1.0, ge=0, le=1)
    """Discount factor per turn; with `args.gae_level=token` per token."""
    whiten: Annotated[bool | Literal["token"], BeforeValidator(_whiten_mode)] = False
    """Normalise the advantages of the batch to mean 0 and standard deviation 1. `true` or `episode`: each episode
    counts once; advantages relative to a group are only divided. `token`: each token counts once, as in verl and ROLL;
    a zero-variance group may then get a nonzero advantage."""
    split: Literal["broadcast", "last", "uniform", "geometric"] = "broadcast"
    """Distribution of the advantage of an episode over its branches: the same to each, all to the last, equal or
    geometrically growing parts."""

    clip_low: float = Field(0.2, ge=0, lt=1)
    """Lower clip range: the importance ratio is clipped at `1 - clip_low`; with `loss=gmpo` its logarithm at
    `-clip_low`."""
    clip_high: float = Field(0.2, ge=0)
    """Upper clip range: the importance ratio is clipped at `1 + clip_high`; with `loss=gmpo` its logarithm at
    `clip_high`."""
    advantage_clip: float | None = Field(None, gt=0)
    """Bound of the absolute advantage, applied last."""
    anchor: Literal["auto", "rollout", "proximal"] = "auto"
    """Denominator of the importance ratio: the sampling policy (`rollout`) or the policy at the start of the update
    (`proximal`). `auto` is `proximal` with `importance_weights` and with a clip range below 0.1 (`gspo`), which the
    difference between engine and learner alone could exceed; else `rollout`."""

    aggregation: Literal["token", "episode", "call", "fixed"] = "episode"
    """Averaging of the loss: over episodes of the token mean (`episode`), over tokens (`token`; long episodes weigh
    more), over calls (`call`), or the token sum of an episode divided by `args.fixed_length` (`fixed`)."""
    skip_zero_variance: bool = True
    """Exclude zero-variance groups from the batch and from the denominator of the loss."""
    entropy_coef: float = Field(0.0, ge=0)
    """Coefficient of the entropy bonus."""
    staleness_decay: float = Field(1.0, gt=0, le=1)
    """Factor of the loss of a token per policy version of staleness."""
    kl: KLConfig = KLConfig()
    importance_weights: ImportanceWeightConfig = ImportanceWeightConfig()
    overlong: OverlongConfig = OverlongConfig()
    by_source: dict[str, AlgorithmConfig] = Field(default_factory=dict)
    """Another algorithm for the tasks of a source, by source name. Sources are weighted by their episodes."""
    args: Annotated[dict[str, Any], KeysOf(AlgorithmArgs)] = Field(default_factory=dict)
    """Arguments of the advantage and loss, as listed below; of custom ones by their signatures."""

    @model_validator(mode="before")
    @classmethod
    def _from_preset(cls, data: Any) -> Any:
        """Fill in the preset. Later entries take precedence:

        1. defaults of the preset's own advantage and loss (`BY_ADVANTAGE`, `BY_LOSS`);
        2. the preset (`PRESETS`);
        3. defaults of an advantage or loss that is written in place of the preset's;
        4. the settings as written.

        Of 1 to 3 only settings that the chosen advantage and loss read.
        """
        data = expand_shorthand(cls, data)
        if not isinstance(data, Mapping) or str(data.get("name", "grpo")) not in PRESETS:
            return data
        preset = {"advantage": "grpo", "loss": "ppo"} | PRESETS[str(data.get("name", "grpo"))]
        chosen = preset | dict(data)
        below: dict[str, Any] = {}
        above: dict[str, Any] = {}
        for key, table in (("loss", BY_LOSS), ("advantage", BY_ADVANTAGE)):
            (below if chosen[key] == preset[key] else above).update(table.get(str(chosen[key]), {}))
        if is_custom(str(chosen["advantage"])):  # it may not compare episodes, so no group is dropped by default
            above["skip_zero_variance"] = False
        reads = settings_read(chosen)
        return {key: value for key, value in (below | preset | above).items() if key in reads} | dict(data)

    @field_validator("args")
    @classmethod
    def _check_args(cls, args: dict[str, Any], info: ValidationInfo) -> dict[str, Any]:
        """With the defaults of all arguments that are read; those of custom functions unchanged."""
        settings, fields = info.data, AlgorithmArgs.model_fields
        if not {"advantage", "loss"} <= settings.keys():
            return args  # the error is reported there
        reads = settings_read(settings) & fields.keys()
        custom = is_custom(settings["advantage"]) or is_custom(settings["loss"])
        own = {name: value for name, value in args.items() if custom and name not in reads}
        written = {name: value for name, value in args.items() if name not in own}
        message = partial(_unread, settings["advantage"], settings["loss"])
        given = check_args(AlgorithmArgs, written, reads, message)
        return {name: getattr(given, name) for name in fields if name in reads} | own

    @property
    def options(self) -> AlgorithmArgs:
        """`args` of the library's advantages and losses, with defaults."""
        known = AlgorithmArgs.model_fields
        return AlgorithmArgs.model_construct(**{name: value for name, value in self.args.items() if name in known})

    @property
    def own_args(self) -> dict[str, Any]:
        """`args` of custom functions."""
        reads = settings_read({name: getattr(self, name) for name in type(self).model_fields})
        return {name: value for name, value in self.args.items() if name not in reads}

    @model_validator(mode="after")
    def _check_read(self) -> AlgorithmConfig:
        reads = settings_read({name: getattr(self, name) for name in type(self).model_fields})
        for name, field in type(self).model_fields.items():
            value = getattr(self, name)
            if name not in reads and value != field.get_default(call_default_factory=True):
                shown = "" if isinstance(value, Config | dict) else f"={value}"
                raise ValueError(f"{name}{shown} {_unread(self.advantage, self.loss, name)}")
        return self

    @model_validator(mode="after")
    def _fits_together(self) -> AlgorithmConfig:
        if self.anchor == "rollout" and self.importance_weights.kind != "none":
            raise ValueError(
                f"importance_weights={self.importance_weights.kind} corrects the difference of engine and learner, "
                "and anchor=rollout corrects it again. Leave anchor out."
            )
        if self.loss == "a2c" and self.advantage != "gae":
            raise ValueError(
                f"loss=a2c needs a critic, advantage={self.advantage} has none. Write advantage=gae or loss=pg."
            )
        if self.advantage == "maxrl" and self.kl.where == "reward":
            raise ValueError(
                "advantage=maxrl divides by the mean reward, and a penalty could change its sign. Write where=loss."
            )
        for source, other in self.by_source.items():
            if other.by_source:
                raise ValueError(f"by_source.{source} has a by_source of its own. Write its sources beside it.")
            if "trpo" in (self.loss, other.loss) and self.loss != other.loss:
                raise ValueError("loss=trpo takes the step of the whole batch. Write it for every source or for none.")
        return self

    @property
    def all(self) -> tuple[AlgorithmConfig, ...]:
        """This algorithm and those of `by_source`."""
        return (self, *self.by_source.values())

    @property
    def compares_episodes(self) -> bool:
        """Whether a group of one episode has no gradient."""
        if self.loss in ("dpo", "ipo"):
            return True
        return (
            self.options.baseline == "mean"
            and self.advantage in GROUP_ADVANTAGES
            and "advantage" in settings_read_by_loss(self.loss)
        )

    @property
    def drops_zero_variance(self) -> bool:
        """Whether zero-variance groups are excluded."""
        return self.skip_zero_variance and (self.compares_episodes or is_custom(self.advantage))

    @property
    def has_kl_in_reward(self) -> bool:
        """Whether the KL penalty is subtracted from the reward."""
        return self.kl.where == "reward" and self.kl.coef > 0

    @property
    def clip_range(self) -> float:
        """Distance from 1 at which the loss clips or gates the ratio; infinite if it does neither."""
        reads = settings_read_by_loss(self.loss)
        clips = [getattr(self, name) for name in ("clip_low", "clip_high") if name in reads]
        gates = [1.0 / self.args[name] for name in ("tau_positive", "tau_negative") if name in reads]
        return min([*clips, *gates], default=float("inf"))

    @property
    def uses_critic(self) -> bool:
        """Whether the advantage needs a critic; a custom advantage declares this itself."""
        return self.advantage == "gae" and "advantage" in settings_read_by_loss(self.loss)

    @property
    def ratio_policy(self) -> Literal["rollout", "proximal"]:
        """Denominator of the importance ratio, `auto` resolved.

        Log-probabilities of engine and learner differ by 1e-3 and more in bfloat16. A loss with a clip range below
        `NARROW_CLIP` would clip because of that difference.
        """
        if self.anchor != "auto":
            return self.anchor
        return "proximal" if self.importance_weights.kind != "none" or self.clip_range < NARROW_CLIP else "rollout"


NARROW_CLIP = 0.1
"""Twice the largest acceptable mean difference between engine and learner."""

ALWAYS = frozenset({"name", "loss", "overlong", "by_source", "args"})

ENABLED_BY = {
    "split_ratio": "split=geometric",
    "fixed_length": "aggregation=fixed",
    "sequence": "loss=gspo, loss=gmpo or importance_weights.level=sequence",
}
"""Settings that another setting enables."""


def _unread(advantage: str, loss: str, name: str) -> str:
    """The message for a setting that the advantage and the loss do not read."""
    has_advantage = "advantage" in settings_read_by_loss(loss)
    chosen = f"advantage={advantage} and loss={loss}" if has_advantage else f"loss={loss}"
    by_loss = [key for key, read in LOSS_READS.items() if name in read]
    by_advantage = [key for key, read in ADVANTAGE_READS.items() if name in read]
    if name in ENABLED_BY:
        instead = ENABLED_BY[name]
    elif by_loss:
        instead = f"loss={join_with_or(by_loss)}"
    else:
        instead = (
            f"advantage={join_with_or(by_advantage)}{'' if has_advantage else ' and a loss that reads it, as ppo'}"
        )
    return f"is not read with {chosen}. Leave it out, or write {instead}."


def join_with_or(names: Sequence[str]) -> str:
    """`a, b or c`."""
    return " or ".join(filter(None, (", ".join(names[:-1]), names[-1])))


def settings_read_by_loss(loss: str) -> frozenset[str]:
    """The settings that a loss reads."""
    return CUSTOM_LOSS_READS if is_custom(loss) else LOSS_READS.get(loss, frozenset())


def settings_read(settings: Mapping[str, Any]) -> set[str]:
    """The settings that are read with this `advantage`, this `loss` and the settings that enable others."""
    advantage, reads = str(settings["advantage"]), set(ALWAYS | settings_read_by_loss(str(settings["loss"])))
    if "advantage" in reads:
        reads |= CUSTOM_ADVANTAGE_READS if is_custom(advantage) else ADVANTAGE_READS.get(advantage, frozenset())
    weights = settings.get("importance_weights")
    level = weights.get("level") if isinstance(weights, Mapping) else getattr(weights, "level", None)
    if "importance_weights" in reads and level == "sequence":
        reads.add("sequence")
    if "split" in reads and settings.get("split") == "geometric":
        reads.add("split_ratio")
    if "aggregation" in reads and settings.get("aggregation") == "fixed":
        reads.add("fixed_length")
    return reads
