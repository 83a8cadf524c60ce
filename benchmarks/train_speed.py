"""Sampling throughput within a training run, compared with the engine alone on the same work, in one process.

    python benchmarks/train_speed.py --device cuda --model smollm2 --steps 4 --json
    python benchmarks/train_speed.py --device cuda --model 4b --steps 4 --json

GRPO on FrozenLake, built as by `arborl train`, with trained weights (`smollm2`, `seedling`, a folder) or random ones;
every reply has `--sampled` tokens of text. `ratio` is the tokens per second of the rollouts after the first step,
divided by those of the same engine when a plain loop sends the same number of conversations with the same number of
turns and tokens. The difference is the cost of agents, environment, recording and chat templates.
`compiled_after_first` and `recorded_after_first` count Triton kernels compiled and CUDA graphs recorded for sampling
after the first step, which should be 0; `learner_compiled_after_first` counts graphs compiled by torch.
`steps_an_hour` starts with the second step; `first_step_s` is the time from the construction of the run to the end of
its first step, including warm-up. With `--checkpoint FOLDER`, a checkpoint is written before the last step:
`checkpoint_delay_s` is the delay of that step, `saving_step_s` its duration. `--late 0.3 --max-lag 1` measures
asynchronous training with a slow environment. `--profile` adds a step at the end, whose update is profiled:
`update_profile` has its seconds, the seconds in which the GPU computed, and the kernels that took most of them.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import logging
import platform
import shutil
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

import arborl  # imported before torch, as in a training run

# isort: split
import torch
import transformers
import yaml
from benchmark_models import SHAPES, forbid_tokens, freeze_garbage_collector, random_model, weights_kind
from engine import Case, best_speed, run_engine
from gpu_profile import GpuProfile
from step_work import non_text_token_ids, peak_gib
from texts import ChatText
from transformers import PreTrainedModel

import arborl.training_run.build
from arborl.config.load_config import from_kwargs
from arborl.envs.env import Step
from arborl.envs.games.frozen_lake import FrozenLake
from arborl.models.model_loading import resolve, tune_cpu
from arborl.track import Trackers
from arborl.trainer.hooks import SaveCheckpoints
from arborl.trainer.trainer import Trainer
from arborl.training_run.build import TOKENIZER_FILES, RunParts, build
from arborl.training_run.object_names import name_objects
from arborl.types import Completion, Episode, Message, Metrics, Sampling


@arborl.reward
def id_reward(episode: Episode) -> float:
    """A reward that differs within a group."""
    return float(sum(token for call in episode.calls for token in call.completion.tokens) % 997)


class SlowLake(FrozenLake):
    """FrozenLake with a latency in each step, like that of a tool."""

    seconds = 0.0

    async def step(self, action: Message) -> Step:
        await asyncio.sleep(self.seconds)
        return await super().step(action)


class RunCounters:
    """Counts compiled kernels, recorded CUDA graphs and the requests to the engine."""

    def __init__(self, parts: RunParts):
        self.compiled = self.recorded = 0
        self.requests: dict[str, list[tuple[int, int]]] = defaultdict(list)
        """By session: tokens of each prompt and of its reply."""
        self._count_requests(parts.engine)
        if parts.model.device.type == "cuda":
            self._count_kernels()

    def _count_requests(self, engine: Any) -> None:
        generate = engine.generate

        async def counted(prompt: Sequence[int], sampling: Sampling, *, session: str) -> Completion:
            done: Completion = await generate(prompt, sampling, session=session)
            self.requests[session].append((len(prompt), len(done.tokens)))
            return done

        engine.generate = counted

    def _count_kernels(self) -> None:
        import triton

        from arborl.engines.local.cuda_graph_runner import CudaGraphModelRunner

        record = CudaGraphModelRunner._record

        def recorded(executor: CudaGraphModelRunner, *given: Any) -> None:
            self.recorded += 1
            record(executor, *given)

        def compiled(*given: Any, fn: Any = None, **more: Any) -> None:
            self.compiled += "arborl" in str(getattr(fn, "module", ""))  # kernels of the learner belong to torch

        CudaGraphModelRunner._record = recorded  # type: ignore[method-assign]
        triton.knobs.runtime.jit_post_compile_hook = compiled

    @property
    def now(self) -> tuple[int, int, int]:
        return self.compiled, self.recorded, torch._dynamo.utils.counters["stats"]["unique_graphs"]

    def work(self) -> Case:
        """The mean conversation of the requests since the last call, as a case of `engine.py`."""
        conversations = [conversation for session, conversation in self.requests.items() if session != "probe"]
        self.requests = defaultdict(list)
        observed = [
            later[0] - sum(before) for conversation in conversations for before, later in pairwise(conversation)
        ]
        return Case(
            "run",
            len(conversations),
            prompt=round(fmean(conversation[0][0] for conversation in conversations)),
            sampled=round(fmean(reply for conversation in conversations for _, reply in conversation)),
            turns=round(fmean(map(len, conversations))),
            observed=max(0, round(fmean(observed))) if observed else 0,
        )


class UpdateProfile:
    """Profiles the update of one step of a learner."""

    def __init__(self, learner: Any, step: int):
        self.update, self.left = learner.update, step
        self.row: dict[str, Any] | None = None
        learner.update = self._count

    def _count(self, *given: Any, **more: Any) -> Metrics:
        self.left -= 1
        if self.left:
            found: Metrics = self.update(*given, **more)
            return found
        with GpuProfile() as profile:
            found = self.update(*given, **more)
        self.row = profile.row
        return found


class StepLog:
    """Tracker that stores the metrics and the end time of each step."""

    def __init__(self) -> None:
        self.rows: list[Metrics] = []
        self.at: list[float] = []

    def log(self, metrics: Metrics, step: int) -> None:
        self.rows.append(dict(metrics))
        self.at.append(time.perf_counter())


class TimedCheckpoint(SaveCheckpoints):
    """Writes one checkpoint before the last step and measures how long it blocks the run; writing may continue after
    the run. The first step is a separate `fit` here, after which no checkpoint is written."""

    blocked_seconds: float | None = None

    def __call__(self, trainer: Trainer) -> None:
        before = self.spent["time/checkpoint"]
        if 1 < trainer.step <= self.every:
            super().__call__(trainer)
        if trainer.step == self.every and not self.due:
            self.blocked_seconds = self.spent["time/checkpoint"] - before

    def finish(self) -> None:
        """Does not wait for the checkpoint: the wait would measure the disk."""


def prepare_model_dir(name: str, device: str, outliers: bool, folder: Path) -> Path:
    """A model folder: that of a trained model, or a new one with random weights and the embedded model's tokenizer."""
    if name not in SHAPES:
        return resolve(name)
    random_model(name, device, outliers=outliers).save_pretrained(folder)
    for file in resolve("seedling").iterdir():
        if file.name in TOKENIZER_FILES or file.suffix == ".jinja":
            shutil.copy(file, folder)
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    return folder


