"""Forward and backward pass over token trees, compared with one padded batch of the same rows; gradients are equal.

    python benchmarks/learner.py --device cpu --json

On a CPU, case `turns`: eight episodes of one task with four turns each; the thinking of earlier turns is removed from
the prompt, so that every turn is a separate row (13,312 tokens in 32 rows). On a GPU, case `group`: eight completions
of 256 tokens for one prompt of 2,048, in bfloat16, with a random Qwen2.5-0.5B unless `--model` names another. The
baseline is plain transformers code: rows padded to the longest, the library's attention, float32 logits of sampled
tokens only. The best of `--repeats` is reported. `--without` also measures the learner with each fast execution path
switched off; `slower_without` is the resulting slowdown (`models/fallbacks.py`).
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

import arborl  # noqa: F401  # imported before torch, as in a training run; its settings apply to both systems

# isort: split
import numpy as np
import torch
import transformers
from benchmark_models import SHAPES, freeze_garbage_collector, load, weights_kind
from texts import Texts, make_texts
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
    """Token counts of one group; each turn samples thinking and an answer; later prompts contain only the answer."""

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


def make_calls(case: Case, texts: Texts) -> list[Call]:
    """The model calls of all episodes, with text or random tokens."""
    rng = np.random.default_rng(0)

    def random_tokens(count: int) -> tuple[int, ...]:
        return tuple(texts.text(count, rng))

    prompt, calls = tuple(texts.prompt(case.prompt, rng)), []
    for _ in range(case.episodes):
        context = prompt
        for turn in range(case.turns):
            thinking, answer = random_tokens(case.thinking), random_tokens(case.answer)
            sampled = (*thinking, *answer)
            calls.append(Call(context, Completion(sampled, (-6.0,) * len(sampled), FinishReason.STOP), turn))
            context = (*context, *answer, *texts.observation(case.observed, rng))
    return calls


class Reinforce:
    """REINFORCE without a baseline: the loss is the negative log-probability times the advantage."""

    needs, whole, trust_region = AlgorithmNeeds(), False, None

    def loss(self, outputs, terms):  # type: ignore[no-untyped-def]
        return -outputs.logprob_M * terms.advantage_M, {}


def call_advantage(call: int) -> float:
    return float(np.cos(call))


def make_forest(calls: list[Call]) -> Forest:
    forest = build_token_trees(
        [Group(Task("t"), [Episode(str(i), Task("t"), calls=[call]) for i, call in enumerate(calls)])]
    )
    forest.terms.advantage[:] = [call_advantage(call) for call in forest.terms.call]
    forest.terms.weight[:] = 1.0 / len(forest.terms)
    return forest


def run_learner(learner: Learner, forest: Forest) -> None:
    learner.backward(forest.trees, forest.terms, Reinforce())


def run_padded_batch(model: PreTrainedModel, calls: list[Call]) -> None:
    """Baseline: forward and backward pass of one padded batch."""
    rows = [(*call.prompt, *call.completion.tokens) for call in calls]
    longest = max(map(len, rows))
    ids = torch.tensor([[*row, *([0] * (longest - len(row)))] for row in rows], device=model.device)
    mask = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in rows], device=model.device)
    sampled_positions = [(i, t) for i, call in enumerate(calls) for t in range(len(call.prompt) - 1, len(rows[i]) - 1)]
    row, position = torch.tensor(sampled_positions, device=model.device).T
    weight = torch.tensor([call_advantage(i) for i, _ in sampled_positions], device=model.device) / len(
        sampled_positions
    )
    hidden = model.base_model(input_ids=ids, attention_mask=mask, use_cache=False).last_hidden_state
    log = torch.log_softmax(model.lm_head(hidden[row, position]).float(), -1)
    logprob = log.gather(1, ids[row, position + 1][:, None])[:, 0]
    (-logprob * weight).sum().backward()


def measure(run: Callable[[], None], model: PreTrainedModel, repeats: int) -> tuple[float, float, list[torch.Tensor]]:
    """Seconds of the fastest run after two warm-up runs, peak GiB of GPU memory, and the gradients."""
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
    """Selects among the execution paths that `allows` accepts."""

    def __init__(self, allows: Callable[[ExecutionPath], bool]):
        super().__init__()
        self.allows = allows

    def _candidates(self, model: PreTrainedModel, batch: MicroBatch) -> Iterator[ExecutionPath]:
        return filter(self.allows, super()._candidates(model, batch))


def without_fast_paths(learner: Learner, forest: Forest, repeats: int) -> dict[str, float]:
    """Seconds of forward and backward pass without each fast execution path, and without all of them. Afterwards the
    model uses the library's forward pass."""
    restrictions = {
        "fused layers": lambda path: not path.fused,
        "tree kernels": lambda path: path.attention != "kernel",
        "short forward pass": lambda path: True,
        "all of them": lambda path: path.attention != "kernel",
    }
    seconds = {}
    for name, allows in restrictions.items():
        if name == "short forward pass":
            use_library_forward(learner.model)
        learner.path_selector = RestrictedPathSelector(allows)
        seconds[name] = measure(lambda: run_learner(learner, forest), learner.model, repeats)[0]
    return seconds


