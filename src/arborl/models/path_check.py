"""Comparison of execution paths with the library's code, for the present weights.

The last layer's output does not suffice: real weights have a few very large activations, and in bfloat16 rounding
errors grow until two correct programs differ as much as a correct and a wrong one. Every layer is therefore compared by
itself, with its input from the library's run: its output minus its input, its keys (which show a shifted position that
outputs do not), and, with gradients enabled, the gradients of its input and its weight matrices. Errors are measured
against the same layer in a higher precision; a path is accepted if its error is not clearly larger than the library's.

`check_tree_support` compares a small token tree with its branches run one by one, for any model.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from arborl.errors import ConfigError
from arborl.models.attention import (
    ATTENTION_NAME,
    NO_LIMITS,
    AttentionFunction,
    AttentionLimits,
    attention,
    attention_layout,
    library_hidden_states,
    logits,
    use_attention_hook,
)
from arborl.models.attention import InputRecorder as InputRecorder
from arborl.models.execution_paths import first_line
from arborl.models.model_files import check_positions
from arborl.models.model_loading import weight_loading

Outputs = dict[str, Tensor]  # outputs of a layer by name, each `[rows, columns]`
RunLayer = Callable[[Tensor, AttentionFunction], Tensor]
"""Output `[N, E]` of a layer for an input and an attention function."""

HIGHER = {torch.float32: torch.float64, torch.bfloat16: torch.float32, torch.float16: torch.float32}
"""Precision of the exact result, by precision of the model."""
FLOOR = {torch.float64: 1e-6, torch.float32: 1e-4, torch.bfloat16: 0.02, torch.float16: 0.005}
"""Error that is always allowed, by precision."""
LAYERS, DIFFERENTIATED = 8, 3  # number of compared layers, and of those with gradients: all layers run the same code
MATRIX = "gradient of matrix"
FACTOR = 3.0  # allowed multiple of the library's error


_samples: WeakKeyDictionary[PreTrainedModel, list[int]] = WeakKeyDictionary()


def use_sample_text(model: PreTrainedModel, tokens: Sequence[int]) -> None:
    """Use these tokens for checks of this model: text of its tokenizer and chat template."""
    _samples[model] = list(tokens)


def sample_tokens(model: PreTrainedModel, count: int) -> list[int]:
    """Token ids for checks: the sample text, repeated; without one, random ids."""
    text = _samples.get(model)
    if not text:  # not from the run's random state, which a resumed run restores
        text = np.random.default_rng(0).integers(0, model.config.get_text_config().vocab_size, count).tolist()
    return (text * -(-count // len(text)))[:count]


@dataclass(frozen=True, slots=True)
class LayerCase:
    number: int
    layer: Any
    x: Tensor  # `[N, E]`: its input in the library's run
    cos: Tensor
    sin: Tensor  # `[N, D]`, of the library
    library: Outputs  # outputs of the library's code in the model's precision
    exact: Outputs  # outputs of the library's code in a higher precision


def layer_cases(
    model: PreTrainedModel, tokens: Sequence[int], positions: Sequence[int], attend: AttentionFunction
) -> Iterator[LayerCase]:
    """Up to `LAYERS` layers of a Llama-like model with their inputs in the library's run over these tokens, the first
    and the last among them. Gradients, if enabled, are computed for `DIFFERENTIATED` of them."""
    use_attention_hook(model)
    base, device, with_grad = model.base_model, model.device, torch.is_grad_enabled()
    token_N, position_N = (torch.as_tensor(x, dtype=torch.long, device=device) for x in (tokens, positions))
    with torch.no_grad():
        x_NE = base.embed_tokens(token_N)
    higher = x_NE.dtype if getattr(model, "is_quantized", False) else HIGHER.get(x_NE.dtype, x_NE.dtype)
    here = base.rotary_emb(x_NE[None], position_N[None])
    above = base.rotary_emb(x_NE[None].to(higher), position_N[None])
    chosen, differentiated = (spread(len(base.layers), count) for count in (LAYERS, DIFFERENTIATED))
    for number, layer in enumerate(base.layers):
        run = _library_layer(layer, position_N, here)
        if number in chosen:
            with torch.set_grad_enabled(with_grad and number in differentiated):
                library = outputs(run, x_NE, attend, matrices(layer))
                upcast = layer if higher == x_NE.dtype else copy.deepcopy(layer).to(higher)
                exact = outputs(_library_layer(upcast, position_N, above), x_NE.to(higher), attend, matrices(upcast))
                del upcast
                yield LayerCase(number, layer, x_NE, here[0][0], here[1][0], library, exact)
        with torch.no_grad():
            x_NE = run(x_NE, attend)


def spread(count: int, most: int) -> set[int]:
    """At most `most` of `count` indices, evenly spread, with the first and the last."""
    return {round(number) for number in np.linspace(0, count - 1, min(count, most))}


def _library_layer(layer: nn.Module, position_N: Tensor, embeddings: tuple[Tensor, Tensor]) -> RunLayer:
    def run(x_NE: Tensor, attend: AttentionFunction) -> Tensor:
        out = layer(
            x_NE[None], attention_mask=None, position_ids=position_N[None], past_key_values=None, use_cache=False,
            position_embeddings=embeddings, attend=attend,
        )  # fmt: skip
        found: Tensor = (out[0] if isinstance(out, tuple) else out)[0]
        return found

    return run


def matrices(layer: nn.Module) -> list[Tensor]:
    return [p for p in layer.parameters() if p.requires_grad and p.ndim > 1]


def outputs(run: RunLayer, x_NE: Tensor, attend: AttentionFunction, parameters: Sequence[Tensor]) -> Outputs:
    recorder, with_grad = InputRecorder(attend), torch.is_grad_enabled()
    x_NE = x_NE.detach().requires_grad_(with_grad)
    y_NE = run(x_NE, recorder)
    (_, key_NKD, _), _, _ = next(iter(recorder.inputs.values()))
    found = {"output": difference(y_NE, x_NE).detach(), "key": key_NKD.detach().flatten(1)}
    if with_grad:
        upstream = _upstream(y_NE)
        to_x, *to_parameters = torch.autograd.grad(y_NE, [x_NE, *parameters], upstream)
        found["gradient of the input"] = difference(to_x, upstream)
        found |= {f"{MATRIX} {i}": gradient.flatten(1) for i, gradient in enumerate(to_parameters)}
    return found


def difference(y_NE: Tensor, x_NE: Tensor) -> Tensor:
    higher = HIGHER.get(x_NE.dtype, x_NE.dtype)
    return y_NE.to(higher) - x_NE.to(higher)


def error(found: Tensor, exact: Tensor) -> Tensor:
    """Mean error of each row, between 0 and 1: elements relative to the median of their column, clipped at 1. Very
    large columns or rows thus hide no errors elsewhere."""
    exact = exact.double()
    size = exact.abs().median(0).values
    size = size.clamp(min=1e-3 * float(size.median()) + 1e-30)
    relative = (found.double() - exact).abs() / size
    return torch.nan_to_num(relative, nan=1.0, posinf=1.0).clamp(max=1.0).mean(1)


def norm_error(found: Tensor, exact: Tensor) -> Tensor:
    """Norm of each row's error relative to its norm, for columns with numbers of very different sizes."""
    exact = exact.double()
    return (found.double() - exact).norm(dim=1) / exact.norm(dim=1).clamp(min=1e-30)