def build_run(args: argparse.Namespace, folder: Path) -> RunParts:
    episodes = args.tasks * args.group * (1 + args.max_lag)  # of all batches that are collected at once
    SlowLake.seconds = args.late
    named, objects = name_objects({
        "env": SlowLake, "rollout.max_lag": args.max_lag,
        "model.name": str(folder), "model.device": args.device, "model.lora.rank": args.lora, "rewards": [id_reward],
        "model.dtype": "bfloat16" if args.device == "cuda" else "float32", "sampling.max_tokens": args.sampled,
        "rollout.tasks_per_step": args.tasks, "rollout.group_size": args.group, "rollout.max_turns": args.turns,
        "rollout.concurrency": episodes, "engine.max_requests": episodes, "engine.kv_tokens": episodes * args.context,
        "sampling.max_context": args.context, "learner.lr": 1e-6, "trainer.steps": args.steps + args.profile,
    } | {key: yaml.safe_load(value) for key, _, value in (one.partition("=") for one in args.set)})  # fmt: skip
    load = arborl.training_run.build.load_policy

    def text_only(*given: Any) -> PreTrainedModel:  # before the learner copies the weights
        model = load(*given)
        forbid_tokens(model, non_text_token_ids(model.config.vocab_size, folder))
        return model

    arborl.training_run.build.load_policy = text_only
    parts = build(from_kwargs(**named), objects)
    logging.getLogger("arborl.engines").info("memory: %s", parts.plan.summary)
    return parts


async def train(
    parts: RunParts, counters: RunCounters, save: TimedCheckpoint | None
) -> tuple[StepLog, float, tuple[int, ...]]:
    """Metrics of all steps, seconds of the first, and numbers of compilations and recordings after the first."""
    log = StepLog()
    trainer = Trainer(
        parts.config, parts.source, parts.rollout, parts.rewards, parts.algorithm, parts.learner, parts.engine,
        Trackers([]), (), save, parts.steps,
    )  # fmt: skip
    trainer.tracker = log  # type: ignore[assignment]
    began = time.perf_counter()
    parts.engine.warm_up(parts.rollout.sampling)  # type: ignore[attr-defined]
    last, trainer.num_steps = trainer.num_steps, 1
    await trainer.fit()
    first, before = time.perf_counter() - began, counters.now
    counters.work()
    trainer.num_steps = last
    await trainer.fit()
    return log, first, tuple(now - then for now, then in zip(counters.now, before, strict=True))


