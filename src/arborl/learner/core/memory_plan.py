"""The memory plan of a run: a loaded model is measured, and `memory_forecast.py` chooses settings that fit."""

from __future__ import annotations

import dataclasses
from contextlib import suppress

import torch
from transformers import PreTrainedModel

from arborl.config.run_config import RunConfig
from arborl.engines.local.kv_cache import default_kv_tokens, host_memory, token_bytes
from arborl.learner.core.memory_forecast import (
    GIB,
    MIN_CACHED_SEQUENCES,
    MemoryPlan,
    MemoryPlanner,
    ModelNeeds,
    ModelSizes,
    learner_sizes,
    uses_fused_layers,
)
from arborl.learner.core.optimizer import LOW_PRECISION
from arborl.learner.core.tree_forward import max_logit_rows
from arborl.models.fast_forward import FAST_MODEL_CLASSES
from arborl.models.lora import has_lora


def model_sizes(model: PreTrainedModel) -> ModelSizes:
    """The sizes of a loaded model; of a mixture of experts, the experts that one token uses."""
    parameters = list(model.parameters())
    trained = [p for p in parameters if p.requires_grad]
    config = model.config.get_text_config()
    heads, hidden = config.num_attention_heads, config.hidden_size
    size = getattr(config, "head_dim", None) or hidden // heads
    inner = getattr(config, "intermediate_size", None) or 4 * hidden
    experts = getattr(config, "num_experts_per_tok", None)
    if experts:
        inner = experts * (getattr(config, "moe_intermediate_size", None) or inner)
    return ModelSizes(
        weights=sum(p.nbytes for p in parameters),
        parameters=sum(p.numel() for p in parameters),
        trained=sum(p.numel() for p in trained),
        coarse=sum(p.numel() for p in trained if p.dtype in LOW_PRECISION),
        largest=max(p.numel() for p in trained),
        item=model.dtype.itemsize,
        layers=config.num_hidden_layers,
        hidden=hidden,
        queries=heads * size,
        keys=(getattr(config, "num_key_value_heads", None) or heads) * size,
        inner=inner,
        vocabulary=config.vocab_size,
        head_norms=any(name.endswith("q_norm.weight") for name, _ in model.named_parameters()),
        rank=next(iter(model.peft_config.values())).r if has_lora(model) else 0,
        lean=type(model).__name__ in FAST_MODEL_CLASSES,
    )


def plan_memory(model: PreTrainedModel, config: RunConfig, needs: ModelNeeds) -> MemoryPlan:
    """The memory plan of a run. On a CPU the configured sizes are used: its memory is shared with other processes."""
    context, engine, learner = config.sampling.max_context, config.engine, config.learner
    sizes, cuda = learner_sizes(model_sizes(model), learner.sharded), model.device.type == "cuda"
    kv_token, drawn = 0, config.sampling
    with suppress(ValueError):  # the engine reports the reason when it starts
        kv_token = token_bytes(model) if engine.name == "local" else 0
    wanted = engine.kv_tokens or (default_kv_tokens(model, context) if kv_token else 0)
    if cuda:
        free, total = torch.cuda.mem_get_info(model.device)
        free += torch.cuda.memory_reserved(model.device) - torch.cuda.memory_allocated(model.device)
    else:
        free = total = host_memory()
    planner = MemoryPlanner(
        sizes, learner, needs,
        context=context,
        limit=int(learner.memory_share * (sizes.weights + free)),
        kv_token=kv_token,
        kv_wanted=wanted,
        kv_least=wanted if engine.kv_tokens else min(wanted, MIN_CACHED_SEQUENCES * context),
        kv_floor=wanted if engine.kv_tokens else min(wanted, context),
        logit_rows=max_logit_rows(model.device, sizes.vocabulary, uses_fused_layers(sizes, learner, cuda)),
        cuda=cuda,
        truncates=drawn.top_k > 0 or drawn.top_p < 1 or drawn.min_p > 0,
        can_free_kv=cuda and bool(kv_token) and engine.sleep_mode,
    )  # fmt: skip
    if cuda:
        plan = planner.plan()
    else:
        tokens, recompute = learner.micro_batch_tokens or 4_096, learner.recompute is True
        plan = MemoryPlan(tokens, recompute, wanted, planner.forecast(tokens, recompute, wanted), planner.limit)
    warning = plan_warning(plan, config) if cuda and not plan.fits else ""
    return dataclasses.replace(plan, summary=describe_plan(plan, sizes, total), warning=warning)


def describe_plan(plan: MemoryPlan, sizes: ModelSizes, total: int) -> str:
    parts = plan.forecast
    how = f"at {plan.tokens:,} tokens{' with recompute' if plan.recompute else ''}"
    named = {
        "weights": parts.weights, "optimizer state": parts.optimizer, "gradients": parts.gradients,
        "other models": parts.others, f"activations {how}": parts.activations, "logits": parts.logits,
        f"KV cache of {plan.kv_tokens:,} tokens{' (freed during updates)' if parts.kv_freed else ''}": parts.kv,
        "libraries": parts.beside,
    }  # fmt: skip
    listed = ", ".join(f"{name} {size / GIB:.{1 if size >= GIB else 2}f}" for name, size in named.items() if size)
    count = sizes.parameters
    many = f"{count / 1e9:.2f}B" if count >= 1e9 else f"{count / 1e6:.1f}M"
    kind = f"adapters of {sizes.trained / 1e6:.1f}M" if sizes.rank else "all trained"
    sums = f"{parts.total / GIB:.1f} of {total / GIB:.1f} GiB"
    return f"{many} parameters, {kind}: {listed} -> {sums}"


def plan_warning(plan: MemoryPlan, config: RunConfig) -> str:
    further = {"none": "learner.offload=optimizer", "optimizer": "learner.offload=all", "all": "model.lora.rank=16"}
    better = further[config.learner.offload] if not config.model.lora.rank else "model.quantize=4bit"
    wanted, limit = plan.forecast.total / GIB, plan.limit / GIB
    return (
        f"the run needs about {wanted:.1f} GiB of GPU memory, and {limit:.1f} GiB are available. Write {better}, or a "
        "smaller sampling.max_context."
    )
