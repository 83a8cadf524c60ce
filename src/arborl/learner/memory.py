"""How much of a device's memory a run will take, told before it starts, and settings with which it fits.

A model at hand is counted; the arithmetic is in `forecast.py`. Nothing is run.
"""

from __future__ import annotations

import dataclasses

import torch
from transformers import PreTrainedModel

from arborl.config.run_config import RunConfig
from arborl.engines.cache import default_kv_tokens, host_memory, token_bytes
from arborl.learner.forecast import GIB, SEQUENCES, Plan, Planner, Sizes, Wants, fused, learner_sizes
from arborl.learner.optimizer import COARSE
from arborl.learner.score import rows_at_once
from arborl.models.lean import KINDS
from arborl.models.lora import has_lora


def sizes_of(model: PreTrainedModel) -> Sizes:
    """Counted, and for what flows read from the configuration; of experts, those that a token goes through."""
    own = list(model.parameters())
    trained = [p for p in own if p.requires_grad]
    config = model.config.get_text_config()
    heads, hidden = config.num_attention_heads, config.hidden_size
    size = getattr(config, "head_dim", None) or hidden // heads
    inner = getattr(config, "intermediate_size", None) or 4 * hidden
    experts = getattr(config, "num_experts_per_tok", None)
    if experts:
        inner = experts * (getattr(config, "moe_intermediate_size", None) or inner)
    return Sizes(
        weights=sum(p.nbytes for p in own),
        parameters=sum(p.numel() for p in own),
        trained=sum(p.numel() for p in trained),
        coarse=sum(p.numel() for p in trained if p.dtype in COARSE),
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
        lean=type(model).__name__ in KINDS,
    )


def planned(model: PreTrainedModel, config: RunConfig, needs: Wants) -> Plan:
    """A run's plan. On a CPU what is asked for is done: its memory is not the run's alone."""
    context, engine, learner = config.sampling.max_context, config.engine, config.learner
    sizes, cuda = learner_sizes(sizes_of(model), learner.sharded), model.device.type == "cuda"
    kv_token, drawn = _kv_token(model) if engine.name == "local" else 0, config.sampling
    wanted = engine.kv_tokens or (default_kv_tokens(model, context) if kv_token else 0)
    if cuda:
        free, total = torch.cuda.mem_get_info(model.device)
        free += torch.cuda.memory_reserved(model.device) - torch.cuda.memory_allocated(model.device)
    else:
        free = total = host_memory()
    planner = Planner(
        sizes, learner, needs,
        context=context,
        limit=sizes.weights + int(learner.memory_share * free),
        kv_token=kv_token,
        kv_wanted=wanted,
        kv_least=wanted if engine.kv_tokens else min(wanted, SEQUENCES * context),
        kv_floor=wanted if engine.kv_tokens else min(wanted, context),
        logit_rows=rows_at_once(model.device, sizes.vocabulary, fused(sizes, learner, cuda)),
        cuda=cuda,
        truncates=drawn.top_k > 0 or drawn.top_p < 1 or drawn.min_p > 0,
        lends=cuda and bool(kv_token) and engine.sleep_mode,
    )  # fmt: skip
    if cuda:
        plan = planner.plan()
    else:
        tokens, recompute = learner.micro_batch_tokens or 4_096, learner.recompute is True
        plan = Plan(tokens, recompute, wanted, planner.forecast(tokens, recompute, wanted), planner.limit)
    warning = warned(plan, config) if cuda and not plan.fits else ""
    return dataclasses.replace(plan, told=told(plan, sizes, total), warning=warning)


def _kv_token(model: PreTrainedModel) -> int:
    try:
        return token_bytes(model)
    except ValueError:  # the engine refuses it, and says why
        return 0


def told(plan: Plan, sizes: Sizes, total: int) -> str:
    """The forecast and the plan in one line."""
    parts = plan.forecast
    how = f"at {plan.tokens:,} tokens{' with recompute' if plan.recompute else ''}"
    named = {
        "weights": parts.weights, "masters and AdamW": parts.optimizer, "gradients": parts.gradients,
        "other models": parts.others, f"activations {how}": parts.activations, "logits": parts.logits,
        f"keys and values of {plan.kv_tokens:,} tokens{' (when not learning)' if parts.lent else ''}": parts.kv,
        "beside": parts.beside,
    }  # fmt: skip
    listed = ", ".join(f"{name} {size / GIB:.{1 if size >= GIB else 2}f}" for name, size in named.items() if size)
    count = sizes.parameters
    many = f"{count / 1e9:.2f}B" if count >= 1e9 else f"{count / 1e6:.1f}M"
    kind = f"adapters of {sizes.trained / 1e6:.1f}M" if sizes.rank else "all trained"
    sums = f"{parts.total / GIB:.1f} of {total / GIB:.1f} GiB"
    return f"{many} parameters, {kind}: {listed} -> {sums}"


def warned(plan: Plan, config: RunConfig) -> str:
    """That it will hardly fit, and what takes less."""
    further = {"none": "learner.offload=optimizer", "optimizer": "learner.offload=all", "all": "model.lora.rank=16"}
    better = further[config.learner.offload] if not config.model.lora.rank else "model.quantize=4bit"
    wanted, limit = plan.forecast.total / GIB, plan.limit / GIB
    return (
        f"the run will take about {wanted:.1f} GiB of the GPU, and {limit:.1f} may be planned with. Write {better}, or "
        "a smaller sampling.max_context."
    )
