"""Where tasks come from: one source of rows, or several that are mixed, each with an agent and rewards of its own."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from arborl.config.base import Config, StopTexts, spelt_out
from arborl.config.parts import AgentConfig, ContextConfig, EnvConfig, Part, RewardConfig
from arborl.config.tools import ToolConfig
from arborl.errors import did_you_mean


class RowsConfig(Config):
    """Rows, how a row becomes a task, and which rows count."""

    shorthand: ClassVar[str] = "path"

    path: Path | tuple[Path, ...] | None = None
    """JSON list, JSONL, CSV or Parquet, or a folder of such files; several as a list. A row is a task."""
    hub: str | None = None
    """Instead of a path, a Hugging Face dataset (needs `datasets`): `openai/gsm8k:main:train`, that is
    `name:config:split`, or a folder that `save_to_disk` wrote."""
    rows: Part | None = None
    """Instead of a path, your own function that gives rows: `package.module:function`."""
    endless: bool = False
    """The function of `rows` never ends. Its rows are then taken as they come, none is kept, and none comes twice."""
    evaluation_path: Path | tuple[Path, ...] | None = None
    """Held-out rows in files of their own; nothing is then held out of the others."""
    evaluation_rows: Part | None = None
    """The same, as a function of your own that gives them."""
    evaluation_share: float = Field(0.1, gt=0, lt=1)
    """Share of the rows that is held out, chosen by a hash."""
    split: Literal["auto", "content", "number"] = "auto"
    """What is hashed: a row's content, so that rows may be added or moved and none changes sides; or its number, which
    needs no reading. `auto` is `number` where a file is too large to be read at the start."""
    question: str = "question"
    """Column that holds the problem, as text. Before it come a column `messages`, and `prompt` where `question` is not
    set, as text or in OpenAI's shape."""
    fields: dict[str, str] = Field(default_factory=dict)
    """Further names for columns, dots reaching inside: `{answer: reward_model.ground_truth}`. `messages`, `agent` and
    `id` may be named so too. Every column is a field under its own name as well."""
    max_prompt_tokens: int = Field(0, ge=0)
    """Longest prompt; 0 for any length."""
    overlong: Literal["drop", "cut", "refuse"] = "drop"
    """What becomes of a longer one: it is left out, its longest message loses its end, or the run does not start. Given
    rows count whole, against `sampling.max_context`, and lose what goes beyond."""
    deduplicate: bool = False
    """Keep only the first of rows with the same prompt."""
    shuffle: bool = True
    """Rows come in a new order every pass. Without it in their own, every pass."""

    @model_validator(mode="after")
    def _one_origin(self) -> RowsConfig:
        given = [name for name in ("path", "hub", "rows") if getattr(self, name) is not None]
        if len(given) > 1:
            raise ValueError(f"{' and '.join(given)} are given, and rows come from one of them. Leave the others out.")
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
    def _home_is_home(cls, given: Path | tuple[Path, ...] | None) -> Path | tuple[Path, ...] | None:
        """`~` is the user's folder; a list of one is that one."""
        if given == ():
            raise ValueError("an empty list. Name at least one file.")
        if isinstance(given, tuple):
            return tuple(path.expanduser() for path in given) if len(given) > 1 else given[0].expanduser()
        return given.expanduser() if given is not None else None

    @property
    def files(self) -> tuple[Path, ...]:
        """The files or folders of `path`."""
        return self.path if isinstance(self.path, tuple) else () if self.path is None else (self.path,)

    @property
    def has_rows(self) -> bool:
        """Whether tasks are rows of something, rather than made by an environment."""
        return self.path is not None or self.hub is not None or self.rows is not None


