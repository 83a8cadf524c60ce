"""Data settings: one source of rows, or a mixture of sources with their own agents and rewards; demonstrations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, field_validator, model_validator

from arborl.config.config_base import Config, as_list, expand_shorthand, overrides_of
from arborl.config.part_config import AgentPartConfig, ContextConfig, EnvConfig, PartConfig, RewardConfig
from arborl.config.rollout_config import RolloutConfig, SamplingConfig
from arborl.config.tool_config import ToolConfig
from arborl.errors import did_you_mean


class RowsConfig(Config):
    """Rows, their conversion to tasks, and the held-out split."""

    shorthand: ClassVar[str] = "path"

    path: Path | tuple[Path, ...] | None = None
    """JSON list, JSONL, CSV or Parquet file, a folder of such files, or a list of them. Each row is a task."""
    hub: str | None = None
    """Instead of `path`: a Hugging Face dataset (needs `datasets`) as `name:config:split`, such as
    `openai/gsm8k:main:train`, or a folder that `save_to_disk` wrote."""
    rows: PartConfig | None = None
    """Instead of `path`: a function that returns rows, `package.module:function`."""
    endless: bool = False
    """The function of `rows` is an infinite generator. Its rows are streamed; none is stored or repeated."""
    evaluation_path: Path | tuple[Path, ...] | None = None
    """Files of held-out rows; then no training rows are held out. With `by`, the column separates them too."""
    evaluation_rows: PartConfig | None = None
    """The same, as a function that returns held-out rows."""
    evaluation_share: float = Field(0.1, gt=0, lt=1)
    """Share of rows that is held out, selected by a hash."""
    split: Literal["auto", "content", "number"] = "auto"
    """What is hashed: the content of a row (the split stays when rows are added or moved) or its number (needs no
    reading). `auto` is `number` for files that are too large to be read at the start."""
    question: str = "question"
    """Column of the problem as text. A column `messages` takes precedence, and `prompt` if `question` is not set, as
    text or in OpenAI's format."""
    fields: dict[str, str] = Field(default_factory=dict)
    """Additional names of columns; dots select nested values: `{answer: reward_model.ground_truth}`. Also for
    `messages`, `agent` and `id`. Every column is a field under its own name as well."""
    max_prompt_tokens: int = Field(0, ge=0)
    """Maximum prompt length; 0 for none."""
    overlong: Literal["drop", "cut", "refuse"] = "drop"
    """Longer prompts: drop the row, cut the end of its longest message, or refuse to start. Rows of offline runs and
    demonstrations count with their completions against `sampling.max_context`."""
    deduplicate: bool = False
    """Drop rows whose prompt occurred before."""
    shuffle: bool = True
    """Shuffle rows in every epoch."""

    @model_validator(mode="after")
    def _check_origin(self) -> RowsConfig:
        origins = [name for name in ("path", "hub", "rows") if getattr(self, name) is not None]
        if len(origins) > 1:
            raise ValueError(
                f"{' and '.join(origins)} are given, and rows come from one of them. Leave the others out."
            )
        if self.endless and self.rows is None:
            raise ValueError("endless is about the function of rows. Write rows=package.module:function too.")
        if self.endless and (self.deduplicate or self.split != "auto"):
            raise ValueError("endless rows are never read to the end. Leave deduplicate and split out.")
        if self.evaluation_path is not None and self.evaluation_rows is not None:
            raise ValueError("evaluation_path and evaluation_rows both give held-out rows. Leave one out.")
        if self.endless and not self.shuffle:
            raise ValueError("endless rows are taken as they come. Leave shuffle out.")
        if "question" in self.fields:
            raise ValueError(f"fields.question: write question={self.fields['question']} instead.")
        return self

    @field_validator("path", "evaluation_path", mode="after")
    @classmethod
    def _expand_home(cls, value: Path | tuple[Path, ...] | None) -> Path | tuple[Path, ...] | None:
        """Expand `~`; a list of one path becomes that path."""
        if value == ():
            raise ValueError("an empty list. Name at least one file.")
        if isinstance(value, tuple):
            return tuple(path.expanduser() for path in value) if len(value) > 1 else value[0].expanduser()
        return value.expanduser() if value is not None else None

    @property
    def files(self) -> tuple[Path, ...]:
        """`path` as a tuple."""
        return self.path if isinstance(self.path, tuple) else () if self.path is None else (self.path,)

    @property
    def has_rows(self) -> bool:
        """Whether tasks are rows, not made by an environment."""
        return self.path is not None or self.hub is not None or self.rows is not None


