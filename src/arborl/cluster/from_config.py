"""What a configuration places on a cluster."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import PreTrainedModel

from arborl.chat import Renderer
from arborl.chat.tokenizer import FileTokenizer
from arborl.cluster.arrays import size_of
from arborl.cluster.connection import Cluster
from arborl.cluster.engine import RayEngine
from arborl.cluster.engine_host import Blueprint, EnginePlan
from arborl.cluster.rewards import place_rewards
from arborl.config.engine_config import PlacementConfig
from arborl.config.run_config import RunConfig
from arborl.engines.cache import default_kv_tokens
from arborl.errors import ConfigError, EngineError
from arborl.rewards import Rewards
from arborl.types import Sampling


def connected(placement: PlacementConfig, model: PreTrainedModel, rewards: Rewards, ranks: int = 0) -> Cluster:
    """The cluster of a run, with its rewards on it where they are to be, and room for that many ranks of a learner."""
    cluster = Cluster(placement, size_of(model.state_dict()), ranks)
    try:
        if placement.reward_workers:
            place_rewards(cluster, rewards)
    except BaseException as error:
        cluster.close()
        if isinstance(error, EngineError):
            raise ConfigError(f"placement.reward_workers={placement.reward_workers}: {error}.") from error
        raise
    return cluster


def engines_of(
    cluster: Cluster, config: RunConfig, model: PreTrainedModel, renderer: Renderer, sampling: Sampling
) -> RayEngine:
    """`placement.engines` of them. In deterministic mode each computes with as many threads as the driver: not even
    rounding then depends on where a token is sampled."""
    placed, asked, context = cluster.placement, config.engine, config.sampling.max_context
    on_gpu = model.device.type == "cuda"
    seats = cluster.seats((model.device.index or 0) if on_gpu else None)
    threads = config.threads or (torch.get_num_threads() if config.deterministic else placed.cpus_per_engine)
    kept = asked.kv_tokens
    if not kept and not any(seats):  # several may share a machine's memory
        kept = max(context, default_kv_tokens(model, context) // placed.engines)
    settings = {
        "max_context": context,
        "max_requests": asked.requests(model.device.type),
        "kv_tokens": kept,
        "page_size": asked.page_size,
        "deterministic": config.deterministic,
        "update": asked.update,
    }
    blueprint = Blueprint.of(model, config.model.head, threads, config.deterministic)
    plan = EnginePlan(blueprint, settings, tokenizer_files(renderer), sampling)
    try:
        return RayEngine(cluster, model, seats, plan)
    except EngineError as error:
        raise ConfigError(f"placement.engines={placed.engines}: {error}.") from error


def tokenizer_files(renderer: Renderer) -> dict[str, bytes]:
    """The files of the run's tokenizer: a node need not have the model's folder."""
    tokenizer = renderer.tokenizer
    if not isinstance(tokenizer, FileTokenizer):
        return {}
    folder: Path = tokenizer.folder
    names = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "config.json")
    return {name: (folder / name).read_bytes() for name in names if (folder / name).is_file()}
