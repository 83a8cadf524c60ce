"""What samples: in this process, in vLLM's, or at servers."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, model_validator

from arborl.config.parts import Named

LIBRARY = ("local", "vllm", "http", "scripted", "none")
"""Engines of the library; others read what they like."""


class EngineConfig(Named):
    """What samples."""

    name: str = "local"
    """`local` (in this process, sharing the learner's weights), `vllm` (vLLM in a process of its own), `http` (servers
    that run already) or `scripted` (fixed replies). With `data.offline` it is `none`. See docs/engines.md."""
    max_requests: int = Field(0, ge=0)
    """Requests `local` and `vllm` sample at once; others wait their turn. Where every server of `http` has so many, no
    further episodes are begun. 0 chooses: 1,024 for `local` on a GPU, else 256."""
    kv_tokens: int = Field(0, ge=0)
    """Tokens whose keys and values `local` and `vllm` keep. 0 takes a share of the memory: 30 % of what a GPU has free,
    or less where the learner needs it; 10 % of a machine's. When it runs out the youngest request is put back and goes
    on later, with the same tokens."""
    sleep_mode: bool = False
    """On a GPU that learner and engine share: `vllm` gives its memory back while the learner works, `local` its keys'
    and values', where the run would else not fit or would have to run layers twice."""
    page_size: int = Field(0, ge=0)
    """Tokens a page of that memory. 0 chooses: 64 on a GPU; on a CPU a whole sequence, so that nothing is gathered."""
    update: Literal["continue", "finish", "restart"] = "continue"
    """What becomes of a completion that new weights find half-way, with `rollout.max_lag`: it goes on, each token with
    the version that sampled it; is first brought to its end under the old weights; or begins again under the new. With
    `vllm` and `http` it always goes on."""
    replies: tuple[str, ...] = ()
    """What `scripted` says, at random; without any, the environment's own moves."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """What `vllm` computes in, or the servers of `http` do; `auto` is `model.dtype`. Where it is coarser than the
    learner's, write `algorithm.importance_weights=tis`."""
    python: str | None = None
    """The Python interpreter of an environment that has vLLM, for `vllm`: it may pin other versions than this one."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Further arguments of vLLM's `AsyncEngineArgs`, for `vllm`: `{tensor_parallel_size: 2}`."""
    urls: tuple[str, ...] = ()
    """The servers of `http`: `[http://host:8000, …]`, each of the same model."""
    model: str | None = None
    """What the servers of `http` call their model; without it, the one that they have."""
    weights_dir: Path | None = None
    """Where `http` puts weights for its servers to read, a folder that they see under the same path; without it, in the
    machine's temporary folder."""
    seconds: float = Field(600.0, gt=0)
    """What a server of `http` may take for a request; and how long a run waits where none of them answers."""
    chat: bool = False
    """Only chat with the servers of `http` (`/v1/chat/completions`), whatever else they offer: to measure a model whose
    tokenizer is not at hand."""
    api_key_env: str | None = None
    """The environment variable that holds the key of `http`'s servers, where they want one."""

    @model_validator(mode="after")
    def _of_its_kind(self) -> EngineConfig:
        own = {
            "local": ("kv_tokens", "sleep_mode", "page_size", "update"),
            "vllm": ("kv_tokens", "sleep_mode", "dtype", "python", "args"),
            "http": ("dtype", "urls", "model", "weights_dir", "seconds", "chat", "api_key_env"),
            "scripted": ("replies",),
        }
        for key in sorted({key for keys in own.values() for key in keys}):
            default = type(self).model_fields[key].get_default(call_default_factory=True)
            of = [name for name, keys in own.items() if key in keys]
            if getattr(self, key) != default and self.name in LIBRARY and self.name not in of:
                raise ValueError(f"{key} is for engine={' and engine='.join(of)}, not for engine={self.name}.")
        if self.name == "http" and not self.urls:
            raise ValueError("engine=http needs its servers. Write engine.urls=[http://HOST:8000].")
        for url in self.urls:
            if not re.fullmatch(r"https?://[^\s/]+(/\S*)?", url):
                raise ValueError(f"urls: {url!r} is no address. Write http://HOST:PORT.")
        if len(set(self.urls)) != len(self.urls):
            raise ValueError("urls: a server is named twice. Name each once.")
        return self

    def requests(self, device: str = "cpu") -> int:
        """`max_requests`, or what 0 stands for on a device of this type."""
        return self.max_requests or (1024 if self.name == "local" and device == "cuda" else 256)

    def scripted(self) -> EngineConfig:
        """Fixed replies, whatever samples now."""
        return EngineConfig(name="scripted", replies=self.replies)