def excess(
    found: Outputs,
    library: Outputs,
    exact: Outputs,
    dtype: torch.dtype,
    measure: Callable[[Tensor, Tensor], Tensor] = error,
) -> tuple[float, str]:
    """The largest ratio of error to allowed error, and its output: above 1 the path is wrong. Rows are tokens, compared
    one by one, except for gradients of matrices, which sum over tokens."""
    worst = (0.0, "")
    for name, true in exact.items():
        ours, theirs = measure(found[name], true), measure(library[name], true)
        if name.startswith(MATRIX):
            ours, theirs = ours.mean(0, keepdim=True), theirs.mean(0, keepdim=True)
        allowed = FACTOR * torch.maximum(theirs, theirs.median()) + FLOOR.get(dtype, FLOOR[torch.float32])
        worst = max(worst, (float((ours / allowed).max()), name))
    return worst


def check_layers(
    model: PreTrainedModel,
    run: Callable[[LayerCase], RunLayer],
    attend: AttentionFunction,
    library_attend: AttentionFunction,
    tokens: Sequence[int],
    positions: Sequence[int],
) -> str | None:
    """How this execution path of the model's layers differs from the library; None if it matches."""
    for case in layer_cases(model, tokens, positions, library_attend):
        found = outputs(run(case), case.x, attend, matrices(case.layer))
        if (reason := check_case(case, found)) is not None:
            return reason
    return None


def check_case(case: LayerCase, found: Outputs) -> str | None:
    ratio, name = excess(found, case.library, case.exact, case.x.dtype)
    reason = f"{name} of layer {case.number} is {ratio:.1f} times as far off as rounding explains"
    return None if ratio <= 1.0 else reason


def check_attention(
    model: PreTrainedModel,
    attend: AttentionFunction,
    library_attend: AttentionFunction,
    tokens: Sequence[int],
    positions: Sequence[int],
) -> str | None:
    """How this attention differs from the library's for a model whose layers the library runs; None if it matches. Each
    layer's queries, keys and values are those of the library's run."""
    recorder = InputRecorder(library_attend)
    token_N, position_N = (torch.as_tensor(x, dtype=torch.long, device=model.device) for x in (tokens, positions))
    with torch.no_grad():
        library_hidden_states(model, token_N, position_N, recorder)
    for layer in spread(len(recorder.inputs), LAYERS):
        qkv, scale, limits = recorder.inputs[layer]
        dtype = qkv[0].dtype
        higher = HIGHER.get(dtype, dtype)
        found, library, exact = (
            _attention_outputs(way, layer, [x.to(kind) for x in qkv], scale, limits)
            for way, kind in ((attend, dtype), (library_attend, dtype), (library_attend, higher))
        )
        ratio, name = excess(found, library, exact, dtype)
        if not ratio <= 1.0:
            return f"{name} of attention in layer {layer} is {ratio:.1f} times as far off as rounding explains"
    return None


