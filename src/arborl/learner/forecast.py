"""What weights, gradients, activations and caches take of a device, and settings with which they fit: arithmetic over
the shapes of a model, which needs no torch.

N tokens go through the model at once; E model size, Q and K sizes of all query and all key heads, F size inside the
layers' feed-forward part, V tokens of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Protocol

from arborl.config.run_config import LearnerConfig

GIB = 2**30
AT_ONCE = 2**28
"""Numbers of masters that come from the host to the device at a time: 3 GiB with their moments."""
LOGIT_SHARE = 64
"""On a GPU, one logit for so many bytes of its memory: in bfloat16 a thirty-second part, and as much for gradients."""
PLAIN_HEAD = 4
"""Times as many bytes take the logits of a head that is not fused: so many times fewer are there at once."""
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


def fused(sizes: Sizes, config: LearnerConfig, cuda: bool) -> bool:
    """Whether layers and head run by fused kernels."""
    return cuda and sizes.lean and config.attention in ("auto", "kernel", "causal")


def logit_rows(memory: int, vocabulary: int, fused: bool) -> int:
    """Terms whose logits are on a GPU with so many bytes at a time."""
    return max(1, memory // LOGIT_SHARE // (1 if fused else PLAIN_HEAD) // vocabulary)


def learner_sizes(sizes: Sizes, sharded: bool) -> Sizes:
    """Of the model as the learner runs it: whose weights are in parts on several ranks runs by the library's code."""
    return replace(sizes, lean=sizes.lean and not sharded)


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
        return fused(self.sizes, self.config, self.cuda)

    def forecast(self, tokens: int, recompute: bool, kv_tokens: int, lent: bool = False) -> Forecast:
        """What these settings come to."""
        sizes, master, offload = self.sizes, self.config.master == "float32", self.config.offload
        models = 2 if self.needs.value and self.config.has_separate_critic else 1
        longest = max(tokens, self.context)
        optimizer = models * sizes.optimizer(master)
        activations = models * sizes.activations(longest, recompute, self.fused, self.cuda)
        logits = min(longest, self.logit_rows) * sizes.vocabulary * self._logit()
        gradients = models * sizes.gradients(master)
        ranks, others = self.config.ranks, self._others(models)
        if self.config.sharded:  # beside the whole weights that the engine has, the learner's part of its own
            optimizer, gradients, others = optimizer // ranks, gradients // ranks, others // ranks
            masters = 4 * sizes.coarse if master and self.config.strategy == "fsdp2" else 0
            others += models * (sizes.weights - (2 * sizes.coarse if masters else 0)) // ranks
            if self.config.strategy == "fsdp2":  # whole while they run: two layers, what tokens go in and out by
                others += sizes.item * 2 * (sizes.largest + sizes.parameters // max(1, sizes.layers))
            if offload == "all":  # which is stepped where it rests
                optimizer = gradients = 0
            elif offload == "optimizer":  # moments alone rest elsewhere
                optimizer, others = optimizer - models * masters // ranks, others + models * masters // ranks
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
            others=others,
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
