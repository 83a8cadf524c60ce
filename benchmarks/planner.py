"""Predictions of `arborl plan` compared with measurements of Arbor and with published results of other systems.

    python benchmarks/planner.py             # a table, as in docs/results/planner.md
    python benchmarks/planner.py --json

Only the planner runs: measured values come from the pages in the column `source`. `fitted` marks the measurements to
which the efficiencies of the planner (`cluster/planner/hardware.py`) were fitted; all other rows test predictions. The
column `foretold` is the prediction.
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

SOURCE_7B = "`train_speed.py --model 7b --lora 16`"
SOURCE_LATENCY = "`train_speed.py --model 0.5b --late 0.3`"
LAKE_WORKLOAD = {"prompt": "82", "reply": "48", "observed": "28", "turns": 6}
"""An episode of `train_speed.py`; token counts of FrozenLake's prompt and observations with seedling's tokenizer."""
SPEED_SETTINGS = {
    "rollout.tasks_per_step": 16, "rollout.group_size": 8, "engine.kv_tokens": 131_072, "engine.max_requests": 128,
    "sampling.max_tokens": 48,
}  # fmt: skip


@dataclass(frozen=True)
class Row:
    """One predicted (`foretold`) and measured value."""

    case: str
    what: str
    foretold: float
    measured: float
    source: str
    fitted: bool = False

    @property
    def error(self) -> float:
        return self.foretold / self.measured - 1


def make_planner(
    model: str, work: dict[str, Any], gpu: str = "h200", lag: int | None = None, **settings: Any
) -> RunPlanner:
    config = from_kwargs(**{"model.name": model, "model.dtype": "bfloat16"} | settings)
    return RunPlanner.of(config, device_named(gpu), workload_from_options(config, **work), lag)


def first_plan(planner: RunPlanner, devices: int = 1) -> PlacementPlan:
    return next(planner.plans(devices))


def engine_speed(planner: RunPlanner, conversations: int) -> float:
    """Tokens per second of an engine without a learner."""
    found: StepEstimate = estimate_step(
        StepTimeInputs(
            episodes=planner.episodes, groups=conversations, group_size=1, engines=1, max_requests=conversations,
            kv_tokens=1e12, sampling_step=planner.times.sampling_step(), prefill=planner.times.prefill,
            learn=lambda tokens, terms: 1e-9, publish=0.0,
        )
    )  # fmt: skip
    return found.sampled


def h200_rows() -> Iterator[Row]:
    """Measurements of docs/results on one H200."""
    step, memory, engine = "step.md", "first-step.md", "engine.md"
    planner = make_planner("4b", LAKE_WORKLOAD, **SPEED_SETTINGS)
    full_4b = first_plan(planner)
    yield Row("4B, 128 × 6 × 48", "rollout s", full_4b.estimate.wait, 2.13, memory)
    yield Row("4B, 128 × 6 × 48", "learn s", full_4b.estimate.learn, 3.18, memory)
    yield Row("4B, 128 × 6 × 48", "step s", full_4b.estimate.step, 5.31, memory)
    yield Row("4B, 128 × 6 × 48", "GiB", full_4b.learner_bytes / GIB, 102.1, memory)
    large_4b = first_plan(make_planner("4b", LAKE_WORKLOAD, **SPEED_SETTINGS, **{"learner.memory_share": 0.9}))
    yield Row("4B, memory_share 0.9", "learn s", large_4b.estimate.learn, 2.97, memory, fitted=True)
    yield Row("4B, memory_share 0.9", "GiB", large_4b.learner_bytes / GIB, 116.8, memory)
    small_4b = first_plan(make_planner("4b", LAKE_WORKLOAD, **SPEED_SETTINGS, **{"learner.memory_share": 0.68}))
    yield Row("4B, memory_share 0.68", "learn s", small_4b.estimate.learn, 3.70, memory)
    yield Row("4B, memory_share 0.68", "GiB", small_4b.learner_bytes / GIB, 90.7, memory)
    lora_7b = first_plan(
        make_planner("7b", LAKE_WORKLOAD, **SPEED_SETTINGS, **{"learner.recompute": True, "model.lora.rank": 16})
    )
    yield Row("7B LoRA", "learn s", lora_7b.estimate.learn, 4.55, SOURCE_7B, fitted=True)
    yield Row("7B LoRA", "GiB", lora_7b.learner_bytes / GIB, 31.1, memory)
    full_7b = first_plan(make_planner("7b", LAKE_WORKLOAD, **SPEED_SETTINGS, **{"learner.offload": "optimizer"}))
    yield Row("7B, offload=optimizer", "rollout s", full_7b.estimate.wait, 2.79, memory)
    yield Row("7B, offload=optimizer", "learn s", full_7b.estimate.learn, 7.79, memory)
    yield Row("7B, offload=optimizer", "step s", full_7b.estimate.step, 10.58, memory)
    yield Row("7B, offload=optimizer", "GiB", full_7b.learner_bytes / GIB, 85.4, memory)
    slow_tool = first_plan(make_planner("0.5b", LAKE_WORKLOAD | {"tool": "0.3"}, **SPEED_SETTINGS))
    yield Row("0.5B, tool 0.3 s", "rollout s", slow_tool.estimate.wait, 2.67, SOURCE_LATENCY)
    yield Row("0.5B, tool 0.3 s", "learn s", slow_tool.estimate.learn, 0.42, SOURCE_LATENCY, fitted=True)
    yield Row("0.5B, tool 0.3 s", "step s", slow_tool.estimate.step, 3.09, SOURCE_LATENCY)
    for name, tasks, prompt, reply, rollout_seconds, step_seconds in (
        ("W1", 32, 512, 128, 0.270, 0.667),
        ("W2", 8, 2048, 256, 0.388, 0.653),
    ):
        planner = make_planner(
            "0.5b", {"prompt": str(prompt), "reply": str(reply), "turns": 1},
            **{"rollout.tasks_per_step": tasks, "sampling.max_tokens": reply, "sampling.max_context": 4_096},
        )  # fmt: skip
        found = first_plan(planner).estimate
        yield Row(f"0.5B, {name}", "rollout s", found.wait, rollout_seconds, step)
        yield Row(
            f"0.5B, {name}", "learn s", found.learn, round(step_seconds - rollout_seconds, 3), step, fitted=name == "W1"
        )
        yield Row(f"0.5B, {name}", "step s", found.step, step_seconds, step)
    single = {"prompt": "128", "reply": "128", "turns": 1}
    limits = {"sampling.max_tokens": 128}
    for model, num_requests, measured, fitted, lora in (
        ("0.5b", 64, 49_555, True, 0), ("0.5b", 256, 110_900, True, 0), ("0.5b", 1024, 189_430, True, 0),
        ("4b", 128, 20_100, True, 0), ("7b", 128, 15_480, True, 0), ("7b", 128, 13_900, False, 16),
    ):  # fmt: skip
        planner = make_planner(model, single, **limits, **{"model.lora.rank": lora})
        name = f"{model.upper()}{' LoRA' if lora else ''} engine, {num_requests} live"
        yield Row(name, "tok/s", engine_speed(planner, num_requests), measured, engine, fitted)
    ragged = make_planner(
        "0.5b", {"prompt": "64", "reply": "64", "observed": "64", "turns": 8}, **{"sampling.max_tokens": 112}
    )
    ragged = replace(ragged, episodes=Workload(_ragged_turns, "", {}).sample())
    yield Row("0.5B engine, 256 × 8 ragged", "tok/s", engine_speed(ragged, 256), 80_900, engine)


def _ragged_turns(rng: Any) -> tuple[TurnProfile, ...]:
    return tuple(TurnProfile(64 if not at else rng.randint(16, 112), rng.randint(16, 112), 0.0) for at in range(8))


def cpu_rows() -> Iterator[Row]:
    """Measurements of docs/results/step.md on two idle x86 cores, 5M parameters."""
    config = {
        "model_type": "qwen3", "vocab_size": 1024, "hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 6,
        "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 40, "tie_word_embeddings": True,
    }  # fmt: skip
    from arborl.cluster.planner.hardware import CPU_EFFICIENCY, DeviceTimes
    from arborl.cluster.planner.model_shape import shape_from_config

    for name, work, rollout_seconds, step_seconds in (
        ("single", {"prompt": "64", "reply": "64", "turns": 1}, 0.28, 0.81),
        ("multi-turn", {"prompt": "221", "reply": "15", "observed": "20", "turns": 4}, 0.96, 3.03),
    ):
        planner = make_planner(
            "seedling", work, "cpu",
            **{"model.dtype": "float32", "rollout.tasks_per_step": 4, "sampling.max_tokens": 64},
        )  # fmt: skip
        core = device_named("cpu")
        two = replace(core, bandwidth=2 * core.bandwidth, bfloat16=2 * core.bfloat16, float32=2 * core.float32)
        shape = shape_from_config("5m", config, planner.config.model)
        planner = replace(planner, shape=shape, device=two, times=DeviceTimes(shape, two, CPU_EFFICIENCY))
        found = first_plan(planner).estimate
        yield Row(
            f"two cores, 5M, {name}", "rollout s", found.wait, rollout_seconds, "step.md", fitted=name == "single"
        )
        yield Row(
            f"two cores, 5M, {name}",
            "learn s",
            found.learn,
            step_seconds - rollout_seconds,
            "step.md",
            fitted=name == "single",
        )


def scheduler_rows() -> Iterator[Row]:
    """Simulations of docs/results/async.md: the scheduler in virtual time with 16 × 8 episodes, tool latency of median
    0.5 s and p99 8 s, a tool call in 85 % of episodes, 12 updates, six seeds; speed-up by `max_lag=1`."""
    late = LogNormal(0.5, 8.0)

    def draw(rng: Any) -> tuple[TurnProfile, ...]:
        return (TurnProfile(1, 1, late.draw(rng) if rng.random() < 0.85 else 0.0),)

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


def published_rows() -> Iterator[Row]:
    """Results of other systems; docs/results/planner.md lists the assumptions about what their papers do not state."""
    areal = {
        "rollout.tasks_per_step": 512, "rollout.group_size": 16, "sampling.max_tokens": 27_648,
        "sampling.max_context": 28_672, "engine.max_requests": 256, "learner.minibatches": 4,
    }  # fmt: skip
    for model, nodes, sync_hours, async_hours in (("1.5b", 16, 41.0, 14.8), ("7b", 24, 57.7, 25.4)):
        planner = make_planner(model, {"prompt": "200", "reply": "7000,27000", "turns": 1}, "h800", 4, **areal)
        plans_by_mode = list(planner.plans(8 * nodes))
        hours = [one.estimate.step / 3.6 for one in plans_by_mode]  # for 1,000 updates
        case = f"AReaL {model.upper()}, {8 * nodes} H800"
        source = "AReaL's v0.3 page, table 2 (arXiv 2505.24298)"
        yield Row(case, "h, sync", hours[0], sync_hours, source)
        yield Row(case, "h, async", hours[1], async_hours, source)
        yield Row(case, "speed-up", hours[0] / hours[1], sync_hours / async_hours, source)
    roll = {
        "rollout.tasks_per_step": 32,
        "rollout.group_size": 8,
        "sampling.max_tokens": 32_768,
        "sampling.max_context": 40_960,
    }
    planner = make_planner("Qwen3-8B", {"prompt": "200", "reply": "8000,32000", "turns": 1}, "h800", 2, **roll)
    plans_by_mode = list(planner.plans(128))
    speed = plans_by_mode[0].estimate.step / plans_by_mode[1].estimate.step
    yield Row("ROLL Flash, Qwen3-8B, 128 GPUs", "speed-up", speed, 2.24, "arXiv 2510.11345, abstract: up to")
    tools = make_planner(
        "Qwen3-8B", {"prompt": "500", "reply": "100,400", "observed": "200", "turns": 30, "tool": "7,40"}, "h800", 2,
        **roll | {"sampling.max_tokens": 512},
    )  # fmt: skip
    plans_by_mode = list(tools.plans(32))
    speed = plans_by_mode[0].estimate.step / plans_by_mode[1].estimate.step
    yield Row("ROLL Flash, agentic", "speed-up", speed, 2.72, "arXiv 2510.11345, abstract: up to")


def format_number(number: float) -> str:
    return f"{number:,.0f}" if number >= 1_000 else f"{number:.1f}" if number >= 100 else f"{number:.3g}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON line per row")
    parser.add_argument("--only", choices=["h200", "cpu", "scheduler", "published"], help="print one section only")
    args = parser.parse_args()
    sections = {"h200": h200_rows, "cpu": cpu_rows, "scheduler": scheduler_rows, "published": published_rows}
    if not args.json:
        print("| case | what | foretold | measured | error | source |\n|---|---|---|---|---|---|")
    for name, make_rows in sections.items():
        for row in make_rows() if args.only in (None, name) else ():
            if args.json:
                print(json.dumps(asdict(row) | {"error": round(row.error, 3)}))
                continue
            mark = " (fitted)" if row.fitted else ""
            print(
                f"| {row.case} | {row.what}{mark} | {format_number(row.foretold)} | {format_number(row.measured)} | "
                f"{row.error:+.0%} | {row.source} |"
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
