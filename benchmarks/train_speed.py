"""How fast sampling is within a real run, beside the engine alone on the same work, in one process.

    python benchmarks/train_speed.py --device cuda --model smollm2 --steps 4 --json
    python benchmarks/train_speed.py --device cuda --model 4b --steps 4 --json

GRPO on FrozenLake, built as `arborl train` builds it, with real weights (`smollm2`, `seedling`, a folder) or a random
body, whose every reply has `--sampled` tokens of text. `ratio` is the tokens a second of the rollouts after the first
step, over those of the same engine when nothing but a loop asks for the same conversations: as many, as many turns, as
long. It is what agents, environment, recording and templates cost. `compiled_after_first` and `recorded_after_first`
count Triton kernels compiled and CUDA graphs recorded for sampling after the first step: both should be 0;
`learner_compiled_after_first` counts what torch compiled. `steps_an_hour` counts from the second step on,
`first_step_s` from the built parts on, warming included. With `--checkpoint FOLDER`, one is written there before the
last step: `checkpoint_delay_s` is how much later that begins, `saving_step_s` how long it takes. `--late 0.3 --max-lag
1` is a run whose environment is slow, played while learning.
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

import arborl  # before torch, as everyone does who starts a run

# isort: split
import torch
import transformers
import yaml
from bodies import SHAPES, forbid, random_body, settle, weights_of
from engine import Case, best, ours
from step_work import not_text, peak_gib
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
def ids(episode: Episode) -> float:
    """Something that differs within a group."""
    return float(sum(token for call in episode.calls for token in call.completion.tokens) % 997)


class Late(FrozenLake):
    """A lake whose answers take their time, as those of a tool do."""

    seconds = 0.0

    async def step(self, action: Message) -> Step:
        await asyncio.sleep(self.seconds)
        return await super().step(action)


class Counts:
    """What is compiled and recorded for sampling, and what is asked of the engine."""

    def __init__(self, parts: RunParts):
        self.compiled = self.recorded = 0
        self.asked: dict[str, list[tuple[int, int]]] = defaultdict(list)
        """By session: tokens of each prompt, and of its reply."""
        self._count_requests(parts.engine)
        if parts.model.device.type == "cuda":
            self._count_kernels()

    def _count_requests(self, engine: Any) -> None:
        generate = engine.generate

        async def counted(prompt: Sequence[int], sampling: Sampling, *, session: str) -> Completion:
            done: Completion = await generate(prompt, sampling, session=session)
            self.asked[session].append((len(prompt), len(done.tokens)))
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
            self.compiled += "arborl" in str(getattr(fn, "module", ""))  # the learner's are torch's

        CudaGraphModelRunner._record = recorded  # type: ignore[method-assign]
        triton.knobs.runtime.jit_post_compile_hook = compiled

    @property
    def now(self) -> tuple[int, int, int]:
        return self.compiled, self.recorded, torch._dynamo.utils.counters["stats"]["unique_graphs"]

    def work(self) -> Case:
        """The mean conversation of what was asked since the last call."""
        talks = [talk for session, talk in self.asked.items() if session != "probe"]
        self.asked = defaultdict(list)
        observed = [later[0] - sum(before) for talk in talks for before, later in pairwise(talk)]
        return Case(
            "run",
            len(talks),
            prompt=round(fmean(talk[0][0] for talk in talks)),
            sampled=round(fmean(reply for talk in talks for _, reply in talk)),
            turns=round(fmean(map(len, talks))),
            observed=max(0, round(fmean(observed))) if observed else 0,
        )


class Log:
    """Keeps the metrics of each step, and when it was done."""

    def __init__(self) -> None:
        self.rows: list[Metrics] = []
        self.at: list[float] = []

    def log(self, metrics: Metrics, step: int) -> None:
        self.rows.append(dict(metrics))
        self.at.append(time.perf_counter())


class TimedSave(SaveCheckpoints):
    """One checkpoint, before the last step; how long the run waited for it. It need not be done when the run is. The
    first step ends a `fit` of its own here, after which a run would save: not this one."""

    held: float | None = None

    def __call__(self, trainer: Trainer) -> None:
        before = self.spent["time/checkpoint"]
        if 1 < trainer.step <= self.every:
            super().__call__(trainer)
        if trainer.step == self.every and not self.due:
            self.held = self.spent["time/checkpoint"] - before

    def finish(self) -> None:
        """Whoever waits measures the disk."""


def body_folder(name: str, device: str, outliers: bool, folder: Path) -> Path:
    """A folder that a run can be given: a real model's own, or a random body with the embedded model's tokenizer."""
    if name not in SHAPES:
        return resolve(name)
    random_body(name, device, outliers=outliers).save_pretrained(folder)
    for file in resolve("seedling").iterdir():
        if file.name in TOKENIZER_FILES or file.suffix == ".jinja":
            shutil.copy(file, folder)
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    return folder


def parts_of(args: argparse.Namespace, folder: Path) -> RunParts:
    episodes = args.tasks * args.group * (1 + args.max_lag)  # of all batches in play
    Late.seconds = args.late
    named, objects = name_objects({
        "env": Late, "rollout.max_lag": args.max_lag,
        "model.name": str(folder), "model.device": args.device, "model.lora.rank": args.lora, "rewards": [ids],
        "model.dtype": "bfloat16" if args.device == "cuda" else "float32", "sampling.max_tokens": args.sampled,
        "rollout.tasks_per_step": args.tasks, "rollout.group_size": args.group, "rollout.max_turns": args.turns,
        "rollout.concurrency": episodes, "engine.max_requests": episodes, "engine.kv_tokens": episodes * args.context,
        "sampling.max_context": args.context, "learner.lr": 1e-6, "trainer.steps": args.steps,
    } | {key: yaml.safe_load(value) for key, _, value in (one.partition("=") for one in args.set)})  # fmt: skip
    load = arborl.training_run.build.load_policy

    def text_only(*given: Any) -> PreTrainedModel:  # before the learner takes a sharded copy of it
        model = load(*given)
        forbid(model, not_text(model.config.vocab_size, folder))
        return model

    arborl.training_run.build.load_policy = text_only
    parts = build(from_kwargs(**named), objects)
    logging.getLogger("arborl.engines").info("memory: %s", parts.plan.summary)
    return parts


async def train(parts: RunParts, counts: Counts, save: TimedSave | None) -> tuple[Log, float, tuple[int, ...]]:
    """The metrics of each step, the seconds of the first, and what had been compiled and recorded after it."""
    log = Log()
    trainer = Trainer(
        parts.config, parts.source, parts.rollout, parts.rewards, parts.algorithm, parts.learner, parts.engine,
        Trackers([]), (), save, parts.steps,
    )  # fmt: skip
    trainer.tracker = log  # type: ignore[assignment]
    began = time.perf_counter()
    parts.engine.warm_up(parts.rollout.sampling)  # type: ignore[attr-defined]
    last, trainer.num_steps = trainer.num_steps, 1
    await trainer.fit()
    first, before = time.perf_counter() - began, counts.now
    counts.work()
    trainer.num_steps = last
    await trainer.fit()
    return log, first, tuple(now - then for now, then in zip(counts.now, before, strict=True))


def measure(args: argparse.Namespace, folder: Path) -> tuple[dict[str, Any], TimedSave | None]:
    tune_cpu()
    body = body_folder(args.model, args.device, args.outliers, folder / "body")
    parts = parts_of(args, body)
    counts = Counts(parts)
    save = TimedSave(args.checkpoint, args.steps - 1, 1, {}, parts.save_tokenizer) if args.checkpoint else None
    log, first, (compiled, recorded, learned) = asyncio.run(train(parts, counts, save))
    rows, later = log.rows, log.rows[1:]

    def total(name: str) -> float:
        return sum(row[name] for row in later)

    in_run = total("engine/sampled") / total("time/rollout")
    work = counts.work()
    work = Case(work.name, args.tasks * args.group, work.prompt, work.sampled, work.turns, work.observed)
    cuda = args.device == "cuda"
    peak = peak_gib(args.device)
    texts = ChatText(body)
    settle()  # as the run had it
    alone = best(lambda seed: ours(parts.engine, texts, work, seed), work, 2, cuda)  # type: ignore[arg-type]
    gaps = [row["policy/logprob_diff"] for row in later if "policy/logprob_diff" in row]  # of steps that learned
    live = total("engine/sampled") / total("engine/steps")
    row = {
        "model": args.model, "weights": weights_of(args.model, args.outliers),
        "lora": args.lora, "steps": args.steps, "episodes": work.conversations,
        "turns": work.turns, "prompt": work.prompt, "sampled": work.sampled, "observed": work.observed,
        "run_tok_s": round(in_run, 1), "engine_tok_s": round(alone, 1), "ratio": round(in_run / alone, 3),
        "run_ms_a_sampling_step": round(1e3 * total("time/rollout") / total("engine/steps"), 2),
        "steps_an_hour": round(3600 * (len(rows) - 2) / (log.at[-1] - log.at[1])), "late": args.late,
        "max_lag": args.max_lag, "live": round(live, 1), "first_step_s": round(first, 2),
        "step_s": round(fmean(row["time/step"] for row in later), 3),
        "rollout_s": round(fmean(row["time/rollout"] for row in later), 3),
        "learn_s": round(fmean(row["time/learn"] for row in later), 3),
        "compiled_after_first": compiled if cuda else None, "recorded_after_first": recorded if cuda else None,
        "learner_compiled_after_first": learned, "peak_gib": peak, "planned": parts.plan.summary,
        "gap": round(fmean(gaps), 5) if gaps else None,
        "checkpoint_delay_s": save and save.held and round(save.held, 3),
        "saving_step_s": save and round(rows[-1]["time/step"], 3),
        "device": torch.cuda.get_device_name() if cuda else f"{platform.machine()} CPU",
        "torch": torch.__version__, "transformers": transformers.__version__, "python": platform.python_version(),
    }  # fmt: skip
    return row, save


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument(
        "--model", help=f"smollm2, seedling or a folder (real weights), {', '.join(SHAPES)} (random ones); "
        "4b on a GPU, tiny on a CPU by default",
    )  # fmt: skip
    parser.add_argument("--outliers", action=argparse.BooleanOptionalAction, default=True, help="of random weights")
    parser.add_argument("--lora", type=int, default=0, metavar="RANK", help="train adapters of this rank")
    parser.add_argument("--steps", type=int, default=4, help="at least 3")
    parser.add_argument("--tasks", type=int, default=16)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--sampled", type=int, default=48, help="tokens of a reply")
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--late", type=float, default=0.0, help="seconds that the environment takes to answer")
    parser.add_argument("--max-lag", type=int, default=0, help="rollout.max_lag: play while learning")
    parser.add_argument("--checkpoint", type=Path, metavar="FOLDER", help="write one there; 56 GB of a 4B body")
    parser.add_argument("--set", nargs="*", default=[], metavar="a.b=c", help="further settings of the run")
    parser.add_argument("--json", action="store_true", help="one JSON line, nothing else")
    args = parser.parse_args()
    if args.steps < 3:
        parser.error("--steps: the first warms up, and a checkpoint is written after the second; give at least 3")
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
        if save:  # what is still being written is not torn
            save.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
