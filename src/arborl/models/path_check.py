"""Whether a fast execution path computes what the library computes, for the weights at hand.

The last layer's outputs cannot tell. Real weights have a few very large activations, and in bfloat16 rounding errors
grow from layer to layer until two correct programs differ as much as a correct and a wrong one. So every layer is
compared by itself, from the input that the library's own run gives it, and errors are measured against the same layer
in a higher precision. A path is accepted where its error is not clearly larger than the library's error in the
model's precision.

Compared are what a layer adds to its input, the keys it gives to attention (which show a shifted position that
outputs do not), and, where gradients are enabled, the gradients of its input and of its weight matrices.

N tokens, E model size.
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

from arborl.models.attention import FREE, Attend, Bounds, library_hidden_states, use_hook

Outputs = dict[str, Tensor]
"""What a layer computed, by name; each `[rows, columns]`."""
RunLayer = Callable[[Tensor, Attend], Tensor]
"""A layer's output `[N, E]` for an input, with this attention."""

HIGHER = {torch.float32: torch.float64, torch.bfloat16: torch.float32, torch.float16: torch.float32}
"""The precision that errors are measured against."""
FLOOR = {torch.float64: 1e-6, torch.float32: 1e-4, torch.bfloat16: 0.02, torch.float16: 0.005}
"""Error that is always allowed, by precision."""
LAYERS, DIFFERENTIATED = 8, 3
"""Layers that are compared, and those of them whose gradients are: all have the same code."""
MATRIX = "gradient of matrix"
FACTOR = 3.0
"""How many times the library's own error is allowed besides."""


# ------------------------------------------------------------------------------------------------ sample text

_samples: WeakKeyDictionary[PreTrainedModel, list[int]] = WeakKeyDictionary()


def use_sample_text(model: PreTrainedModel, tokens: Sequence[int]) -> None:
    """Check this model on these tokens: text that its tokenizer knows, through its chat template."""
    _samples[model] = list(tokens)