def measure(args: argparse.Namespace, folder: Path) -> tuple[dict[str, Any], TimedCheckpoint | None]:
    tune_cpu()
    model_dir = prepare_model_dir(args.model, args.device, args.outliers, folder / "model")
    parts = build_run(args, model_dir)
    counters = RunCounters(parts)
    profile = UpdateProfile(parts.learner, args.steps + 1) if args.profile else None
    save = TimedCheckpoint(args.checkpoint, args.steps - 1, 1, {}, parts.save_tokenizer) if args.checkpoint else None
    log, first, (compiled, recorded, learned) = asyncio.run(train(parts, counters, save))
    rows, ends = log.rows[: args.steps], log.at[: args.steps]
    later = rows[1:]

    def total(name: str) -> float:
        return sum(row[name] for row in later)

    run_speed = total("engine/sampled") / total("time/rollout")
    work = counters.work()
    work = Case(work.name, args.tasks * args.group, work.prompt, work.sampled, work.turns, work.observed)
    cuda = args.device == "cuda"
    peak = peak_gib(args.device)
    texts = ChatText(model_dir)
    freeze_garbage_collector()  # as in the run
    engine_speed = best_speed(lambda seed: run_engine(parts.engine, texts, work, seed), work, 2, cuda)  # type: ignore[arg-type]
    logprob_diffs = [
        row["policy/logprob_diff"] for row in later if "policy/logprob_diff" in row
    ]  # of steps with an update
    live = total("engine/sampled") / total("engine/steps")
    row = {
        "model": args.model, "weights": weights_kind(args.model, args.outliers),
        "lora": args.lora, "steps": args.steps, "episodes": work.conversations,
        "turns": work.turns, "prompt": work.prompt, "sampled": work.sampled, "observed": work.observed,
        "run_tok_s": round(run_speed, 1), "engine_tok_s": round(engine_speed, 1),
        "ratio": round(run_speed / engine_speed, 3),
        "run_ms_a_sampling_step": round(1e3 * total("time/rollout") / total("engine/steps"), 2),
        "steps_an_hour": round(3600 * (len(rows) - 2) / (ends[-1] - ends[1])), "late": args.late,
        "max_lag": args.max_lag, "live": round(live, 1), "first_step_s": round(first, 2),
        "step_s": round(fmean(row["time/step"] for row in later), 3),
        "rollout_s": round(fmean(row["time/rollout"] for row in later), 3),
        "learn_s": round(fmean(row["time/learn"] for row in later), 3),
        "compiled_after_first": compiled if cuda else None, "recorded_after_first": recorded if cuda else None,
        "learner_compiled_after_first": learned, "peak_gib": peak, "planned": parts.plan.summary,
        "gap": round(fmean(logprob_diffs), 5) if logprob_diffs else None,
        "checkpoint_delay_s": save and save.blocked_seconds and round(save.blocked_seconds, 3),
        "saving_step_s": save and round(rows[-1]["time/step"], 3),
        "update_profile": profile and profile.row,
        "device": torch.cuda.get_device_name() if cuda else f"{platform.machine()} CPU",
        "torch": torch.__version__, "transformers": transformers.__version__, "python": platform.python_version(),
    }  # fmt: skip
    return row, save


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument(
        "--model", help=f"smollm2, seedling or a folder (trained weights), {', '.join(SHAPES)} (random "
        "weights); default: 4b on a GPU, tiny on a CPU",
    )  # fmt: skip
    parser.add_argument(
        "--outliers", action=argparse.BooleanOptionalAction, default=True, help="add outliers to random weights"
    )
    parser.add_argument("--lora", type=int, default=0, metavar="RANK", help="train adapters of this rank")
    parser.add_argument("--steps", type=int, default=4, help="at least 3")
    parser.add_argument("--tasks", type=int, default=16)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--sampled", type=int, default=48, help="tokens per reply")
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--late", type=float, default=0.0, help="latency of an environment step in seconds")
    parser.add_argument("--max-lag", type=int, default=0, help="value of rollout.max_lag")
    parser.add_argument(
        "--checkpoint", type=Path, metavar="FOLDER", help="write a checkpoint there; 56 GB for a 4B model"
    )
    parser.add_argument("--set", nargs="*", default=[], metavar="a.b=c", help="other settings of the run")
    parser.add_argument("--profile", action="store_true", help="profile the update of one more step; GPU only")
    parser.add_argument("--json", action="store_true", help="print only one JSON line")
    args = parser.parse_args()
    if args.steps < 3:
        parser.error(
            "--steps must be at least 3: the first is a warm-up step, and a checkpoint is written after the second"
        )
    if args.profile and args.device != "cuda":
        parser.error("--profile needs --device cuda")
    args.model = args.model or ("4b" if args.device == "cuda" else "tiny")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    logging.basicConfig(level=logging.WARNING)
    logging.getLogger("arborl.engines").setLevel(logging.INFO)
    with tempfile.TemporaryDirectory() as folder:
        row, save = measure(args, Path(folder))
        print(
            json.dumps(row) if args.json else "\n".join(f"{key:30} {value}" for key, value in row.items()), flush=True
        )
        if save:  # waits for the checkpoint
            save.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
