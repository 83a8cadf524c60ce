"""How much of a device's memory a run will take, told before it starts, and settings with which it fits.

Arithmetic over the shapes of the model; nothing is run, and who has the shapes needs no torch. N tokens go through the
model at once; E model size, Q and K sizes of all query and all key heads, F size inside the layers' feed-forward part,
V tokens of the vocabulary.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from arborl.config.run import LearnerConfig, RunConfig

if TYPE_CHECKING:
    from transformers import PreTrainedModel

GIB = 2**30
AT_ONCE = 2**28
"""Numbers of masters that come from the host to the device at a time: 3 GiB with their moments."""
LOGIT_SHARE = 64
"""On a GPU, one logit for so many bytes of its memory: in bfloat16 a thirty-second part, and as much for gradients."""
LADDER = (16_384, 8_192, 4_096, 2_048)
"""Tokens at once that are tried on a GPU, the quickest first."""
SEQUENCES = 64
"""Fewer of full length in the engine's cache cost more time than smaller micro-batches or layers that run twice."""
BESIDE = int(1.5 * GIB)
"""What the device's own libraries take, and memory that lies between tensors."""


class Wants(Protocol):
    """Of an algorithm's needs, those that take memory."""

    @property
    def value(self) -> bool: ...

    @property
    def reference(self) -> bool: ...


