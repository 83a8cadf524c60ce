"""Where the parts of a run are: all in this process, or some on a Ray cluster."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field, model_validator

from arborl.config.base import Config

if TYPE_CHECKING:
    from arborl.config.run import RunConfig


class DeviceMappingConfig(Config):
    """GPUs by role, numbered over the whole cluster: those of the driver's node first, then of the other nodes by their
    addresses. Lists, never code."""

    engines: tuple[int, ...] = ()
    """The GPU of each engine; a GPU that is named twice is shared. Without it, where the learner is on a GPU, the first
    ones that are not the learner's."""

    @model_validator(mode="after")
    def _are_numbers_of_gpus(self) -> DeviceMappingConfig:
        if any(number < 0 for number in self.engines):
            raise ValueError(f"engines={list(self.engines)}: GPUs are counted from 0.")
        return self


class PlacementConfig(Config):
    """Where the parts of a run are. What they do does not depend on it. See docs/scale-out.md."""

    shorthand: ClassVar[str] = "name"

    name: Literal["local", "ray"] = "local"
    """`local`: in this process. `ray`: on a Ray cluster (needs the extra `ray`), as many of each as the keys below say;
    the trainer and the learner's first rank stay here, and its further ranks (`learner.ranks`) go there."""
    address: str | None = None
    """The cluster to join, `HOST:6379`. Without it the one that `RAY_ADDRESS` names; without that, one of the run's own
    is started on this machine and stopped with the run."""
    engines: int = Field(0, ge=0)
    """Copies of `engine=local`, each in a process of its own; an episode stays with one, the next goes to the one with
    the least to do. 0: the engine is here."""
    cpus_per_engine: int = Field(1, ge=1)
    """Cores that each of these is given, and threads that it uses, where `threads` says nothing."""
    env_workers: int = Field(0, ge=0)
    """Processes that environments run in, all of them. 0: as `rollout.workers` says, on this machine."""
    reward_workers: int = Field(0, ge=0)
    """Processes that rewards are computed in, all but `env`. 0: here."""
    device_mapping: DeviceMappingConfig = DeviceMappingConfig()
    seconds: float = Field(120.0, gt=0)
    """What the start of a process on the cluster may take, and how long a run waits where no engine is left."""

    @model_validator(mode="after")
    def _places_something(self) -> PlacementConfig:
        counts = ("engines", "env_workers", "reward_workers")
        if self.name == "local":
            for key in ("address", *counts, "cpus_per_engine", "device_mapping"):
                default = type(self).model_fields[key].get_default(call_default_factory=True)
                if getattr(self, key) != default:
                    raise ValueError(f"{key} is for placement=ray, and placement=local. Write placement=ray too.")
        if self.cpus_per_engine != 1 and not self.engines:
            raise ValueError("cpus_per_engine is of engines, and there are none. Write placement.engines=2 too.")
        named = len(self.device_mapping.engines)
        if named and named != self.engines:
            raise ValueError(
                f"device_mapping.engines names {named} GPUs for engines={self.engines}: each engine has one. Write as "
                "many as engines."
            )
        if self.address is not None and not re.fullmatch(r"[^\s:/]+:\d+|\[[0-9a-fA-F:]+\]:\d+", self.address):
            raise ValueError(
                f"address={self.address} is not HOST:PORT of a cluster's head. Write placement.address=HOST:6379; from "
                "elsewhere, `ray job submit` runs the whole command there."
            )
        return self


def check_placement(config: RunConfig) -> None:
    """That what is placed is what the rest of the configuration is about."""
    placed, engine = config.placement, config.engine
    counts = (placed.engines, placed.env_workers, placed.reward_workers, config.learner.ranks - 1)
    if placed.name == "ray" and not any(counts):
        raise ValueError(
            "placement=ray places nothing. Write placement.engines=2, or another of its counts, or learner.ranks=2."
        )
    if placed.engines:
        if engine.name != "local":
            raise ValueError(
                f"placement.engines={placed.engines} are copies of engine=local, and engine={engine.name}. Leave it "
                "out; several vLLM servers are written engine=http engine.urls=[…]."
            )
        if engine.sleep_mode:
            raise ValueError(
                f"engine.sleep_mode is of an engine beside the learner, and placement.engines={placed.engines} have their "
                "own memory. Leave engine.sleep_mode out."
            )
        if config.model.quantize != "none":
            raise ValueError(
                f"model.quantize={config.model.quantize} with placement.engines={placed.engines}: quantised weights "
                "are not sent. Write placement.engines=0, or model.quantize=none."
            )
    if placed.device_mapping.engines and config.model.device.partition(":")[0] == "cpu":
        raise ValueError("placement.device_mapping names GPUs, and model.device=cpu. Leave one of them out.")
    if placed.env_workers and config.rollout.workers not in ("auto", "process"):
        raise ValueError(
            f"placement.env_workers={placed.env_workers} are processes, and rollout.workers={config.rollout.workers}. "
            "Leave one of them out."
        )
    if placed.env_workers and config.rollout.envs.max_env_num_per_worker:
        raise ValueError(
            f"placement.env_workers={placed.env_workers} divides the environments, and so does "
            "rollout.envs.max_env_num_per_worker. Leave one of them out."
        )
