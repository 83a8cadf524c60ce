"""Settings of the engine (local, vLLM or servers) and of the placement of parts on a Ray cluster."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, ValidationInfo, field_validator, model_validator

from arborl.config.config_base import Config, KeysOf, check_args
from arborl.config.part_config import NamedConfig


class EngineArgs(Config):
    """Arguments of single engines. Others are for vLLM's `AsyncEngineArgs` (`{tensor_parallel_size: 2}`), or for a
    custom engine."""

    block_size: int = Field(0, ge=0)
    """`local`: tokens per block of the KV cache. 0: 64 on a GPU, a whole sequence on a CPU."""
    update: Literal["continue", "finish", "restart"] = "continue"
    """`local`: completions in progress at a weight update, with `rollout.max_lag`: `continue` with the new weights
    (each token keeps its policy version), `finish` with the old weights first, or `restart`. Other engines always
    continue."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """`vllm`, `http` and `sglang`: precision; `auto` is `model.dtype`. If it is lower than the learner's, write
    `algorithm.importance_weights=tis`."""
    python: str | None = None
    """`vllm`: Python interpreter of an environment with vLLM."""
    urls: tuple[str, ...] = ()
    """`http` and `sglang`: servers with the same model, `[http://host:8000, …]`."""
    model: str | None = None
    """`http`: model name on the servers. Default: the model that they serve."""
    weights_dir: Path | None = None
    """`http` and `sglang`: folder in which weights are written for the servers, with the same path on both. Default:
    the temporary folder."""
    seconds: float = Field(600.0, gt=0)
    """`http` and `sglang`: timeout of a request, and of waiting if no server answers."""
    chat: bool = False
    """`http`: use only `/v1/chat/completions`: evaluation of a model without its tokenizer."""
    api_key_env: str | None = None
    """`http` and `sglang`: environment variable with the API key of the servers."""
    replies: tuple[str, ...] = ()
    """`scripted`: replies, drawn at random. Default: the actions of the environment."""

    @field_validator("urls")
    @classmethod
    def _check_urls(cls, urls: tuple[str, ...]) -> tuple[str, ...]:
        for url in urls:
            if not re.fullmatch(r"https?://[^\s/]+(/\S*)?", url):
                raise ValueError(f"{url!r} is not an address. Write http://HOST:PORT.")
        if len(set(urls)) != len(urls):
            raise ValueError("a server is named twice. Name each once.")
        return urls


ENGINE_ARGS = {
    "local": ("block_size", "update"),
    "vllm": ("dtype", "python"),
    "http": ("dtype", "urls", "model", "weights_dir", "seconds", "chat", "api_key_env"),
    "sglang": ("dtype", "urls", "weights_dir", "seconds", "api_key_env"),
    "scripted": ("replies",),
    "none": (),
}
"""Arguments by engine of the library."""
SERVER_ENGINES = ("http", "sglang")
"""Engines that are running servers."""


class EngineConfig(NamedConfig):
    """The engine that samples completions."""

    name: str = "local"
    """`local` (in this process, shares the weights of the learner), `vllm` (vLLM in a separate process), `http`
    (running servers), `sglang` (running SGLang servers) or `scripted` (fixed replies). With `data.offline` it is
    `none`. See docs/engines.md."""
    max_requests: int = Field(0, ge=0)
    """Maximum concurrent requests of `local` and `vllm`, and per server of `http` and `sglang`; others wait. 0: 1,024
    for `local` on a GPU, else 256."""
    kv_tokens: int = Field(0, ge=0)
    """Size of the KV cache of `local` and `vllm` in tokens. 0: 30 % of the free GPU memory, less if the learner needs
    it; 10 % of the host memory on a CPU. If the cache is full, the newest request is preempted and resumed later with
    the same tokens."""
    sleep_mode: bool = False
    """Release GPU memory while the learner updates: `vllm` releases weights and KV cache (its sleep mode), `local` its
    KV cache if the run would not fit otherwise or would need gradient checkpointing."""
    args: Annotated[dict[str, Any], KeysOf(EngineArgs)] = Field(default_factory=dict)
    """Arguments of this engine, as listed below."""

    @field_validator("args")
    @classmethod
    def _check_args(cls, args: dict[str, Any], info: ValidationInfo) -> dict[str, Any]:
        engine, fields = info.data.get("name"), EngineArgs.model_fields
        if engine not in ENGINE_ARGS:
            return args
        own = {name: value for name, value in args.items() if engine == "vllm" and name not in fields}

        def unread(name: str) -> str:
            of = [other for other, names in ENGINE_ARGS.items() if name in names]
            return f"is for engine={' and engine='.join(of)}, not for engine={engine}."

        written = {name: value for name, value in args.items() if name not in own}
        given = check_args(EngineArgs, written, ENGINE_ARGS[engine], unread)
        return given.model_dump(include=set(ENGINE_ARGS[engine]), exclude_unset=True) | own

    @model_validator(mode="after")
    def _check_engine(self) -> EngineConfig:
        for key in ("kv_tokens", "sleep_mode"):
            if getattr(self, key) and self.name in ENGINE_ARGS and self.name not in ("local", "vllm"):
                raise ValueError(f"{key} is for engine=local and engine=vllm, not for engine={self.name}.")
        if self.name in SERVER_ENGINES and not self.options.urls:
            port = 30000 if self.name == "sglang" else 8000
            raise ValueError(f"engine={self.name} needs servers. Write engine.args.urls=[http://HOST:{port}].")
        return self

    @property
    def options(self) -> EngineArgs:
        """`args` of the library's engines, with defaults."""
        known = ENGINE_ARGS.get(self.name, ())
        return EngineArgs.model_construct(**{name: value for name, value in self.args.items() if name in known})

    @property
    def own_args(self) -> dict[str, Any]:
        """`args` of vLLM, or of a custom engine."""
        return {name: value for name, value in self.args.items() if name not in ENGINE_ARGS.get(self.name, ())}

    def requests(self, device: str = "cpu") -> int:
        """`max_requests`, with the default for this device type if it is 0."""
        return self.max_requests or (1024 if self.name == "local" and device == "cuda" else 256)

    def scripted(self) -> EngineConfig:
        """Fixed replies as the engine: those of this engine if it has some."""
        return EngineConfig(name="scripted", args=self.args if self.name == "scripted" else {})


