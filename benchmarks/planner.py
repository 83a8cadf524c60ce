"""What `arborl plan` foretells beside what was measured, and beside what others have published.

    python benchmarks/planner.py             # a table, as in docs/results/planner.md
    python benchmarks/planner.py --json

Nothing is run but the planner: measured numbers are those of the pages named beside them. `fitted` marks what the
planner's efficiencies (`cluster/planner/hardware.py`) were fitted to; the other rows are predictions.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from arborl.cluster.planner.hardware import GIB, device_named
from arborl.cluster.planner.run_planner import PlacementPlan, RunPlanner
from arborl.cluster.planner.step_time import StepEstimate, StepTimeInputs, estimate_step
from arborl.cluster.planner.workload import LogNormal, TurnProfile, Workload, workload_from_options
from arborl.config.load_config import from_kwargs

SEVEN = "`train_speed.py --model 7b --lora 16`"
LATE = "`train_speed.py --model 0.5b --late 0.3`"
LAKE = {"prompt": "82", "reply": "48", "observed": "28", "turns": 6}
"""An episode of `train_speed.py`; prompt and observations as the embedded model's tokenizer has FrozenLake's."""
SPEED = {
    "rollout.tasks_per_step": 16, "rollout.group_size": 8, "engine.kv_tokens": 131_072, "engine.max_requests": 128,
    "sampling.max_tokens": 48,
}  # fmt: skip


@dataclass(frozen=True)
class Row:
    """One number, foretold and measured."""

    case: str
    what: str
    foretold: float
    measured: float
    source: str
    fitted: bool = False

    @property
    def error(self) -> float:
        return self.foretold / self.measured - 1


def planner(model: str, work: dict[str, Any], gpu: str = "h200", lag: int | None = None, **settings: Any) -> RunPlanner:
    config = from_kwargs(**{"model.name": model, "model.dtype": "bfloat16"} | settings)
    return RunPlanner.of(config, device_named(gpu), workload_from_options(config, **work), lag)


def first(made: RunPlanner, devices: int = 1) -> PlacementPlan:
    return next(made.plans(devices))


def engine_speed(made: RunPlanner, conversations: int) -> float:
    """Tokens a second of an engine that does nothing else."""
    found: StepEstimate = estimate_step(
        StepTimeInputs(
            episodes=made.episodes, groups=conversations, group_size=1, engines=1, max_requests=conversations,
            kv_tokens=1e12, sampling_step=made.times.sampling_step(), prefill=made.times.prefill,
            learn=lambda tokens, terms: 1e-9, publish=0.0,
        )
    )  # fmt: skip
    return found.sampled


def h200() -> Iterator[Row]:
    """Of docs/results: one H200."""
    step, memory, engine = "step.md", "first-step.md", "engine.md"
    made = planner("4b", LAKE, **SPEED)
    four = first(made)
    yield Row("4B, 128 × 6 × 48", "rollout s", four.estimate.wait, 2.1, engine)
    yield Row("4B, 128 × 6 × 48", "learn s", four.estimate.learn, 2.97, memory, fitted=True)
    yield Row("4B, 128 × 6 × 48", "step s", four.estimate.step, 5.1, engine)
    yield Row("4B, 128 × 6 × 48", "GiB", four.learner_bytes / GIB, 116.8, memory)
    less = first(planner("4b", LAKE, **SPEED, **{"learner.memory_share": 0.68}))
    yield Row("4B, memory_share 0.68", "learn s", less.estimate.learn, 3.70, memory)
    yield Row("4B, memory_share 0.68", "GiB", less.learner_bytes / GIB, 90.7, memory)
    seven = first(planner("7b", LAKE, **SPEED, **{"learner.memory_share": 0.35, "model.lora.rank": 16}))
    yield Row("7B LoRA", "learn s", seven.estimate.learn, 4.55, SEVEN, fitted=True)
    yield Row("7B LoRA", "GiB", seven.learner_bytes / GIB, 31.1, memory)
    full = first(planner("7b", LAKE, **SPEED, **{"learner.offload": "optimizer"}))
    yield Row("7B, offload=optimizer", "rollout s", full.estimate.wait, 2.79, memory)
    yield Row("7B, offload=optimizer", "learn s", full.estimate.learn, 7.79, memory)
    yield Row("7B, offload=optimizer", "step s", full.estimate.step, 10.58, memory)
    yield Row("7B, offload=optimizer", "GiB", full.learner_bytes / GIB, 85.4, memory)
    late = first(planner("0.5b", LAKE | {"tool": "0.3"}, **SPEED))
    yield Row("0.5B, tool 0.3 s", "rollout s", late.estimate.wait, 2.67, LATE)
    yield Row("0.5B, tool 0.3 s", "learn s", late.estimate.learn, 0.42, LATE, fitted=True)
    yield Row("0.5B, tool 0.3 s", "step s", late.estimate.step, 3.09, LATE)
    for name, tasks, prompt, reply, sampled, whole in (
        ("W1", 32, 512, 128, 0.270, 0.667),
        ("W2", 8, 2048, 256, 0.388, 0.653),
    ):
        made = planner(
            "0.5b", {"prompt": str(prompt), "reply": str(reply), "turns": 1},
            **{"rollout.tasks_per_step": tasks, "sampling.max_tokens": reply, "sampling.max_context": 4_096},
        )  # fmt: skip
        found = first(made).estimate
        yield Row(f"0.5B, {name}", "rollout s", found.wait, sampled, step)
        yield Row(f"0.5B, {name}", "learn s", found.learn, round(whole - sampled, 3), step, fitted=name == "W1")
        yield Row(f"0.5B, {name}", "step s", found.step, whole, step)
    single = {"prompt": "128", "reply": "128", "turns": 1}
    room = {"sampling.max_tokens": 128}
    for model, live, measured, fitted, lora in (
        ("0.5b", 64, 49_555, True, 0), ("0.5b", 256, 110_900, True, 0), ("0.5b", 1024, 189_430, True, 0),
        ("4b", 128, 20_100, True, 0), ("7b", 128, 15_480, True, 0), ("7b", 128, 13_900, False, 16),
    ):  # fmt: skip
        made = planner(model, single, **room, **{"model.lora.rank": lora})
        name = f"{model.upper()}{' LoRA' if lora else ''} engine, {live} live"
        yield Row(name, "tok/s", engine_speed(made, live), measured, engine, fitted)
    ragged = planner(
        "0.5b", {"prompt": "64", "reply": "64", "observed": "64", "turns": 8}, **{"sampling.max_tokens": 112}
    )
    ragged = replace(ragged, episodes=Workload(_ragged, "", {}).sample())
    yield Row("0.5B engine, 256 × 8 ragged", "tok/s", engine_speed(ragged, 256), 80_900, engine)


def _ragged(chance: Any) -> tuple[TurnProfile, ...]:
    return tuple(
        TurnProfile(64 if not at else chance.randint(16, 112), chance.randint(16, 112), 0.0) for at in range(8)
    )


def cpu() -> Iterator[Row]:
    """Of docs/results/step.md: two idle x86 cores, 5M parameters."""
    config = {
        "model_type": "qwen3", "vocab_size": 1024, "hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 6,
        "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 40, "tie_word_embeddings": True,
    }  # fmt: skip
    from arborl.cluster.planner.hardware import CPU_EFFICIENCY, DeviceTimes
    from arborl.cluster.planner.model_shape import shape_from_config

    for name, work, sampled, whole in (
        ("single", {"prompt": "64", "reply": "64", "turns": 1}, 0.28, 0.81),
        ("multi-turn", {"prompt": "221", "reply": "15", "observed": "20", "turns": 4}, 0.96, 3.03),
    ):
        made = planner(
            "seedling", work, "cpu",
            **{"model.dtype": "float32", "rollout.tasks_per_step": 4, "sampling.max_tokens": 64},
        )  # fmt: skip
        core = device_named("cpu")
        two = replace(core, bandwidth=2 * core.bandwidth, bfloat16=2 * core.bfloat16, float32=2 * core.float32)
        shape = shape_from_config("5m", config, made.config.model)
        made = replace(made, shape=shape, device=two, times=DeviceTimes(shape, two, CPU_EFFICIENCY))
        found = first(made).estimate
        yield Row(f"two cores, 5M, {name}", "rollout s", found.wait, sampled, "step.md", fitted=name == "single")
        yield Row(f"two cores, 5M, {name}", "learn s", found.learn, whole - sampled, "step.md", fitted=name == "single")


def scheduler() -> Iterator[Row]:
    """Of docs/results/async.md: the scheduler itself in virtual time, 16 × 8 episodes, tools of median 0.5 s and p99
    8 s, a call in 85 % of episodes, 12 updates, six seeds; how many times longer without lag."""
    late = LogNormal(0.5, 8.0)

    def draw(chance: Any) -> tuple[TurnProfile, ...]:
        return (TurnProfile(1, 1, late.draw(chance) if chance.random() < 0.85 else 0.0),)

    for learn, measured in ((0.6, 4.2), (1.0, 3.87), (1.5, 3.5)):
        spent = [0.0, 0.0]
        for lag in (0, 1):
            for seed in range(6):
                found = estimate_step(
                    StepTimeInputs(
                        episodes=Workload(draw, "", {}).sample(seed), groups=16, group_size=8, engines=1,
                        max_requests=1_000, kv_tokens=1e12, max_lag=lag, sampling_step=lambda rows, context: 1e-6,
                        prefill=lambda tokens: 0.0, learn=lambda tokens, terms, learn=learn: learn, publish=0.0,
                    )
                )  # fmt: skip
                spent[lag] += found.step
        yield Row(f"scheduler, learner {learn:g} s", "speed-up", spent[0] / spent[1], measured, "async.md")


def published() -> Iterator[Row]:
    """Of others: what their papers leave open is assumed, and said in docs/results/planner.md."""
    areal = {
        "rollout.tasks_per_step": 512, "rollout.group_size": 16, "sampling.max_tokens": 27_648,
        "sampling.max_context": 28_672, "engine.max_requests": 256, "learner.minibatches": 4,
    }  # fmt: skip
    for model, nodes, sync, ahead in (("1.5b", 16, 41.0, 14.8), ("7b", 24, 57.7, 25.4)):
        made = planner(model, {"prompt": "200", "reply": "7000,27000", "turns": 1}, "h800", 4, **areal)
        ways = list(made.plans(8 * nodes))
        hours = [one.estimate.step / 3.6 for one in ways]  # of 1,000 updates
        case = f"AReaL {model.upper()}, {8 * nodes} H800"
        source = "AReaL's v0.3 page, table 2 (arXiv 2505.24298)"
        yield Row(case, "h, sync", hours[0], sync, source)
        yield Row(case, "h, async", hours[1], ahead, source)
        yield Row(case, "speed-up", hours[0] / hours[1], sync / ahead, source)
    roll = {
        "rollout.tasks_per_step": 32,
        "rollout.group_size": 8,
        "sampling.max_tokens": 32_768,
        "sampling.max_context": 40_960,
    }
    made = planner("Qwen3-8B", {"prompt": "200", "reply": "8000,32000", "turns": 1}, "h800", 2, **roll)
    ways = list(made.plans(128))
    speed = ways[0].estimate.step / ways[1].estimate.step
    yield Row("ROLL Flash, Qwen3-8B, 128 GPUs", "speed-up", speed, 2.24, "arXiv 2510.11345, abstract: up to")
    tools = planner(
        "Qwen3-8B", {"prompt": "500", "reply": "100,400", "observed": "200", "turns": 30, "tool": "7,40"}, "h800", 2,
        **roll | {"sampling.max_tokens": 512},
    )  # fmt: skip
    ways = list(tools.plans(32))
    speed = ways[0].estimate.step / ways[1].estimate.step
    yield Row("ROLL Flash, agentic", "speed-up", speed, 2.72, "arXiv 2510.11345, abstract: up to")


def shown(number: float) -> str:
    return f"{number:,.0f}" if number >= 1_000 else f"{number:.1f}" if number >= 100 else f"{number:.3g}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    parser.add_argument("--only", choices=["h200", "cpu", "scheduler", "published"], help="one part of it")
    args = parser.parse_args()
    makers = {"h200": h200, "cpu": cpu, "scheduler": scheduler, "published": published}
    if not args.json:
        print("| case | what | foretold | measured | error | source |\n|---|---|---|---|---|---|")
    for name, maker in makers.items():
        for row in maker() if args.only in (None, name) else ():
            if args.json:
                print(json.dumps(asdict(row) | {"error": round(row.error, 3)}))
                continue
            mark = " (fitted)" if row.fitted else ""
            print(
                f"| {row.case} | {row.what}{mark} | {shown(row.foretold)} | {shown(row.measured)} | {row.error:+.0%} | "
                f"{row.source} |"
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
