"""What a setting is worth on a run: a whole training run of it, in a process of its own.

Every trial is composed as `arborl train` would compose it, from the same file and settings; starts from the same
weights and the same seed; and leaves an ordinary run folder. A trial that crashes costs itself.
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

from arborl.config.config_base import Config, setting_paths, to_plain
from arborl.config.load_config import format_override, load
from arborl.config.run_config import RunConfig
from arborl.config.secrets import mask_secrets
from arborl.errors import ConfigError, RunStopped, did_you_mean
from arborl.models.find import resolve
from arborl.training_run.build import check, count_steps
from arborl.training_run.resume import flatten
from arborl.tune.budget import a_step, evened
from arborl.tune.named import KEYS
from arborl.tune.space import Params, Space
from arborl.tune.trial import Direction, EndsStudy, Report

Budget = Literal["episodes", "free"]
LOOKS = 4
"""With pruning, parts of a run; between them it is measured."""
SHARED = ("output_dir", "rollout.record", "track.render_save_dir")
"""Places that all trials would write to at once."""
SAME = ("evaluation", "track", "name")
"""Sections that say how a run is measured and kept, and nothing of how it trains."""
SMALLER = ("loss", "perplexity", "failed")
"""Measures of which less is better."""


@dataclass(frozen=True, slots=True)
class RunObjective:
    """An objective: settings on top of a file's, and what held-out tasks say after training with them.

    Example:
        objective = RunObjective.of(Path("run.yaml"), ["trainer.steps=20"], metric="success")
        objective.check(space)
    """

    file: Path | None
    settings: tuple[str, ...]
    metric: str
    """As `summary.json` of a run calls it: `reward`, `success`, `greedy_success`, `loss`, …"""
    base: RunConfig
    """The settings as they are."""
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
            if key in SHARED and value is not None:
                raise ConfigError(f"{key}={value}: all trials would write there. Leave it out; see --study.")
        name = known_metric(base, metric)
        return cls(file, tuple(settings), name, base, budget, pruning, _threads(jobs))

    # -------------------------------------------------------------------------------------------- before all trials

    def check(self, space: Space) -> None:
        """That every parameter is a key, that every end of a range and every choice is allowed there, and that the
        run's parts are there: before anything is written."""
        if self.base.evaluation.tasks == 0:
            raise ConfigError("evaluation.tasks=0: nothing would tell trials apart. Write evaluation.tasks=200.")
        _check_names(space)
        for name, domain in space.items():
            for value in domain.ends:
                self.config({name: value})
        check(self.base)
        resolve(self.base.model.name)

    def defaults(self, space: Space) -> Params:
        """What the settings as they are say of the parameters."""
        return {name: _value(self.base, (KEYS.get(name) or (name,))[0]) for name in space}

    @property
    def about(self) -> dict[str, Any]:
        """What trials of one study have in common."""
        return {"budget": self.budget, "config": flatten(mask_secrets(to_plain(self.base)))}

    # -------------------------------------------------------------------------------------------- a trial

    def overrides(self, params: Mapping[str, Any]) -> list[str]:
        """The settings that a trial has besides the base's."""
        asked = [format_override(key, value) for name, value in params.items() for key in KEYS.get(name, (name,))]
        if self.budget == "free" or not asked:
            return asked
        return [*asked, *evened(self.base, load(self.file, [*self.settings, *asked]))]

    def config(self, params: Mapping[str, Any]) -> RunConfig:
        """The run of these parameters."""
        asked = [*self.settings, *self.overrides(params)]
        return load(self.file, [*asked, *self._quiet(load(self.file, asked))])

    def _quiet(self, config: RunConfig) -> list[str]:
        """What nobody asked for is left out of trials; what was said in so many words stays."""
        wishes: dict[str, Any] = {
            "evaluation.before": False,  # all begin alike
            "evaluation.greedy": self.metric.startswith("greedy_"),
            "track.gifs": 0,
            "track.tensorboard": False,
            "trainer.keep": 1,
        }
        if self.pruning:
            part = -(-count_steps(self.base) // LOOKS) * a_step(self.base)
            wishes["evaluation.every"] = max(1, part // a_step(config))
        said = {f"{name}.{key}" for name in ("evaluation", "track", "trainer") for key in _given(config, name)}
        return [format_override(key, value) for key, value in wishes.items() if key not in said]

    async def __call__(self, params: Params, report: Report) -> float:
        if load(self.file, self.settings) != self.base:
            raise EndsStudy(f"{self.file} was changed while its study runs. Begin another study with it.")
        config = self.config(params).model_copy(update={"output_dir": report.folder})
        report.folder.parent.mkdir(parents=True, exist_ok=True)
        with report.folder.with_suffix(".log").open("wb") as log:
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "arborl.tune.run_trial",
                stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=log,
                env=os.environ | {"OMP_NUM_THREADS": str(self.threads)},
                start_new_session=True,  # who interrupts a study means the study, which then ends its trials
            )  # fmt: skip
        try:
            return await self._follow(process, config, report)
        finally:
            if process.returncode is None:
                process.kill()
            await process.wait()

    async def _follow(self, process: asyncio.subprocess.Process, config: RunConfig, report: Report) -> float:
        """Hand the run over, answer its reports, and return its number."""
        assert process.stdin is not None
        assert process.stdout is not None
        order: dict[str, Any] = {"config": to_plain(config), "metric": self.metric}
        while True:
            with suppress(ConnectionError):  # it has died; nothing more is to be read either
                process.stdin.write(json.dumps(order).encode() + b"\n")
                await process.stdin.drain()
            line = await process.stdout.readline()
            said = json.loads(line) if line.endswith(b"\n") else {}
            if "step" not in said:
                break
            order = {"stop": report(said["step"], said["value"])}
        if "value" in said:
            return float(said["value"])
        if "has" in said:
            raise EndsStudy(_no_metric(self.metric, said["has"]))
        where = report.folder.with_suffix(".log")
        raise RunStopped(said.get("error") or f"its process ended with code {await process.wait()}; see {where}")


def _check_names(space: Space) -> None:
    """That parameters are about training, and that no two of them set the same key."""
    everywhere, set_by = set(setting_paths(RunConfig)), dict[str, str]()
    for name in space:
        word = name.rpartition(".")[2]
        if name not in everywhere and name not in KEYS and word in KEYS:
            raise ConfigError(f"{name}: unknown key. Did you mean {KEYS[word][0]!r}?")
        if name in SHARED or name.partition(".")[0] in SAME:
            raise ConfigError(
                f"{name}: is about how trials are measured or kept, which must be the same for all. Leave it out."
            )
        for key in KEYS.get(name, (name,)):
            if other := set_by.get(key):
                raise ConfigError(f"{name} and {other} both set {key}. Leave one out.")
            set_by[key] = name


def known_metric(config: RunConfig, name: str) -> str:
    """The metric by the name that a run's summary has for it; an error where such a run cannot have it."""
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


def usual_direction(metric: str) -> Direction:
    return "minimize" if metric.partition("/")[0] in SMALLER else "maximize"


def _no_metric(name: str, known: list[str]) -> str:
    return f"metric={name}: the run does not measure it.{did_you_mean(name, known)} It has: {', '.join(known)}."


def _given(config: RunConfig, name: str) -> set[str]:
    """Keys of a section that somebody wrote."""
    section: Config = getattr(config, name)
    return section.model_fields_set if name in config.model_fields_set else set()


def _value(config: RunConfig, key: str) -> Any:
    """What the configuration says there; of a section, its short form."""
    found: Any = config
    for part in key.split("."):
        found = getattr(found, part, None) if isinstance(found, Config) else (found or {}).get(part)
    if isinstance(found, Config):
        found = getattr(found, found.shorthand, None) if found.shorthand else None
    return found if found is None or isinstance(found, str | int | float) else None


def _threads(jobs: int) -> int:
    """This machine's cores, divided; no more than somebody allowed."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    allowed = os.environ.get("OMP_NUM_THREADS", "")
    share = max(1, cores // jobs)
    return min(share, int(allowed)) if allowed.isdecimal() and int(allowed) else share