class DeviceMappingConfig(Config):
    """GPUs by role, numbered over the cluster: those of the driver's node first, then the other nodes by address."""

    engines: tuple[int, ...] = ()
    """GPU of each engine; a GPU may be listed twice. Default, if the learner is on a GPU: the first GPUs that it does
    not use."""

    @model_validator(mode="after")
    def _check_gpus(self) -> DeviceMappingConfig:
        if any(number < 0 for number in self.engines):
            raise ValueError(f"engines={list(self.engines)}: GPUs are counted from 0.")
        return self


class PlacementConfig(Config):
    """Placement of the parts of a run; results do not depend on it. See docs/scale-out.md."""

    shorthand: ClassVar[str] = "name"

    name: Literal["local", "ray"] = "local"
    """`local`: in this process. `ray`: on a Ray cluster (needs the extra `ray`), with the counts below; the trainer and
    rank 0 of the learner stay in this process, its other ranks (`learner.ranks`) run on the cluster."""
    address: str | None = None
    """Cluster to join, `HOST:6379`. Default: `RAY_ADDRESS`, else a cluster that is started on this machine for the
    run."""
    engines: int = Field(0, ge=0)
    """Number of replicas of `engine=local`, one process each, with `threads` CPU cores (1 if not set). An episode stays
    on one replica; new episodes go to the least loaded. 0: the engine runs in this process."""
    env_workers: int = Field(0, ge=0)
    """Number of processes for environments. 0: as `rollout.workers`, on this machine."""
    reward_workers: int = Field(0, ge=0)
    """Number of processes for rewards, except `env`. 0: in this process."""
    device_mapping: DeviceMappingConfig = DeviceMappingConfig()
    seconds: float = Field(120.0, gt=0)
    """Timeout of the start of a process on the cluster, and of waiting if no engine is left."""

    @model_validator(mode="after")
    def _check_counts(self) -> PlacementConfig:
        counts = ("engines", "env_workers", "reward_workers")
        if self.name == "local":
            for key in ("address", *counts, "device_mapping"):
                default = type(self).model_fields[key].get_default(call_default_factory=True)
                if getattr(self, key) != default:
                    raise ValueError(f"{key} is for placement=ray, and placement=local. Write placement=ray too.")
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
