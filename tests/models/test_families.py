"""Every family: what is sampled, and what trees are scored and differentiated as, is what transformers says of plain
sequences (laws 2 and 3)."""

from __future__ import annotations

import asyncio
from functools import cache

import numpy as np
import pytest
import torch
from model_families import FAMILIES, LEAN, VOCABULARY, family, plain_logits

from arborl.engines.local import LocalEngine
from arborl.learner.attention.fused_layers import supports_fused_layers
from arborl.learner.attention.path_selection import ExecutionPath, PathSelector
from arborl.learner.core.packing import pack
from arborl.learner.core.tree_forward import compute_outputs
from arborl.models.fast_forward import has_fast_forward
from arborl.rollout.token_trees import build_token_trees
from arborl.types import Call, Episode, Group, Sampling, Task

CONTEXT = 64
RELATIVES = {"gemma", "starcoder2", "gpt-neox", "mixtral", "qwen2 with a window"}
"""They have nothing that another has not; they take their turn with the slow tests."""
NAMES = [pytest.param(name, marks=[pytest.mark.slow] if name in RELATIVES else []) for name in FAMILIES]


@cache
def played(name: str) -> list[Call]:
    """Three siblings of one prompt, the first of which goes on: prefixes are shared, and pages found again. Every other
    family has small pages."""
    block_size = 8 * (list(FAMILIES).index(name) % 2)
    made = LocalEngine(family(name), max_context=CONTEXT, kv_tokens=6 * CONTEXT, block_size=block_size)
    prompt = np.random.default_rng(1).integers(0, VOCABULARY, 19).tolist()

    async def ask(start: list[int], seed: int) -> Call:
        done = await made.generate(start, Sampling(8, seed=seed), session="s")
        return Call(tuple(start), done, 0)

    async def run() -> list[Call]:
        calls = list(await asyncio.gather(*(ask(prompt, seed) for seed in range(3))))
        return [*calls, await ask([*prompt, *calls[0].completion.tokens, 5, 6, 7], 9)]

    calls = asyncio.run(run())
    assert made.metrics()["engine/reused"] > 0
    return calls


def library_logprobs(model, calls: list[Call]) -> torch.Tensor:
    """Log-probabilities of what was sampled, by transformers, a sequence at a time."""
    parts = []
    for call in calls:
        ids = [*call.prompt, *call.completion.tokens]
        logprobs = torch.log_softmax(plain_logits(model, ids), -1)
        parts += [logprobs[at - 1, ids[at]] for at in range(len(call.prompt), len(ids))]
    return torch.stack(parts)


def forest(calls: list[Call]):
    return build_token_trees([Group(Task("t"), [Episode("e", Task("t"), calls=list(calls))])])


@pytest.mark.parametrize("name", NAMES)
def test_the_engine_samples_from_what_transformers_says(name):
    model = family(name)
    calls = played(name)
    sampled = [logprob for call in calls for logprob in call.completion.logprobs]
    with torch.no_grad():
        np.testing.assert_allclose(sampled, library_logprobs(model, calls).numpy(), atol=1e-4)


@pytest.mark.parametrize("name", NAMES)
def test_trees_are_scored_and_differentiated_as_their_branches_are_by_transformers(name):
    model = family(name)
    calls = played(name)
    made = forest(calls)
    batch = pack(made.trees, [0], made.terms)
    assert len(batch) < sum(len(call.prompt) + len(call.completion.tokens) for call in calls)
    parameters = [p for p in model.parameters() if p.requires_grad]
    weight = torch.linspace(-1.0, 1.0, len(made.terms))
    theirs = library_logprobs(model, calls)
    gradients = torch.autograd.grad((theirs * weight).sum(), parameters, allow_unused=True)
    for attend in ("dense", "blocks"):
        ours = compute_outputs(model, batch, Sampling(), ExecutionPath(attend)).logprob_M
        np.testing.assert_allclose(ours.detach().numpy(), theirs.detach().numpy(), atol=1e-4, err_msg=attend)
        for mine, other in zip(
            torch.autograd.grad((ours * weight).sum(), parameters, allow_unused=True), gradients, strict=True
        ):
            assert (mine is None) == (other is None)
            if mine is not None:
                torch.testing.assert_close(mine, other, rtol=1e-3, atol=2e-4, msg=lambda m: f"{attend}: {m}")  # noqa: B023


@pytest.mark.parametrize("name", NAMES)
def test_plain_rows_need_no_tree_and_layers_may_be_run_again_for_their_gradient(name):
    model = family(name)
    calls = played(name)
    made = forest(calls[:1])
    batch = pack(made.trees, [0], made.terms)
    with torch.no_grad():
        expected = library_logprobs(model, calls[:1]).numpy()
    for way in (ExecutionPath("causal"), ExecutionPath("causal", recompute=True)):
        found = compute_outputs(model, batch, Sampling(), way).logprob_M
        np.testing.assert_allclose(found.detach().numpy(), expected, atol=1e-4)
    assert torch.autograd.grad(found.sum(), next(model.parameters()))[0].abs().max() > 0
    assert not any(module.training for module in model.modules())


@pytest.mark.parametrize("name", NAMES)
def test_the_quick_ways_are_chosen_and_the_lean_way_where_it_is_known(name, caplog):
    model = family(name)
    assert has_fast_forward(model) == (name in LEAN)
    made = forest(played(name))
    batch = pack(made.trees, [0], made.terms)
    with torch.no_grad():
        assert PathSelector("blocks")(model, batch) == ExecutionPath(
            "blocks", fused=has_fast_forward(model) and supports_fused_layers(model)
        )
    assert "not used" not in caplog.text