class DemonstrationsConfig(Config):
    """Transcripts that are imitated before reinforcement learning begins, and beside it. A bare string is the path."""

    shorthand: ClassVar[str] = "path"

    path: Path | None = None
    """File or folder of transcripts, as `algorithm=sft` takes them (docs/offline.md)."""
    rows: Part | None = None
    """Instead of a path, a function that gives transcripts: `package.module:function`, with `args`. It is called with
    the run's seed where it takes a `seed` that `args` does not give."""
    batch: int = Field(16, ge=1)
    """Rows a step."""
    steps: int = Field(0, ge=0)
    """The first of `trainer.steps`, which learn from demonstrations alone."""
    imitation_lr: float | None = Field(None, gt=0, allow_inf_nan=False)
    """Learning rate of those first steps; the schedule of `learner.lr` then begins after them. Without one, that
    schedule goes over all steps."""
    weight: float = Field(0.0, ge=0)
    """Of the demonstrations' loss in every step after those; 0 leaves them out."""
    overlong: Literal["drop", "cut", "refuse"] = "drop"
    """What becomes of a row with more than `sampling.max_context` tokens."""

    @model_validator(mode="after")
    def _fits_together(self) -> DemonstrationsConfig:
        used = self.steps > 0 or self.weight > 0
        if self.path is not None and self.rows is not None:
            raise ValueError("path and rows are given, and transcripts come from one of them. Leave the other out.")
        if used and not self.enabled:
            raise ValueError("demonstrations are asked for, and there are none. Write path=FILE.")
        if self.imitation_lr is not None and not self.steps:
            raise ValueError(
                "imitation_lr is the rate of the steps that learn from demonstrations alone. Write steps=20 too."
            )
        if self.enabled and not used:
            name = "path" if self.rows is None else "rows"
            raise ValueError(
                f"{name} is given, and nothing says when it is learned from. Write steps=20, or weight=0.1."
            )
        return self

    @property
    def enabled(self) -> bool:
        """Whether there are demonstrations."""
        return self.path is not None or self.rows is not None


class SourceSampling(Config):
    """What a source samples differently; without one, as the run. Its tokens are scored under what they were drawn
    from."""

    temperature: float | None = Field(None, gt=0, allow_inf_nan=False)
    top_k: int | None = Field(None, ge=0)
    top_p: float | None = Field(None, gt=0, le=1)
    min_p: float | None = Field(None, ge=0, le=1)
    max_tokens: int | None = Field(None, ge=1)
    """Sampled tokens a model call."""
    stop: StopTexts = ()
    """Further texts that end a completion."""


class SourceLimits(Config):
    """What an episode of this source may take; without one, the run's."""

    max_turns: int | None = Field(None, ge=1)
    max_context: int | None = Field(None, ge=8)
    episode_seconds: float | None = Field(None, gt=0)
    step_seconds: float | None = Field(None, gt=0)


class SourceConfig(RowsConfig):
    """One source of a mixture. What it does not say is the run's."""

    ratio: float | None = Field(None, ge=0)
    """Its share of every batch; without any, all sources have the same."""
    passes: int = Field(0, ge=0)
    """Times its rows may be used, after which it is exhausted; 0 for any number."""
    weight: float = Field(1.0, gt=0)
    """Of its episodes in the loss, beside those of other sources."""
    agent: AgentConfig | None = None
    env: EnvConfig | None = None
    """Without rows, the environment makes the tasks."""
    context: ContextConfig | None = None
    tools: tuple[ToolConfig, ...] | None = None
    """As the run's `tools`."""
    rewards: tuple[RewardConfig, ...] | None = None
    sampling: SourceSampling = SourceSampling()
    limits: SourceLimits = SourceLimits()


class StageConfig(Config):
    """Ratios from a step on."""

    step: int = Field(ge=0)
    ratios: dict[str, float]
    """By source; one that is not named keeps its own."""


class BandConfig(Config):
    """Less of what is too hard or too easy: a source outside the band has its ratio multiplied by `outside`."""

    low: float = Field(0.0, ge=0, le=1)
    """Lowest success, measured in training, of a source that is hard enough to learn from."""
    high: float = Field(1.0, ge=0, le=1)
    outside: float = Field(0.25, gt=0, le=1)
    decay: float = Field(0.9, ge=0, lt=1)
    """How much of the measured success survives a step."""

    @property
    def active(self) -> bool:
        return self.low > 0 or self.high < 1

    @model_validator(mode="after")
    def _is_a_band(self) -> BandConfig:
        if self.low >= self.high:
            raise ValueError(f"low={self.low:g} is not below high={self.high:g}.")
        return self