class DemonstrationsConfig(Config):
    """Demonstrations that are imitated before and during reinforcement learning. A bare string is the path."""

    shorthand: ClassVar[str] = "path"

    path: Path | None = None
    """File or folder of conversations, as for `algorithm=sft` (docs/offline.md)."""
    rows: PartConfig | None = None
    """Instead of `path`: a function that returns conversations, `package.module:function` with `args`. It gets the seed
    of the run if it has a parameter `seed` that `args` does not set."""
    batch: int = Field(16, ge=1)
    """Rows per step."""
    steps: int = Field(0, ge=0)
    """Number of the first steps that train on demonstrations only."""
    imitation_lr: float | None = Field(None, gt=0, allow_inf_nan=False)
    """Learning rate of those first steps; the schedule of `learner.lr` then begins after them. None: one schedule for
    all steps."""
    weight: float = Field(0.0, ge=0)
    """Weight of the imitation loss in all later steps; 0 for none."""

    @model_validator(mode="after")
    def _fits_together(self) -> DemonstrationsConfig:
        used = self.steps > 0 or self.weight > 0
        if self.path is not None and self.rows is not None:
            raise ValueError("path and rows are given, and transcripts come from one of them. Leave the other out.")
        if used and not self.enabled:
            raise ValueError("steps or weight is set, but there are no demonstrations. Write path=FILE.")
        if self.imitation_lr is not None and not self.steps:
            raise ValueError("imitation_lr is the learning rate of the imitation steps. Write steps=20 too.")
        if self.enabled and not used:
            name = "path" if self.rows is None else "rows"
            raise ValueError(f"{name} is given without steps or weight. Write steps=20, or weight=0.1.")
        return self

    @property
    def enabled(self) -> bool:
        """Whether demonstrations are configured."""
        return self.path is not None or self.rows is not None


SOURCE_SAMPLING = overrides_of(
    SamplingConfig, "temperature", "top_k", "top_p", "min_p", "max_tokens", "stop", "max_context"
)
SOURCE_ROLLOUT = overrides_of(RolloutConfig, "max_turns", "episode_seconds", "step_seconds")


class StageConfig(Config):
    """Sampling ratios from a step on."""

    step: int = Field(ge=0)
    ratios: dict[str, float]
    """By source; others keep theirs."""


class BandConfig(Config):
    """Sources whose running success rate is outside `low` to `high` have a quarter of their ratio."""

    low: float = Field(0.0, ge=0, le=1)
    """Minimum success rate in training."""
    high: float = Field(1.0, ge=0, le=1)
    """Maximum success rate in training."""

    @property
    def active(self) -> bool:
        return self.low > 0 or self.high < 1

    @model_validator(mode="after")
    def _check_bounds(self) -> BandConfig:
        if self.low >= self.high:
            raise ValueError(f"low={self.low:g} is not below high={self.high:g}.")
        return self


INHERITED = (
    "evaluation_share", "split", "question", "fields", "max_prompt_tokens", "overlong", "deduplicate", "shuffle",
)  # fmt: skip
"""Settings that a source inherits from `data`."""


OF_A_SOURCE = (
    "ratio", "passes", "weight", "evaluation_tasks", "agent", "env", "context", "tools", "rewards", "sampling",
    "rollout",
)  # fmt: skip
"""Keys of an entry of `data.sources`, not of `data` itself."""
OF_THE_RUN = ("sources", "offline", "by", "agents", "strict", "missing", "schedule", "band", "quarantine")
"""Keys of `data` itself."""