@dataclass(frozen=True, slots=True)
class Sizes:
    """Of a model, what a forecast needs to know."""

    weights: int
    """Bytes, adapters included."""
    parameters: int
    trained: int
    coarse: int
    """Those of the trained that are in bfloat16 or float16."""
    largest: int
    """Numbers of the largest tensor that is trained."""
    item: int
    """Bytes of a number that flows between layers."""
    layers: int
    hidden: int
    queries: int
    keys: int
    inner: int
    vocabulary: int
    head_norms: bool = False
    """Whether queries and keys are normed, as in Qwen3."""
    rank: int = 0
    """Of adapters."""
    lean: bool = True
    """Whether layers run by our own code, which is fused on a GPU."""

    @classmethod
    def of(cls, model: PreTrainedModel) -> Sizes:
        """Counted, and for what flows read from the configuration; of experts, those that a token goes through."""
        from arborl.learner.optimizer import COARSE
        from arborl.models.lean import KINDS
        from arborl.models.lora import has_lora

        own = list(model.parameters())
        trained = [p for p in own if p.requires_grad]
        config = model.config.get_text_config()
        heads, hidden = config.num_attention_heads, config.hidden_size
        size = getattr(config, "head_dim", None) or hidden // heads
        inner = getattr(config, "intermediate_size", None) or 4 * hidden
        experts = getattr(config, "num_experts_per_tok", None)
        if experts:
            inner = experts * (getattr(config, "moe_intermediate_size", None) or inner)
        return cls(
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

    def optimizer(self, master: bool) -> int:
        """Bytes of masters that are copies, and of AdamW's two moments."""
        coarse = 12 if master else 4
        return coarse * self.coarse + 8 * (self.trained - self.coarse)

    def gradients(self, master: bool) -> int:
        """Bytes of gradients, in the masters' precision."""
        return (4 if master else 2) * self.coarse + 4 * (self.trained - self.coarse)

    def layer(self, fused: bool, fused_norms: bool = True) -> int:
        """Bytes a token that one layer keeps for its gradient. Fused layers keep what goes into products and norms, and
        each thing once.

        Args:
            fused_norms: norms keep what goes in; else, as on a CPU, also what they scale, for the scale's gradient.
        """
        e, q, k, f, item = self.hidden, self.queries, self.keys, self.inner, self.item
        adapters = 7 * 4 * self.rank
        if fused:
            return item * (4 * e + 2 * q + 2 * k + 3 * f) + adapters
        scaled = not (fused_norms or self.rank)
        norms = 4 * e if scaled else 2 * e
        attention = 3 * (q + k) + (q + k if self.head_norms and scaled else 0)
        kept = item * (norms + attention + 3 * f)
        if self.rank and item < 4 and not self.lean:  # peft's read each their own copy of what goes in, in float32
            return kept + 4 * (5 * e + q + f) + adapters
        return kept + item * (2 * e + f) + adapters

    def activations(self, tokens: int, recompute: bool, fused: bool, fused_norms: bool = True) -> int:
        """Bytes that a forward pass keeps, and what its backward pass has under way in one layer."""
        layer, edge = self.layer(fused, fused_norms), self.item * self.hidden
        kept = self.layers * edge + layer if recompute else self.layers * layer
        under_way = self.item * (2 * self.inner + 2 * self.queries + 2 * self.keys + 4 * self.hidden)
        return tokens * (kept + 2 * edge + under_way)


@dataclass(frozen=True, slots=True)
class Forecast:
    """Bytes of a device at the fullest moment of an update."""

    weights: int
    optimizer: int
    gradients: int
    others: int
    """Reference, critic and teacher."""
    activations: int
    logits: int
    kv: int
    beside: int = 0
    lent: bool = False
    """The engine gives its keys' and values' memory back while the learner works."""

    @property
    def staying(self) -> int:
        """What is there all the time."""
        return self.weights + self.optimizer + self.others + self.beside

    @property
    def learning(self) -> int:
        """What an update takes for itself."""
        return self.gradients + self.activations + self.logits

    @property
    def total(self) -> int:
        both = max(self.learning, self.kv) if self.lent else self.learning + self.kv
        return self.staying + both


@dataclass(frozen=True, slots=True)
class Plan:
    """Settings of a run, and what they come to."""

    tokens: int
    """Of a micro-batch."""
    recompute: bool
    kv_tokens: int
    """Whose keys and values the engine keeps."""
    forecast: Forecast
    limit: int
    """Bytes that the run may take."""
    told: str = ""
    """Forecast and plan in one line."""
    warning: str = ""
    """Where it does not fit, what to do."""

    @property
    def fits(self) -> bool:
        return self.forecast.total <= self.limit

    def settings(self, config: LearnerConfig) -> LearnerConfig:
        """The learner's, with what the plan has chosen."""
        return config.model_copy(update={"micro_batch_tokens": self.tokens, "recompute": self.recompute})


@dataclass(frozen=True, slots=True)
class Planner:
    """Tries settings, the quickest first."""

    sizes: Sizes
    config: LearnerConfig
    needs: Wants
    context: int
    """Tokens of the longest branch: it is never cut."""
    limit: int
    kv_token: int
    """Bytes of a token in the engine's cache; 0 where there is none."""
    kv_wanted: int
    """Tokens."""
    kv_least: int
    """Fewer cost more time than a slower learner does."""
    kv_floor: int
    """With fewer the engine does not run."""
    logit_rows: int
    """Rows whose logits are there at once, at most."""
    cuda: bool = True
    truncates: bool = False
    """Whether tokens are drawn from part of the vocabulary: then logits are sorted."""
    lends: bool = False
    """Whether the engine can give its memory back while the learner works."""

    @property
    def fused(self) -> bool:
        return self.cuda and self.sizes.lean and self.config.attention in ("auto", "kernel", "causal")

    def forecast(self, tokens: int, recompute: bool, kv_tokens: int, lent: bool = False) -> Forecast:
        """What these settings come to."""
        sizes, master, offload = self.sizes, self.config.master == "float32", self.config.offload
        models = 2 if self.needs.value and self.config.own_critic else 1
        longest = max(tokens, self.context)
        optimizer = models * sizes.optimizer(master)
        activations = models * sizes.activations(longest, recompute, self.fused, self.cuda)
        logits = min(longest, self.logit_rows) * sizes.vocabulary * self._logit()
        gradients = models * sizes.gradients(master)
        if offload != "none":  # what is brought for a step comes when activations have gone
            each = 12
            if offload == "all":  # and each part's gradients come with it
                each, optimizer, gradients = 16, optimizer + gradients, 0
            brought = min(optimizer, each * max(AT_ONCE, sizes.largest))
            optimizer = max(0, brought - activations - logits)
        return Forecast(
            weights=sizes.weights,
            optimizer=optimizer,
            gradients=gradients,
            others=self._others(models),
            activations=activations,
            logits=logits,
            kv=kv_tokens * self.kv_token,
            beside=BESIDE if self.cuda else 0,
            lent=lent,
        )

    def _others(self, models: int) -> int:
        copied = self.needs.reference and not self.sizes.rank
        return self.sizes.weights * (int(copied and self.config.offload != "all") + models - 1)

    def _logit(self) -> int:
        """Bytes for each: the fused head has it and its gradient once; else there are float32 copies between."""
        plain = 2 * self.sizes.item if self.fused else self.sizes.item + 16
        return plain + (28 if self.truncates else 0)

    def plan(self) -> Plan:
        """The first settings that fit and leave the engine enough; else those that take least, and the rest for it.
        Lending costs a fraction of a second a step, less than running layers twice."""
        candidates, lending = list(self._candidates()), (False, True) if self.lends else (False,)
        for tokens, recompute in candidates:
            for lent in lending:
                found = self._with(tokens, recompute, self.kv_least, lent)
                if found.fits:
                    return found
        tokens, recompute = min(candidates, key=lambda one: self.forecast(one[0], one[1], 0).total)
        return self._with(tokens, recompute, self.kv_floor, lending[-1])

    def _with(self, tokens: int, recompute: bool, least: int, lent: bool) -> Plan:
        """With as many tokens in the engine's cache as there is room for."""
        alone = self.forecast(tokens, recompute, 0, lent)
        room = (self.limit - (alone.staying if lent else alone.total)) // max(self.kv_token, 1)
        kv = min(self.kv_wanted, max(room, least))
        return Plan(tokens, recompute, kv, self.forecast(tokens, recompute, kv, lent), self.limit)

    def _candidates(self) -> Iterator[tuple[int, bool]]:
        """Layers run twice before micro-batches become small: a third more work, where small ones leave a GPU idle."""
        asked, again = self.config.micro_batch_tokens, self.config.recompute
        shorter = [tokens for tokens in LADDER[1:] if tokens * 2 > self.context]
        ladder = [asked] if asked else [LADDER[0], *shorter]
        if again is not True:
            yield from ((tokens, False) for tokens in (ladder[:2] if again == "auto" else ladder))
        if again is not False:
            yield from ((tokens, True) for tokens in ladder)


def planned(model: PreTrainedModel, config: RunConfig, needs: Wants) -> Plan:
    """A run's plan. On a CPU what is asked for is done: its memory is not the run's alone."""
    import torch

    from arborl.engines.cache import default_kv_tokens, host_memory
    from arborl.learner.score import rows_at_once

    sizes, cuda = Sizes.of(model), model.device.type == "cuda"
    context, engine, learner = config.sampling.max_context, config.engine, config.learner
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
        logit_rows=rows_at_once(model.device, sizes.vocabulary),
        cuda=cuda,
        truncates=drawn.top_k > 0 or drawn.top_p < 1 or drawn.min_p > 0,
        lends=cuda and bool(kv_token) and engine.lends,
    )  # fmt: skip
    if cuda:
        plan = planner.plan()
    else:
        tokens, recompute = learner.micro_batch_tokens or 4_096, learner.recompute is True
        plan = Plan(tokens, recompute, wanted, planner.forecast(tokens, recompute, wanted), planner.limit)
    warning = warned(plan, config) if cuda and not plan.fits else ""
    return dataclasses.replace(plan, told=told(plan, sizes, total), warning=warning)


def _kv_token(model: PreTrainedModel) -> int:
    from arborl.engines.cache import token_bytes

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
