"""From a path or a name to what is served: a run, a checkpoint, a model's folder, adapters, an embedded model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from arborl.checkpoint import has_checkpoints
from arborl.config.load_config import load
from arborl.config.run_config import EnvConfig, RunConfig
from arborl.config.trust import load_run_config
from arborl.errors import ConfigError
from arborl.models.find import described, resolve
from arborl.registry import short_name
from arborl.serve.sessions import Company
from arborl.serve.speaker import EngineThread, Speaker
from arborl.training_run.build import ServingParts, build_served
from arborl.training_run.run_folder import locate_model

WINDOW = 4096
"""Tokens of context of a model that no run says anything about, where it reads as many."""


@dataclass(frozen=True, slots=True)
class Opened:
    """A model and its agents, ready to be asked."""

    served: ServingParts
    engine: EngineThread
    speaker: Speaker
    company: Company

    async def close(self) -> None:
        await self.engine.close()
        await self.served.tools.close()


def open_model(
    path: str, settings: Sequence[str] = (), trust: bool = False, name: str | None = None, begins: bool = False
) -> Opened:
    """What is at a path, at work.

    Args:
        path: a run's folder, a checkpoint, a model's folder, adapters, or a model's name.
        settings: on top of the run's, as on a command line.
        trust: import what a run's folder names though this user did not write it.
        name: what clients call it; that of the run or of the model by default.
        begins: of a run without a checkpoint, take the model that it begins with.
    """
    run = Path(path)
    step = 0
    if begins and (run / "config.yaml").exists() and not has_checkpoints(run / "checkpoints"):
        config = load_run_config(run / "config.yaml", settings, trust)
    else:
        found = locate_model(path, settings, trust)
        config = found.config if found.run is not None else bare(path, settings)
        config = named(config, str(found.model))
        step = found.step
    served = build_served(config)
    engine = EngineThread(served.engine)
    engine.prepare(step, served.sampling)
    size, called = served.model.config.vocab_size, name or run.resolve().name
    speaker = Speaker(engine, served.renderer, size, called, config.sampling.max_context, served.sampling)
    speaker.version = step
    agents = (short_name(config.agent.name), *config.data.agents)
    company = Company(engine, served.renderer, served.cast, served.sampling, served.limits, agents)
    return Opened(served, engine, speaker, company)


def bare(name: str, settings: Sequence[str]) -> RunConfig:
    """A model that no run says anything about: it is asked questions, in all the context it has."""
    longest = described(resolve(name)).get("max_position_embeddings") or WINDOW
    size = min(int(longest), WINDOW)
    config = load(None, [f"sampling.max_context={size}", *settings])
    if not any(text.startswith("sampling.max_tokens") for text in settings):
        longest = min(1024, config.sampling.max_context // 2)
        config = config.model_copy(update={"sampling": config.sampling.model_copy(update={"max_tokens": longest})})
    if any(text.startswith("env") for text in settings):
        return config
    return config.model_copy(update={"env": EnvConfig(name="question")})  # which needs rows only to be trained on


def named(config: RunConfig, model: str) -> RunConfig:
    return config.model_copy(update={"model": config.model.model_copy(update={"name": model})})


def checkpoints_of(run: str) -> Path:
    """The folder of a run's checkpoints."""
    if not (Path(run) / "config.yaml").exists():
        raise ConfigError(f"--follow {run}: there is no run (no config.yaml). Give a run's folder.")
    return Path(run) / "checkpoints"