def sample_tokens(model: PreTrainedModel, count: int) -> list[int]:
    """Token ids to check a model on: the sample text, repeated as needed; without one, ids of the whole vocabulary."""
    text = _samples.get(model)
    if not text:  # never the run's own random numbers: a resumed run would draw others
        text = np.random.default_rng(0).integers(0, model.config.get_text_config().vocab_size, count).tolist()
    return (text * -(-count // len(text)))[:count]


# ------------------------------------------------------------------------------------------------ layers


@dataclass(frozen=True, slots=True)
class LayerCase:
    """One layer, what goes into it, and what should come out."""

    number: int
    layer: Any
    x: Tensor
    """`[N, E]`: its input in the library's own run."""
    cos: Tensor
    sin: Tensor
    """`[N, D]`, as the library has them."""
    library: Outputs
    """What the library's code computes in the model's precision."""
    exact: Outputs
    """The same in a higher precision."""


def layer_cases(
    model: PreTrainedModel, tokens: Sequence[int], positions: Sequence[int], attend: Attend
) -> Iterator[LayerCase]:
    """Layers of Llama or a relative, with their inputs in the library's own run over these tokens: the first, the
    last, and some between. Gradients, where they are enabled, are computed for three of them."""
    use_hook(model)
    base, device, graded = model.base_model, model.device, torch.is_grad_enabled()
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
            with torch.set_grad_enabled(graded and number in differentiated):
                library = outputs(run, x_NE, attend, matrices(layer))
                upcast = layer if higher == x_NE.dtype else copy.deepcopy(layer).to(higher)
                exact = outputs(_library_layer(upcast, position_N, above), x_NE.to(higher), attend, matrices(upcast))
                del upcast
                yield LayerCase(number, layer, x_NE, here[0][0], here[1][0], library, exact)
        with torch.no_grad():
            x_NE = run(x_NE, attend)


def spread(count: int, most: int) -> set[int]:
    """At most so many of `count` layers, with the first and the last."""
    return {round(number) for number in np.linspace(0, count - 1, min(count, most))}


def _library_layer(layer: nn.Module, position_N: Tensor, embeddings: tuple[Tensor, Tensor]) -> RunLayer:
    def run(x_NE: Tensor, attend: Attend) -> Tensor:
        out = layer(
            x_NE[None], attention_mask=None, position_ids=position_N[None], past_key_values=None, use_cache=False,
            position_embeddings=embeddings, attend=attend,
        )  # fmt: skip
        found: Tensor = (out[0] if isinstance(out, tuple) else out)[0]
        return found

    return run


def matrices(layer: nn.Module) -> list[Tensor]:
    """The weight matrices of a layer that are trained."""
    return [p for p in layer.parameters() if p.requires_grad and p.ndim > 1]


def outputs(run: RunLayer, x_NE: Tensor, attend: Attend, parameters: Sequence[Tensor]) -> Outputs:
    """What is compared of a layer that is run this way."""
    recorder, graded = _KeyRecorder(attend), torch.is_grad_enabled()
    x_NE = x_NE.detach().requires_grad_(graded)
    y_NE = run(x_NE, recorder)
    found = {"output": difference(y_NE, x_NE).detach(), "key": recorder.key.detach().flatten(1)}
    if graded:
        upstream = _upstream(y_NE)
        to_x, *to_parameters = torch.autograd.grad(y_NE, [x_NE, *parameters], upstream)
        found["gradient of the input"] = difference(to_x, upstream)
        found |= {f"{MATRIX} {i}": gradient.flatten(1) for i, gradient in enumerate(to_parameters)}
    return found


def difference(y_NE: Tensor, x_NE: Tensor) -> Tensor:
    """What was added, without a further error of rounding."""
    higher = HIGHER.get(x_NE.dtype, x_NE.dtype)
    return y_NE.to(higher) - x_NE.to(higher)


class _KeyRecorder:
    """Attention that keeps the keys it was given."""

    def __init__(self, attend: Attend):
        self.attend = attend
        self.key = torch.zeros(0)

    def __call__(
        self, layer: int, q_NHD: Tensor, k_NKD: Tensor, v_NKD: Tensor, scale: float, bounds: Bounds = FREE
    ) -> Tensor:
        self.key = k_NKD
        return self.attend(layer, q_NHD, k_NKD, v_NKD, scale, bounds)


# ------------------------------------------------------------------------------------------------ errors


def error(found: Tensor, exact: Tensor) -> Tensor:
    """Mean error of each row, between 0 and 1: each element's in units of its column's usual size, 1 at most. So
    neither a column nor a row of very large numbers hides what is wrong elsewhere."""
    exact = exact.double()
    size = exact.abs().median(0).values
    size = size.clamp(min=1e-3 * float(size.median()) + 1e-30)
    relative = (found.double() - exact).abs() / size
    return torch.nan_to_num(relative, nan=1.0, posinf=1.0).clamp(max=1.0).mean(1)


def norm_error(found: Tensor, exact: Tensor) -> Tensor:
    """Of each row, the norm of the error over the norm: for numbers of very different sizes in one column."""
    exact = exact.double()
    return (found.double() - exact).norm(dim=1) / exact.norm(dim=1).clamp(min=1e-30)


def excess(
    found: Outputs,
    library: Outputs,
    exact: Outputs,
    dtype: torch.dtype,
    measure: Callable[[Tensor, Tensor], Tensor] = error,
) -> tuple[float, str]:
    """The largest error over what is allowed, and where it is: above 1 the path is wrong. Rows are tokens and looked
    at one by one, except those of a matrix's gradient, in which every token has its part."""
    worst = (0.0, "")
    for name, true in exact.items():
        ours, theirs = measure(found[name], true), measure(library[name], true)
        if name.startswith(MATRIX):
            ours, theirs = ours.mean(0, keepdim=True), theirs.mean(0, keepdim=True)
        allowed = FACTOR * torch.maximum(theirs, theirs.median()) + FLOOR.get(dtype, FLOOR[torch.float32])
        worst = max(worst, (float((ours / allowed).max()), name))
    return worst


# ------------------------------------------------------------------------------------------------ verdicts


def check_layers(
    model: PreTrainedModel,
    run: Callable[[LayerCase], RunLayer],
    attend: Attend,
    library_attend: Attend,
    tokens: Sequence[int],
    positions: Sequence[int],
) -> str | None:
    """Why this way of running the model's layers is wrong; None where it is right.

    Args:
        run: a layer in the way to be checked.
        attend: the attention it is given.
        library_attend: the attention that the library's code is given, in any precision.
    """
    for case in layer_cases(model, tokens, positions, library_attend):
        found = outputs(run(case), case.x, attend, matrices(case.layer))
        if (why := check_case(case, found)) is not None:
            return why
    return None


def check_case(case: LayerCase, found: Outputs) -> str | None:
    """Why these are not the layer's outputs; None where they are."""
    ratio, name = excess(found, case.library, case.exact, case.x.dtype)
    return (
        None if ratio <= 1.0 else f"{name} of layer {case.number} is {ratio:.1f} times as far off as rounding explains"
    )


def check_attention(
    model: PreTrainedModel, attend: Attend, library_attend: Attend, tokens: Sequence[int], positions: Sequence[int]
) -> str | None:
    """Why this attention is wrong for the model, whose layers the library's code runs; None where it is right. Every
    layer's queries, keys and values are those of the library's own run."""
    recorder = InputRecorder(library_attend)
    token_N, position_N = (torch.as_tensor(x, dtype=torch.long, device=model.device) for x in (tokens, positions))
    with torch.no_grad():
        library_hidden_states(model, token_N, position_N, recorder)
    for layer in spread(len(recorder.inputs), LAYERS):
        qkv, scale, bounds = recorder.inputs[layer]
        dtype = qkv[0].dtype
        higher = HIGHER.get(dtype, dtype)
        found, library, exact = (
            _attention_outputs(way, layer, [x.to(kind) for x in qkv], scale, bounds)
            for way, kind in ((attend, dtype), (library_attend, dtype), (library_attend, higher))
        )
        ratio, name = excess(found, library, exact, dtype)
        if not ratio <= 1.0:
            return f"{name} of attention in layer {layer} is {ratio:.1f} times as far off as rounding explains"
    return None


class InputRecorder:
    """Attention that keeps what every layer gave it."""

    def __init__(self, attend: Attend):
        self.attend = attend
        self.inputs: dict[int, tuple[list[Tensor], float, Bounds]] = {}

    def __call__(
        self, layer: int, q_NHD: Tensor, k_NKD: Tensor, v_NKD: Tensor, scale: float, bounds: Bounds = FREE
    ) -> Tensor:
        self.inputs[layer] = ([q_NHD, k_NKD, v_NKD], scale, bounds)
        return self.attend(layer, q_NHD, k_NKD, v_NKD, scale, bounds)


def _attention_outputs(attend: Attend, layer: int, qkv: Sequence[Tensor], scale: float, bounds: Bounds) -> Outputs:
    graded = torch.is_grad_enabled()
    qkv = [x.detach().requires_grad_(graded) for x in qkv]
    q_NHD, k_NKD, v_NKD = qkv
    out = attend(layer, q_NHD, k_NKD, v_NKD, scale, bounds)
    found = {"output": out.detach().flatten(1)}
    if graded:
        gradients = torch.autograd.grad(out, qkv, _upstream(out))
        names = ("gradient of queries", "gradient of keys", "gradient of values")
        found |= {name: gradient.flatten(1) for name, gradient in zip(names, gradients, strict=True)}
    return found


def _upstream(out: Tensor) -> Tensor:
    """A gradient to begin with, the same in all precisions."""
    drawn = np.random.default_rng(1).standard_normal(tuple(out.shape))
    return torch.as_tensor(drawn).to(torch.bfloat16).to(out.device, out.dtype)
