"""The objective of a study: a whole training run in its own process.

Every trial is configured as by `arborl train`, from the same file and settings, starts with the same weights and seed,
and writes an ordinary run folder. By default all trials have the same number of episodes: a longer run is a better one,
so other budgets cannot be compared.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from arborl.child_process import supervised_command
from arborl.config.config_base import Config, flatten, setting_paths, to_plain
from arborl.config.load_config import format_override, load
from arborl.config.run_config import RunConfig
from arborl.config.secrets import mask_secrets
from arborl.cores import available_cores
from arborl.errors import ConfigError, RunStopped, did_you_mean
from arborl.models.model_files import resolve
from arborl.training_run.build import check, count_steps
from arborl.tune.space import KEYS, Params, Space
from arborl.tune.trial import Direction, StudyError, TrialReport

Budget = Literal["episodes", "free"]
NUM_EVALUATIONS = 4
"""Parts of a run with pruning; each ends with an evaluation."""
SHARED_PATHS = ("output_dir", "rollout.record")
"""Paths that all trials would write to."""
FIXED_SECTIONS = ("evaluation", "track", "name")
"""Sections about measuring and storing, which are equal for all trials."""
MINIMIZED = ("loss", "perplexity", "failed")


@dataclass(frozen=True, slots=True)
class RunObjective:
    """Trains with the parameters on top of a configuration, and returns a held-out metric."""

    file: Path | None
    settings: tuple[str, ...]
    metric: str
    """As in a run's `summary.json`: `reward`, `success`, `greedy_success`, `loss`, …"""
    base: RunConfig
    """The unchanged settings."""
    budget: Budget = "episodes"
    pruning: bool = True
    threads: int = 1
    """Of each trial's process."""

    @classmethod
    def of(
        cls,
        file: Path | None,
        settings: list[str],
        metric: str = "reward",
        budget: Budget = "episodes",
        pruning: bool = True,
        jobs: int = 1,
    ) -> RunObjective:
        base = load(file, settings)
        for key, value in flatten(to_plain(base)).items():
            if key in SHARED_PATHS and value is not None:
                raise ConfigError(f"{key}={value}: all trials would write there. Leave it out; see --study.")
        name = known_metric(base, metric)
        return cls(file, tuple(settings), name, base, budget, pruning, _threads(jobs))

    # -------------------------------------------------------------------------------------------- before all trials

    def check(self, space: Space) -> None:
        """Check that every parameter is a setting that accepts its values, and that the run's parts exist."""
        if self.base.evaluation.tasks == 0:
            raise ConfigError(
                "evaluation.tasks=0: trials cannot be compared without evaluation. Write evaluation.tasks=200."
            )
        _check_names(space)
        for name, domain in space.items():
            for value in domain.ends:
                self.config({name: value})
        check(self.base)
        resolve(self.base.model.name)

    def defaults(self, space: Space) -> Params:
        """The parameters' values in the unchanged settings."""
        return {name: _value(self.base, (KEYS.get(name) or (name,))[0]) for name in space}

    @property
    def about(self) -> dict[str, Any]:
        """What all trials of a study share."""
        return {"budget": self.budget, "config": flatten(mask_secrets(to_plain(self.base)))}

    # -------------------------------------------------------------------------------------------- a trial

    def overrides(self, params: Mapping[str, Any]) -> list[str]:
        """The settings of a trial on top of the base's."""
        settings = [format_override(key, value) for name, value in params.items() for key in KEYS.get(name, (name,))]
        if self.budget == "free" or not settings:
            return settings
        return [*settings, *budget_overrides(self.base, load(self.file, [*self.settings, *settings]))]

    def config(self, params: Mapping[str, Any]) -> RunConfig:
        """The run of these parameters."""
        settings = [*self.settings, *self.overrides(params)]
        return load(self.file, [*settings, *self._quiet(load(self.file, settings))])

    def _quiet(self, config: RunConfig) -> list[str]:
        """Turn off what trials do not need, unless the configuration sets it explicitly."""
        quiet_settings: dict[str, Any] = {
            "evaluation.before": False,  # equal for all trials
            "evaluation.greedy": self.metric.startswith("greedy_"),
            "track.gifs": 0,
            "track.tensorboard": False,
            "trainer.keep": 1,
        }
        if self.pruning:
            part = -(-count_steps(self.base) // NUM_EVALUATIONS) * episodes_per_step(self.base)
            quiet_settings["evaluation.every"] = max(1, part // episodes_per_step(config))
        explicit = {
            f"{name}.{key}" for name in ("evaluation", "track", "trainer") for key in _explicit_keys(config, name)
        }
        return [format_override(key, value) for key, value in quiet_settings.items() if key not in explicit]

    async def __call__(self, params: Params, report: TrialReport) -> float:
        if load(self.file, self.settings) != self.base:
            raise StudyError(f"{self.file} changed while its study runs. Start another study.")
        config = self.config(params).model_copy(update={"output_dir": report.folder})
        report.folder.parent.mkdir(parents=True, exist_ok=True)
        with report.folder.with_suffix(".log").open("wb") as log:
            process = await asyncio.create_subprocess_exec(
                *supervised_command([sys.executable, "-m", "arborl.tune.run_trial"], keep_stderr=True),
                stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=log,
                env=os.environ | {"OMP_NUM_THREADS": str(self.threads)},
                start_new_session=True,  # an interrupt reaches the study, which ends its trials
            )  # fmt: skip
        try:
            return await self._follow(process, config, report)
        finally:
            if process.returncode is None:
                process.terminate()  # with all processes of the run
            await process.wait()

    async def _follow(self, process: asyncio.subprocess.Process, config: RunConfig, report: TrialReport) -> float:
        """Send the configuration, answer reports, return the final value."""
        assert process.stdin is not None
        assert process.stdout is not None
        request: dict[str, Any] = {"config": to_plain(config), "metric": self.metric}
        while True:
            with suppress(ConnectionError):  # the process died
                process.stdin.write(json.dumps(request).encode() + b"\n")
                await process.stdin.drain()
            line = await process.stdout.readline()
            reply = json.loads(line) if line.endswith(b"\n") else {}
            if "step" not in reply:
                break
            request = {"stop": report(reply["step"], reply["value"])}
        if "value" in reply:
            return float(reply["value"])
        if "has" in reply:
            raise StudyError(_no_metric(self.metric, reply["has"]))
        where = report.folder.with_suffix(".log")
        raise RunStopped(reply.get("error") or f"its process ended with code {await process.wait()}; see {where}")


def _check_names(space: Space) -> None:
    """Check that parameters are about training, and that no two set the same key."""
    everywhere, set_by = set(setting_paths(RunConfig)), dict[str, str]()
    for name in space:
        word = name.rpartition(".")[2]
        if name not in everywhere and name not in KEYS and word in KEYS:
            raise ConfigError(f"{name}: unknown key. Did you mean {KEYS[word][0]!r}?")
        if name in SHARED_PATHS or name.partition(".")[0] in FIXED_SECTIONS:
            raise ConfigError(f"{name}: how trials are measured and stored must be the same for all. Leave it out.")
        for key in KEYS.get(name, (name,)):
            if other := set_by.get(key):
                raise ConfigError(f"{name} and {other} both set {key}. Leave one out.")
            set_by[key] = name


def known_metric(config: RunConfig, name: str) -> str:
    """The metric's name in a run's summary; an error if such a run does not have it."""
    short = name.removeprefix("eval/").removeprefix("evaluation/")
    if config.data.offline:
        known = ["loss", "perplexity", "accuracy", "margin"]
    else:
        sources = [f"/{source}" for source in config.data.sources] if len(config.data.sources) > 1 else []
        ways = [""] if config.evaluation.greedy is False else ["", "greedy_"]
        known = [f"{way}{what}{source}" for way in ways for what in ("reward", "success") for source in ("", *sources)]
    if short not in known:
        raise ConfigError(_no_metric(name, known))
    return short


def default_direction(metric: str) -> Direction:
    return "minimize" if metric.partition("/")[0] in MINIMIZED else "maximize"


def _no_metric(name: str, known: list[str]) -> str:
    return f"metric={name}: the run does not measure it.{did_you_mean(name, known)} It has: {', '.join(known)}."


def _explicit_keys(config: RunConfig, name: str) -> set[str]:
    """Keys of a section that the configuration sets explicitly."""
    section: Config = getattr(config, name)
    return section.model_fields_set if name in config.model_fields_set else set()


def _value(config: RunConfig, key: str) -> Any:
    """The value of a key; of a section its short form."""
    found: Any = config
    for part in key.split("."):
        found = getattr(found, part, None) if isinstance(found, Config) else (found or {}).get(part)
    if isinstance(found, Config):
        found = getattr(found, found.shorthand, None) if found.shorthand else None
    return found if found is None or isinstance(found, str | int | float) else None


def _threads(jobs: int) -> int:
    """The machine's cores divided by the jobs, at most OMP_NUM_THREADS."""
    allowed = os.environ.get("OMP_NUM_THREADS", "")
    share = max(1, available_cores() // jobs)
    return min(share, int(allowed)) if allowed.isdecimal() and int(allowed) else share


FREE = "or write --budget free for trials of different cost"


def episodes(config: RunConfig) -> int | None:
    """Episodes of a whole run; None if its length is given in epochs."""
    return None if config.trainer.steps is None else config.trainer.steps * episodes_per_step(config)


def episodes_per_step(config: RunConfig) -> int:
    """Episodes, or demonstrations, of one step."""
    rollout = config.rollout
    return rollout.tasks_per_step * (1 if config.data.offline else rollout.group_size)


def budget_overrides(base: RunConfig, trial: RunConfig) -> list[str]:
    """Settings that give the trial as many episodes as the base: fewer tasks per step for larger groups, so that the
    number of updates stays; otherwise another number of steps."""
    if any(getattr(base.trainer, length) != getattr(trial.trainer, length) for length in ("steps", "epochs")):
        raise ConfigError(
            "trainer.steps and trainer.epochs are the cost of a trial; a search would choose the largest. "
            f"Leave them out, {FREE}."
        )
    if episodes_per_step(base) == episodes_per_step(trial):
        return []
    whole = episodes(base)
    if whole is None:
        raise ConfigError(
            f"trainer.epochs={base.trainer.epochs}: with {episodes_per_step(trial)} episodes per step instead of "
            f"{episodes_per_step(base)}, trials would differ in cost. Write trainer.steps, {FREE}."
        )
    size = 1 if base.data.offline else trial.rollout.group_size
    if base.rollout.tasks_per_step == trial.rollout.tasks_per_step:
        key, number, by = "rollout.tasks_per_step", episodes_per_step(base), size
    else:
        key, number, by = "trainer.steps", whole, episodes_per_step(trial)
    if number % by:
        what = "a step" if key == "rollout.tasks_per_step" else "a run"
        raise ConfigError(
            f"rollout.group_size={trial.rollout.group_size}, tasks_per_step={trial.rollout.tasks_per_step}: the "
            f"{number} episodes of {what} cannot be divided by {by}, so trials would differ in cost. Write "
            f"choices that divide {number}, {FREE}."
        )
    return [f"{key}={number // by}"]