def _attention_outputs(
    attend: AttentionFunction, layer: int, qkv: Sequence[Tensor], scale: float, limits: AttentionLimits
) -> Outputs:
    with_grad = torch.is_grad_enabled()
    qkv = [x.detach().requires_grad_(with_grad) for x in qkv]
    q_NHD, k_NKD, v_NKD = qkv
    out = attend(layer, q_NHD, k_NKD, v_NKD, scale, limits)
    found = {"output": out.detach().flatten(1)}
    if with_grad:
        gradients = torch.autograd.grad(out, qkv, _upstream(out))
        names = ("gradient of queries", "gradient of keys", "gradient of values")
        found |= {name: gradient.flatten(1) for name, gradient in zip(names, gradients, strict=True)}
    return found


def _upstream(out: Tensor) -> Tensor:
    """An output gradient that is equal in all precisions."""
    drawn = np.random.default_rng(1).standard_normal(tuple(out.shape))
    return torch.as_tensor(drawn).to(torch.bfloat16).to(out.device, out.dtype)


STEM, TWIG = 6, 4  # tokens of the tree: a stem, and two branches behind it
TOLERANCE = {torch.float64: 1e-4, torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.05}
"""Allowed relative difference of the median token of a branch. Branches that see each other differ far more; rounding
changes the experts of few tokens."""
OTHER_MODEL = "Choose another model; docs/models.md lists supported ones."


class _ForkAttention:
    """Attention over a tree of a stem and two branches."""

    def __init__(self, device: torch.device):
        self.position = torch.tensor([*range(STEM + TWIG), *range(STEM, STEM + TWIG)], device=device)
        place = torch.arange(len(self.position), device=device)
        second = place >= STEM + TWIG
        first = (place >= STEM) & ~second
        self.mask = (place[None] <= place[:, None]) & ~(second[:, None] & first[None])

    def __call__(
        self, layer: int, q_NHD: Tensor, k_NKD: Tensor, v_NKD: Tensor, scale: float, limits: AttentionLimits = NO_LIMITS
    ) -> Tensor:
        mask = self.mask
        if limits.window is not None:
            mask = mask & (self.position[:, None] - self.position[None] < limits.window)
        q, k, v = (x.transpose(0, 1)[None] for x in (q_NHD, k_NKD, v_NKD))
        return attention(q, k, v, scale, mask, cap=limits.cap)[0].transpose(0, 1)


def check_tree_support(model: PreTrainedModel, name: str, max_context: int) -> None:
    """Raise ConfigError for a model whose output over a token tree differs from the library's over its branches: some
    models mix tokens outside of attention."""
    config = model.config
    check_positions(config.to_dict(), name, max_context)
    kind = type(model).__name__
    try:
        with weight_loading():
            layout = attention_layout(model)
            gap = _tree_gap(model)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # other models may fail in any way
        reason = first_line(error)
        raise ConfigError(f"model.name={name}: {kind} cannot run over token trees: {reason}. {OTHER_MODEL}") from error
    if not gap <= TOLERANCE.get(model.dtype, 1e-3):
        raise ConfigError(
            f"model.name={name}: the outputs of {kind} over a token tree differ by {gap:.1e} from those over its "
            f"branches. {OTHER_MODEL}"
        )
    window, kinds = getattr(config, "sliding_window", None), getattr(config, "layer_types", None)
    slides = getattr(config, "use_sliding_window", True) and (not kinds or "sliding_attention" in kinds)
    if window is not None and slides and not layout.windows and max_context > window:
        raise ConfigError(
            f"sampling.max_context={max_context}: {kind} has a window of {window} tokens that it does not pass to "
            f"attention. Write sampling.max_context={window} or less."
        )


@torch.no_grad()
def _tree_gap(model: PreTrainedModel) -> float:
    """Relative difference between logits over the tree and the library's over its branches."""
    fork = _ForkAttention(model.device)
    tokens = (torch.arange(len(fork.position), device=model.device) * 7 + 3) % model.config.vocab_size
    ours = logits(model, library_hidden_states(model, tokens, fork.position, fork))
    first = slice(0, STEM + TWIG)
    second = torch.cat([tokens[:STEM], tokens[STEM + TWIG :]])
    try:
        model.set_attn_implementation("eager")
        theirs = [model(ids[None], use_cache=False).logits[0].to(ours.dtype) for ids in (tokens[first], second)]
    finally:
        model.set_attn_implementation(ATTENTION_NAME)
    pairs = ((ours[first], theirs[0]), (ours[STEM + TWIG :], theirs[1][STEM:]))
    return max(float(((a - b).norm(dim=-1) / b.norm(dim=-1)).median()) for a, b in pairs)