INHERITED = (
    "evaluation_share", "split", "question", "fields", "max_prompt_tokens", "overlong", "deduplicate", "shuffle",
)  # fmt: skip
"""Settings that a source takes from `data` where it has none of its own."""


class DataConfig(RowsConfig):
    """Where tasks come from. Without any rows the environment makes them, from the seed. A bare string is the path."""

    sources: dict[str, SourceConfig] = Field(default_factory=dict)
    """Several sources by name, mixed in every batch. Each has `path`, `hub`, `rows` or `env`, a `ratio`, and where it
    differs from the run its own `agent`, `context`, `env`, `tools`, `rewards`, `sampling`, `limits` and `weight`; and
    any of the settings above. See docs/data.md."""
    offline: bool = False
    """Rows say themselves what was said (transcripts, pairs, labelled answers) and are learned from as they are:
    nothing is sampled or played. Without a word they do with `algorithm=sft`, `dpo`, `ipo` or `kto`, unless an `env` or
    `rewards` are named, which play and judge. See docs/offline.md."""
    by: str | None = None
    """Column of the rows at `path` that says which source each belongs to, such as `data_source`."""
    agents: dict[str, AgentConfig] = Field(default_factory=dict)
    """What the names in the rows' column `agent_name` stand for, where they are not names of agents here."""
    strict: bool = False
    """Refuse ratios that do not add up to 1, instead of scaling them with a warning."""
    missing: Literal["refuse", "renormalise"] = "refuse"
    """A source that is not there or has no rows, or whose passes are used up: the run does not start, or the others
    fill its place."""
    schedule: tuple[StageConfig, ...] = ()
    """Other ratios from given steps on."""
    band: BandConfig = BandConfig()

    @model_validator(mode="before")
    @classmethod
    def _sources_inherit(cls, given: Any) -> Any:
        given = spelt_out(cls, given)
        if not isinstance(given, Mapping) or not isinstance(given.get("sources"), Mapping):
            return given
        common = {key: given[key] for key in INHERITED if key in given}
        sources = {}
        for name, source in given["sources"].items():
            own = spelt_out(SourceConfig, source)
            sources[name] = {**common, **own} if isinstance(own, Mapping) else own
        return {**given, "sources": sources}

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
        if self.by is not None and not (self.path or self.hub):
            raise ValueError(f"by={self.by} tells apart the rows of one file. Write path=FILE too.")
        for name, source in self.sources.items():
            self._check_source(name, source)
        self._check_ratios({name: source.ratio for name, source in self.sources.items()}, "sources")
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

    def _check_source(self, name: str, source: SourceConfig) -> None:
        if "/" in name or not name.strip():
            raise ValueError(f"sources: {name!r} is no name for a source. Use letters, digits, - and _.")
        if self.by is not None:
            if source.has_rows or source.evaluation_path or source.evaluation_rows:
                raise ValueError(f"sources.{name}.path: with by={self.by} the rows are those of path. Leave it out.")
        elif not source.has_rows and source.env is None:
            raise ValueError(f"sources.{name}: says nothing of where tasks come from. Write path=FILE or env=NAME.")

    def _check_ratios(self, ratios: Mapping[str, float | None], where: str) -> None:
        without = [name for name, ratio in ratios.items() if ratio is None]
        if without and len(without) < len(ratios):
            raise ValueError(f"{where}.{without[0]}.ratio: is missing, others have one. Give all sources one, or none.")
        given = [ratio for ratio in ratios.values() if ratio is not None]
        if given and not sum(given) > 0:
            raise ValueError(f"{where}: all ratios are 0, so there is nothing to train on. Give one source a ratio.")
        if self.strict and given and abs(sum(given) - 1) > 1e-9:
            raise ValueError(f"{where}: the ratios add up to {sum(given):g}, not to 1, and strict is on.")
