"""Load a run, a checkpoint, a model folder, adapters or a model name for serving; follow a run's checkpoints."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from arborl import checkpoint
from arborl.checkpoint import has_checkpoints
from arborl.config.load_config import load
from arborl.config.run_config import EnvConfig, RunConfig
from arborl.config.trust import load_run_config
from arborl.errors import ArborError, ConfigError
from arborl.models.model_files import read_model_config, resolve
from arborl.registry import short_name
from arborl.serve.engine_backend import EngineBackend, EngineThread
from arborl.serve.sessions import ServedAgents
from arborl.training_run.build import ServingParts, build_served
from arborl.training_run.run_folder import locate_model

log = logging.getLogger(__name__)

MAX_CONTEXT = 4096


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model and its agents."""

    served: ServingParts
    engine: EngineThread
    backend: EngineBackend
    agents: ServedAgents

    async def close(self) -> None:
        await self.engine.close()
        await self.served.tools.close()


def load_for_serving(
    path: str, settings: Sequence[str] = (), trust: bool = False, name: str | None = None, allow_untrained: bool = False
) -> LoadedModel:
    folder = Path(path)
    step = 0
    if allow_untrained and (folder / "config.yaml").exists() and not has_checkpoints(folder / "checkpoints"):
        config = load_run_config(folder / "config.yaml", settings, trust)
    else:
        found = locate_model(path, settings, trust)
        config = found.config if found.run is not None else default_config(path, settings)
        model = config.model.model_copy(update={"name": str(found.model)})
        config, step = config.model_copy(update={"model": model}), found.step
    served = build_served(config)
    engine = EngineThread(served.engine)
    engine.prepare(step, served.sampling)
    vocab_size, max_context = served.model.config.vocab_size, config.sampling.max_context
    name = name or folder.resolve().name
    backend = EngineBackend(engine, served.renderer, vocab_size, name, max_context, served.sampling)
    backend.version = step
    names = (short_name(config.agent.name), *config.data.agents)
    agents = ServedAgents(engine, served.renderer, served.episode_factories, served.sampling, served.limits, names)
    return LoadedModel(served, engine, backend, agents)


def default_config(name: str, settings: Sequence[str]) -> RunConfig:
    """The configuration of a model without a run: single questions, up to `MAX_CONTEXT` tokens."""
    max_context = min(int(read_model_config(resolve(name)).get("max_position_embeddings") or MAX_CONTEXT), MAX_CONTEXT)
    config = load(None, [f"sampling.max_context={max_context}", *settings])
    if not any(text.startswith("sampling.max_tokens") for text in settings):
        max_tokens = min(1024, config.sampling.max_context // 2)
        config = config.model_copy(update={"sampling": config.sampling.model_copy(update={"max_tokens": max_tokens})})
    if any(text.startswith("env") for text in settings):
        return config
    return config.model_copy(update={"env": EnvConfig(name="question")})  # needs no data outside of training


def checkpoints_dir(run: str) -> Path:
    if not (Path(run) / "config.yaml").exists():
        raise ConfigError(f"--follow {run}: contains no config.yaml. Write the folder of a run.")
    return Path(run) / "checkpoints"


class CheckpointFollower:
    """Loads each new checkpoint of a run as soon as it is complete. Running requests continue with the new weights."""

    def __init__(
        self, backend: EngineBackend, root: Path, read: Callable[[Path], Mapping[str, Any]], seconds: float = 2.0
    ):
        self.backend, self.root, self.read, self.seconds = backend, root, read, seconds
        self._unusable: set[tuple[Path, float]] = set()
        """Path and modification time of checkpoints that failed to load; each is logged once."""

    @asynccontextmanager
    async def follow(self) -> AsyncIterator[None]:
        """Check for checkpoints while the context is open."""
        task = asyncio.create_task(self._run())
        try:
            yield
        finally:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(self.seconds)
            await self.update()

    async def update(self) -> bool:
        """Load the newest checkpoint if it is newer than the served one; whether it was loaded. On an error the current
        weights stay."""
        newest = next(reversed(await asyncio.to_thread(checkpoint.complete_checkpoints, self.root)), None)
        step = int(newest.name.removeprefix("step-")) if newest is not None else -1
        if newest is None or step <= self.backend.version:
            return False
        mark = newest, 0.0
        try:
            mark = newest, newest.stat().st_mtime
            if mark in self._unusable:
                return False
            weights = await asyncio.to_thread(self.read, newest / "model")
            await self.backend.engine.load(weights, step)
        except (ArborError, OSError, KeyError, RuntimeError) as error:  # pruned meanwhile, damaged, or another shape
            self._unusable.add(mark)
            log.warning("checkpoint %s is not loaded: %s", newest, error)
            return False
        self.backend.version = step
        log.info("serving checkpoint %s", newest)
        return True
