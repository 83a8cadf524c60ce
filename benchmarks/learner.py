"""Forward and backward over trees beside one padded batch of the same rows, in one run, with equal gradients.

    python benchmarks/learner.py --device cpu --json

On a CPU, `turns`: eight attempts at one task, four turns each, the thinking of earlier turns stripped from the prompt,
so that every turn is a row of its own (13,312 tokens in 32 rows). On a GPU, `group`: eight answers of 256 tokens to one
prompt of 2,048, in bfloat16, with a random Qwen2.5-0.5B unless `--model smollm2`, or another, is given. The baseline is
what one would write with transformers: rows padded to the longest, its own attention, logits at sampled tokens only, in
float32. The best of `--repeats` counts. `--without` also times the learner with each of its fast paths switched off:
how many times longer it takes (`models/fallbacks.py`).
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import platform
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import arborl  # noqa: F401  # before torch, as everyone does who starts a run; both sides have what it sets

# isort: split
import numpy as np
import torch
import transformers
from bodies import SHAPES, load, settle, weights_of
from texts import Texts, texts_of
from transformers import PreTrainedModel

from arborl.algorithms import AlgorithmNeeds
from arborl.config.run_config import LearnerConfig
from arborl.learner.attention.path_selection import ExecutionPath, PathSelector
from arborl.learner.core.learner import Learner
from arborl.learner.core.packing import MicroBatch
from arborl.models.attention import ATTENTION_NAME
from arborl.models.fast_forward import use_library_forward
from arborl.models.model_loading import tune_cpu
from arborl.rollout.token_trees import build_token_trees
from arborl.types import Call, Completion, Episode, FinishReason, Forest, Group, Sampling, Task


@dataclass(frozen=True)
class Case:
    """Attempts at one task; each turn samples thinking and an answer, and the next one sees only the answer."""

    name: str
    episodes: int
    prompt: int
    thinking: int
    answer: int
    turns: int = 1
    observed: int = 0


CASES = {
    "cpu": Case("turns", episodes=8, prompt=280, thinking=48, answer=16, turns=4, observed=32),
    "cuda": Case("group", episodes=8, prompt=2048, thinking=0, answer=256),
}


def play(case: Case, texts: Texts) -> list[Call]:
    """The calls of all episodes, of text or of random tokens."""
    chance = np.random.default_rng(0)

    def some(count: int) -> tuple[int, ...]:
        return tuple(texts.text(count, chance))

    prompt, calls = tuple(texts.prompt(case.prompt, chance)), []
    for _ in range(case.episodes):
        context = prompt
        for turn in range(case.turns):
            thinking, answer = some(case.thinking), some(case.answer)
            sampled = (*thinking, *answer)
            calls.append(Call(context, Completion(sampled, (-6.0,) * len(sampled), FinishReason.STOP), turn))
            context = (*context, *answer, *texts.observation(case.observed, chance))
    return calls


class Likelier:
    """The simplest algorithm: raise the log-probability of what was sampled, times an advantage."""

    needs, whole, trust_region = AlgorithmNeeds(), False, None

    def loss(self, said, terms):  # type: ignore[no-untyped-def]
        return -said.logprob_M * terms.advantage_M, {}


def advantage_of(call: int) -> float:
    return float(np.cos(call))


def forest_of(calls: list[Call]) -> Forest:
    forest = build_token_trees(
        [Group(Task("t"), [Episode(str(i), Task("t"), calls=[call]) for i, call in enumerate(calls)])]
    )
    forest.terms.advantage[:] = [advantage_of(call) for call in forest.terms.call]
    forest.terms.weight[:] = 1.0 / len(forest.terms)
    return forest


def ours(learner: Learner, forest: Forest) -> None:
    learner.backward(forest.trees, forest.terms, Likelier())


def theirs(model: PreTrainedModel, calls: list[Call]) -> None:
    """One padded batch."""
    rows = [(*call.prompt, *call.completion.tokens) for call in calls]
    longest = max(map(len, rows))
    ids = torch.tensor([[*row, *([0] * (longest - len(row)))] for row in rows], device=model.device)
    mask = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in rows], device=model.device)
    places = [(i, t) for i, call in enumerate(calls) for t in range(len(call.prompt) - 1, len(rows[i]) - 1)]
    row, place = torch.tensor(places, device=model.device).T
    weight = torch.tensor([advantage_of(i) for i, _ in places], device=model.device) / len(places)
    hidden = model.base_model(input_ids=ids, attention_mask=mask, use_cache=False).last_hidden_state
    log = torch.log_softmax(model.lm_head(hidden[row, place]).float(), -1)
    logprob = log.gather(1, ids[row, place + 1][:, None])[:, 0]
    (-logprob * weight).sum().backward()


def measure(run: Callable[[], None], model: PreTrainedModel, repeats: int) -> tuple[float, float, list[torch.Tensor]]:
    """Seconds of the fastest run after two that do not count, gigabytes at most, and the gradients."""
    cuda = model.device.type == "cuda"
    seconds = []
    for repeat in range(repeats + 2):
        model.zero_grad(set_to_none=True)
        if cuda:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        began = time.perf_counter()
        run()
        if cuda:
            torch.cuda.synchronize()
        if repeat > 1:
            seconds.append(time.perf_counter() - began)
    gradients = [p.grad.detach().clone() for p in model.parameters() if p.grad is not None]
    peak = torch.cuda.max_memory_allocated() / 2**30 if cuda else 0.0
    model.zero_grad(set_to_none=True)
    return min(seconds), peak, gradients


class RestrictedPathSelector(PathSelector):
    """The learner's choice among the execution paths that `allows` accepts."""

    def __init__(self, allows: Callable[[ExecutionPath], bool]):
        super().__init__()
        self.allows = allows

    def _candidates(self, model: PreTrainedModel, batch: MicroBatch) -> Iterator[ExecutionPath]:
        return filter(self.allows, super()._candidates(model, batch))


