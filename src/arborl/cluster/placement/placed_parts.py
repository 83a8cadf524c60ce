"""From a configuration to the parts that run on a Ray cluster."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import PreTrainedModel

from arborl.chat import Renderer
from arborl.chat.tokenizer import FileTokenizer
from arborl.cluster.placement.ray_cluster import RayCluster
from arborl.cluster.placement.ray_engine import EnginePlan, ModelRecipe, RayEngine, weight_bytes
from arborl.cluster.placement.ray_rewards import place_rewards
from arborl.config.run_config import RunConfig
from arborl.engines.local.kv_cache import default_kv_tokens
from arborl.errors import ConfigError, EngineError
from arborl.rewards import Rewards
from arborl.types import Sampling


def connect_cluster(config: RunConfig, model: PreTrainedModel, rewards: Rewards, ranks: int = 0) -> RayCluster:
    """The cluster of a run, with its reward workers, and resources for this number of learner ranks."""
    placement = config.placement
    cluster = RayCluster(placement, weight_bytes(model.state_dict()), ranks, config.threads)
    try:
        if placement.reward_workers:
            place_rewards(cluster, rewards)
    except BaseException as error:
        cluster.close()
        if isinstance(error, EngineError):
            raise ConfigError(f"placement.reward_workers={placement.reward_workers}: {error}.") from error
        raise
    return cluster


def build_ray_engine(
    cluster: RayCluster, config: RunConfig, model: PreTrainedModel, renderer: Renderer, sampling: Sampling
) -> RayEngine:
    """`placement.engines` engines. In deterministic mode they use as many threads as the driver, so that rounding does
    not depend on where a token is sampled."""
    placed, engine, context = cluster.placement, config.engine, config.sampling.max_context
    on_gpu = model.device.type == "cuda"
    gpus = cluster.engine_gpus((model.device.index or 0) if on_gpu else None)
    threads = config.threads or (torch.get_num_threads() if config.deterministic else 1)
    kv_tokens = engine.kv_tokens
    if not kv_tokens and not any(gpus):  # engines of one host share its memory
        kv_tokens = max(context, default_kv_tokens(model, context) // placed.engines)
    settings = {
        "max_context": context,
        "max_requests": engine.requests(model.device.type),
        "kv_tokens": kv_tokens,
        "block_size": engine.options.block_size,
        "deterministic": config.deterministic,
        "update": engine.options.update,
    }
    recipe = ModelRecipe.of(model, config.model.head, threads, config.deterministic)
    plan = EnginePlan(recipe, settings, tokenizer_files(renderer), sampling)
    try:
        return RayEngine(cluster, model, gpus, plan)
    except EngineError as error:
        raise ConfigError(f"placement.engines={placed.engines}: {error}.") from error


def tokenizer_files(renderer: Renderer) -> dict[str, bytes]:
    """Files of the run's tokenizer; a node need not have the model's folder."""
    tokenizer = renderer.tokenizer
    if not isinstance(tokenizer, FileTokenizer):
        return {}
    folder: Path = tokenizer.folder
    names = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "config.json")
    return {name: (folder / name).read_bytes() for name in names if (folder / name).is_file()}