class DataConfig(RowsConfig):
    """Tasks. Without rows the environment makes them from the seed. A bare string is the path. Entries of `sources`
    have the same keys for their rows."""

    unlisted: ClassVar[tuple[str, ...]] = OF_A_SOURCE

    sources: dict[str, DataConfig] = Field(default_factory=dict)
    """Sources of a mixture, by name. Each has `path`, `hub`, `rows` or `env`, a `ratio`, and its own of the settings
    above; those that it does not set are those of `data`. See docs/data.md."""
    offline: bool = False
    """Offline training: rows contain the completions (conversations, preference pairs, labelled answers) and nothing is
    sampled. Default: true with `algorithm=sft`, `dpo`, `ipo` or `kto` and rows, unless `env` or `rewards` are set. See
    docs/offline.md."""
    by: str | None = None
    """Column of the rows at `path` with the name of the source, such as `data_source`."""
    agents: dict[str, AgentPartConfig] = Field(default_factory=dict)
    """Agents by the names in the column `agent_name`."""
    strict: bool = False
    """Refuse ratios whose sum is not 1; else they are scaled with a warning."""
    missing: Literal["refuse", "renormalise"] = "refuse"
    """A source without rows or with exhausted `passes`: refuse to start, or let the other sources fill its share."""
    schedule: tuple[StageConfig, ...] = ()
    """Changes of the ratios at given steps."""
    band: BandConfig = BandConfig()
    quarantine: int = Field(3, ge=0)
    """Set a task aside after this many draws in a row in which all its episodes failed (an exception or timeout of the
    environment, a tool, a reward or the agent; not a low reward). Other tasks of its source replace it. It is drawn
    again after twice the usual time, then four times, and so on. 0: never. See docs/data.md."""

    ratio: float | None = Field(None, ge=0)
    """Share of every batch; by default all sources have the same."""
    passes: int = Field(0, ge=0)
    """Maximum epochs over its rows; 0 for no limit."""
    weight: float = Field(1.0, gt=0)
    """Weight of its episodes in the loss."""
    evaluation_tasks: int | None = Field(None, ge=0)
    """Its number of held-out tasks, also with `ratio=0`. Default: an equal share of `evaluation.tasks`."""
    agent: AgentPartConfig | None = None
    """This and the next six: its own section instead of that of the run."""
    env: EnvConfig | None = None
    """Makes the tasks if there are no rows."""
    context: ContextConfig | None = None
    tools: Annotated[tuple[ToolConfig, ...] | None, BeforeValidator(as_list)] = None
    rewards: Annotated[tuple[RewardConfig, ...] | None, BeforeValidator(as_list)] = None
    sampling: Annotated[dict[str, Any], SOURCE_SAMPLING] = Field(default_factory=dict)
    """Settings that differ from `sampling` of the run; `stop` adds stop strings. The learner uses the same
    distribution."""
    rollout: Annotated[dict[str, Any], SOURCE_ROLLOUT] = Field(default_factory=dict)
    """The same for `max_turns`, `episode_seconds` and `step_seconds` of `rollout`."""

    @model_validator(mode="before")
    @classmethod
    def _inherit(cls, data: Any) -> Any:
        data = expand_shorthand(cls, data)
        if not isinstance(data, Mapping) or not isinstance(data.get("sources"), Mapping):
            return data
        common = {key: data[key] for key in INHERITED if key in data}
        sources = {}
        for name, source in data["sources"].items():
            own = expand_shorthand(cls, source)
            sources[name] = {**common, **own} if isinstance(own, Mapping) else own
        return {**data, "sources": sources}

    @model_validator(mode="after")
    def _fits_together(self) -> DataConfig:
        if not self.sources:
            needs = [name for name in ("by", "schedule") if getattr(self, name)]
            needs += ["band"] if self.band.active else []
            if needs:
                raise ValueError(f"{needs[0]} is about several sources. Write sources: {{NAME: {{path: …}}, …}} too.")
            return self
        if self.has_rows and self.by is None:
            raise ValueError("rows are given twice, by sources and beside them. Write by=COLUMN, or leave one out.")
        if self.by is None and (self.evaluation_path or self.evaluation_rows):
            which = "evaluation_path" if self.evaluation_path else "evaluation_rows"
            raise ValueError(f"{which}: every source has its own. Write sources.NAME.{which}, or by=COLUMN.")
        if self.by is not None and not self.has_rows:
            raise ValueError(f"by={self.by} tells apart the rows of one file. Write path=FILE too.")
        for name, source in self.sources.items():
            self._check_source(name, source)
        self._check_ratios({name: source.ratio for name, source in self.sources.items()})
        self._check_all_or_none(
            {name: source.evaluation_tasks for name, source in self.sources.items()}, "evaluation_tasks"
        )
        for number, stage in enumerate(self.schedule):
            for name in stage.ratios:
                if name not in self.sources:
                    known = f" Known: {', '.join(self.sources)}."
                    raise ValueError(f"schedule.{number}.ratios.{name}: no such source.{self._near(name)}{known}")
        steps = [stage.step for stage in self.schedule]
        if steps != sorted(set(steps)):
            raise ValueError(f"schedule: steps {steps} must rise.")
        return self

    def _near(self, name: str) -> str:
        return did_you_mean(name, self.sources)

    def _check_source(self, name: str, source: DataConfig) -> None:
        if others := source.written(OF_THE_RUN):
            raise ValueError(f"sources.{name}.{others[0]}: is not of a single source. Write data.{others[0]}.")
        if "/" in name or not name.strip():
            raise ValueError(f"sources: {name!r} is no name for a source. Use letters, digits, - and _.")
        if self.by is not None:
            if source.has_rows or source.evaluation_path or source.evaluation_rows:
                raise ValueError(f"sources.{name}.path: with by={self.by} the rows are those of path. Leave it out.")
        elif not source.has_rows and source.env is None:
            raise ValueError(f"sources.{name}: has neither rows nor an environment. Write path=FILE or env=NAME.")

    def _check_all_or_none(self, values: Mapping[str, float | None], key: str) -> None:
        without = [name for name, value in values.items() if value is None]
        if without and len(without) < len(values):
            raise ValueError(f"sources.{without[0]}.{key}: is missing, others have one. Give all sources one, or none.")

    def _check_ratios(self, ratios: Mapping[str, float | None]) -> None:
        self._check_all_or_none(ratios, "ratio")
        values = [ratio for ratio in ratios.values() if ratio is not None]
        if values and not sum(values) > 0:
            raise ValueError("sources: all ratios are 0, so there is nothing to train on. Give one source a ratio.")
        if self.strict and values and abs(sum(values) - 1) > 1e-9:
            raise ValueError(f"sources: the ratios add up to {sum(values):g}, not to 1, and strict is on.")

    @property
    def evaluation_counts(self) -> dict[str, int]:
        """Held-out tasks by source; empty if they have equal shares."""
        return {n: source.evaluation_tasks for n, source in self.sources.items() if source.evaluation_tasks is not None}

    def written(self, names: Sequence[str]) -> list[str]:
        """Those of the settings that differ from their defaults."""
        fields = type(self).model_fields
        return [name for name in names if getattr(self, name) != fields[name].get_default(call_default_factory=True)]