def relative_difference(actual: list[torch.Tensor], other: list[torch.Tensor]) -> float:
    """Norm of the difference divided by the norm of `other`."""
    difference = sum(float((a.double() - b.double()).square().sum()) for a, b in zip(actual, other, strict=True))
    return float(np.sqrt(difference / sum(float(b.double().square().sum()) for b in other)))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument(
        "--model", help=f"smollm2, seedling or a folder (trained weights), {', '.join(SHAPES)} (random weights)"
    )
    parser.add_argument(
        "--dtype", choices=["bfloat16", "float16", "float32"], help="default: bfloat16 on a GPU, float32 on a CPU"
    )
    parser.add_argument(
        "--outliers", action=argparse.BooleanOptionalAction, default=True, help="add outliers to random weights"
    )
    parser.add_argument("--episodes", type=int, help="number of episodes; default: set by the case")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--without", action="store_true", help="also measure without each fast execution path")
    parser.add_argument("--json", action="store_true", help="print only one JSON line")
    args = parser.parse_args()
    transformers.logging.set_verbosity_error()
    name = args.model or ("seedling" if args.device == "cpu" else "0.5b")
    model = load(name, args.device, args.dtype and getattr(torch, args.dtype), args.outliers)
    freeze_garbage_collector()
    case = CASES[args.device]
    case = dataclasses.replace(case, episodes=args.episodes or case.episodes)
    calls = make_calls(case, make_texts(name, model.config.vocab_size))
    forest = make_forest(calls)

    model.set_attn_implementation("sdpa")
    baseline, baseline_peak, expected = measure(lambda: run_padded_batch(model, calls), model, args.repeats)
    model.set_attn_implementation(ATTENTION_NAME)
    tune_cpu()
    config = LearnerConfig(micro_batch_tokens=8192, master="none")
    learner = Learner(model, config, Sampling())
    arborl_seconds, peak, gradients = measure(lambda: run_learner(learner, forest), model, args.repeats)
    batches = learner.micro_batcher.split(forest.trees, forest.terms)
    unique = sum(len(tree) for tree in forest.trees)
    row = {
        "case": case.name, "model": name, "weights": weights_kind(name, args.outliers),
        "dtype": str(model.dtype).removeprefix("torch."), "rows": len(calls),
        "raw_tokens": forest.raw_tokens, "tree_tokens": unique,
        "way": str(learner.path_selector(model, batches[0])),
        "ours_s": round(arborl_seconds, 4), "baseline_s": round(baseline, 4),
        "ratio": round(baseline / arborl_seconds, 2),
        "gradient_gap": float(f"{relative_difference(gradients, expected):.2e}"),
        "device": torch.cuda.get_device_name() if args.device == "cuda" else f"{platform.machine()} CPU",
        "threads": torch.get_num_threads(), "torch": torch.__version__, "transformers": transformers.__version__,
    }  # fmt: skip
    if args.device == "cuda":
        row |= {"ours_gib": round(peak, 2), "baseline_gib": round(baseline_peak, 2)}
        row |= {"memory_ratio": round(peak / baseline_peak, 3)}
    if args.without:
        restricted_seconds = without_fast_paths(learner, forest, args.repeats)
        row["slower_without"] = {
            name: round(seconds / arborl_seconds, 2) for name, seconds in restricted_seconds.items()
        }
    print(json.dumps(row) if args.json else "\n".join(f"{key:>14}  {value}" for key, value in row.items()))
    allowed = 1e-3 if model.dtype == torch.float32 and args.device == "cpu" else 0.1
    return 0 if row["gradient_gap"] < allowed else 1


if __name__ == "__main__":
    sys.exit(main())