def without_fast_paths(learner: Learner, forest: Forest, repeats: int) -> dict[str, float]:
    """Seconds of forward and backward without each fast path, and without all of them. Leaves the model to the
    library's code."""
    restrictions = {
        "fused layers": lambda way: not way.fused,
        "tree kernels": lambda way: way.attention != "kernel",
        "short forward pass": lambda way: True,
        "all of them": lambda way: way.attention != "kernel",
    }
    found = {}
    for name, allows in restrictions.items():
        if name == "short forward pass":
            use_library_forward(learner.model)
        learner.path_selector = RestrictedPathSelector(allows)
        found[name] = measure(lambda: ours(learner, forest), learner.model, repeats)[0]
    return found


def gap(mine: list[torch.Tensor], other: list[torch.Tensor]) -> float:
    """Norm of the difference over the norm."""
    difference = sum(float((a.double() - b.double()).square().sum()) for a, b in zip(mine, other, strict=True))
    return float(np.sqrt(difference / sum(float(b.double().square().sum()) for b in other)))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument(
        "--model", help=f"smollm2, seedling or a folder (real weights), {', '.join(SHAPES)} (random ones)"
    )
    parser.add_argument("--dtype", choices=["bfloat16", "float16", "float32"], help="on a GPU bfloat16, else float32")
    parser.add_argument("--outliers", action=argparse.BooleanOptionalAction, default=True, help="of random weights")
    parser.add_argument("--episodes", type=int, help="instead of the case's own number, for slow models")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--without", action="store_true", help="also without each fast path")
    parser.add_argument("--json", action="store_true", help="one JSON line, nothing else")
    args = parser.parse_args()
    transformers.logging.set_verbosity_error()
    name = args.model or ("seedling" if args.device == "cpu" else "0.5b")
    model = load(name, args.device, args.dtype and getattr(torch, args.dtype), args.outliers)
    settle()
    case = CASES[args.device]
    case = dataclasses.replace(case, episodes=args.episodes or case.episodes)
    calls = play(case, texts_of(name, model.config.vocab_size))
    forest = forest_of(calls)

    model.set_attn_implementation("sdpa")
    baseline, baseline_peak, expected = measure(lambda: theirs(model, calls), model, args.repeats)
    model.set_attn_implementation(ATTENTION_NAME)
    tune_cpu()
    config = LearnerConfig(micro_batch_tokens=8192, master="none")
    learner = Learner(model, config, Sampling())
    mine, peak, found = measure(lambda: ours(learner, forest), model, args.repeats)
    batches = learner.micro_batcher.split(forest.trees, forest.terms)
    unique = sum(len(tree) for tree in forest.trees)
    row = {
        "case": case.name, "model": name, "weights": weights_of(name, args.outliers),
        "dtype": str(model.dtype).removeprefix("torch."), "rows": len(calls),
        "raw_tokens": forest.raw_tokens, "tree_tokens": unique,
        "way": str(learner.path_selector(model, batches[0])),
        "ours_s": round(mine, 4), "baseline_s": round(baseline, 4),
        "ratio": round(baseline / mine, 2), "gradient_gap": float(f"{gap(found, expected):.2e}"),
        "device": torch.cuda.get_device_name() if args.device == "cuda" else f"{platform.machine()} CPU",
        "threads": torch.get_num_threads(), "torch": torch.__version__, "transformers": transformers.__version__,
    }  # fmt: skip
    if args.device == "cuda":
        row |= {"ours_gib": round(peak, 2), "baseline_gib": round(baseline_peak, 2)}
        row |= {"memory_ratio": round(peak / baseline_peak, 3)}
    if args.without:
        slower = without_fast_paths(learner, forest, args.repeats)
        row["slower_without"] = {name: round(seconds / mine, 2) for name, seconds in slower.items()}
    print(json.dumps(row) if args.json else "\n".join(f"{key:>14}  {value}" for key, value in row.items()))
    allowed = 1e-3 if model.dtype == torch.float32 and args.device == "cpu" else 0.1
    return 0 if row["gradient_gap"] < allowed else 1


if __name__ == "__main__":
    sys.exit(main())
