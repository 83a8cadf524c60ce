"""One whole GRPO step of ours beside TRL's `GRPOTrainer`, on the same work, in one run.

    python benchmarks/step.py --device cpu --case single --json
    python benchmarks/step.py --device cuda --case W1 --model smollm2 --json

A step is rollout, scoring and update. Cases on a CPU, with a Llama of 5 million parameters: `single` (4 prompts x 8, 64
tokens each) and `multi-turn` (4 frozen lakes x 8, four turns of 15 tokens). On a GPU, with a random Qwen2.5-0.5B in
bfloat16 or another `--model`, real weights (`smollm2`, a folder) with prompts of text among them: `W1` (32 prompts of
512 tokens x 8, 128 sampled), `W2` (8 of 2,048 x 8, 256 sampled) and `multi-turn` (16 lakes x 8, four turns of 64).
`--lora RANK` trains adapters at all linear layers, on both sides.

Equal by construction: no token ends a reply, and in `multi-turn` none is sampled that controls anything, so both sides
sample the same number of tokens, which is checked; both play the same environment for the same number of turns;
rewards are a function of the ids; neither has a reference model. TRL runs
without vLLM and without gradient checkpointing, generates once an optimiser step, and is given several sizes of
micro-batch: its best counts. In `multi-turn` it uses its own loop over tool calls, with the environment as the tool;
every reply is a call. In bfloat16 TRL's optimiser works on the weights themselves, ours on float32 copies of them.

Each side runs in a process of its own, as it comes: what Arbor sets for its own sake is not set for TRL. Both have one
step to warm up; the best of `--repeats` counts. `first_step_s` is that first step, with what our engine compiles and
records before it; `peak_gib` the most memory a side held, of the GPU where there is one. Needs `trl` and `datasets`.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
import subprocess
import sys
from typing import Any

os.environ |= {"HF_HUB_OFFLINE": "1", "TRL_EXPERIMENTAL_SILENCE": "1", "TOKENIZERS_PARALLELISM": "false"}

import arborl  # noqa: F401  # before torch, as everyone does who starts a run

# isort: split
import datasets
import torch
import transformers as hf
import trl
from bodies import SHAPES
from step_ours import measure_ours
from step_trl import measure_trl
from step_work import CASES, Body, Case, Timing

AS_IT_COMES = {"MIMALLOC_PURGE_DELAY": "10", "GOMP_SPINCOUNT": "300000"}
"""The allocator's own setting, and for how long threads wait awake by themselves: for the side that is not Arbor's."""


def measure(side: str, case: Case, body: Body, repeats: int, micro_batch: int) -> tuple[Timing, dict[str, Any]]:
    if side == "trl":
        return measure_trl(case, body, repeats)
    return measure_ours(case, body, repeats, micro_batch)


def in_a_process(side: str, case: Case) -> tuple[Timing, dict[str, Any]]:
    """The same in a process of its own, told what this one was told."""
    command = [sys.executable, *sys.argv, "--side", side, "--case", case.name]
    environment = os.environ | (AS_IT_COMES if side == "trl" else {})
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True, text=True)
    timing, more = json.loads(done.stdout.splitlines()[-1])
    return Timing(**timing), more


def compare(case: Case, body: Body, micro_batch_tokens: int) -> dict[str, Any]:
    baseline, tried = in_a_process("trl", case)
    print(f"{case.name}: TRL {baseline.seconds:.3f} s a step, {tried}; now ours", file=sys.stderr, flush=True)
    mine, share = in_a_process("ours", case)
    bf16 = case.device == "cuda"
    five = "seedling grown to 5M" if case.turns > 1 else "random 5M Llama"
    return {
        "case": case.name, "model": five if body.name == "5m" else body.name, "weights": body.weights(case),
        "lora": body.lora, "prompts": case.prompts,
        "group": case.group, "turns": case.turns, "prompt": case.prompt, "sampled_a_turn": case.sampled,
        "ours_s": round(mine.seconds, 4), "baseline_s": round(baseline.seconds, 4),
        "ratio": round(baseline.seconds / mine.seconds, 2),
        "ours_rollout_s": round(mine.rollout, 4), "baseline_rollout_s": round(baseline.rollout, 4),
        "ours_sampled": mine.sampled, "baseline_sampled": baseline.sampled,
        "ours_read": mine.read, "baseline_read": baseline.read, **share, **tried,
        "ours_weights": f"bfloat16, float32 {'adapters' if body.lora else 'masters'}" if bf16 else "float32",
        "baseline_weights": "bfloat16" if bf16 else "float32", "micro_batch_tokens": micro_batch_tokens,
        "device": torch.cuda.get_device_name() if bf16 and body.name != "tiny" else f"{platform.machine()} CPU",
        "threads": torch.get_num_threads(), "torch": torch.__version__, "transformers": hf.__version__,
        "trl": trl.__version__, "python": platform.python_version(),
    }  # fmt: skip


def describe(row: dict[str, Any]) -> str:
    work = "{case}: {prompts} x {group} x {turns} of {prompt} + {sampled_a_turn} tokens, {model}".format_map(row)
    speed = "ours {ours_s:.3f} s a step, TRL {baseline_s:.3f} s, {ratio:.2f}x".format_map(row)
    tokens = "sampled {ours_sampled} and {baseline_sampled}, read {ours_read} and {baseline_read}".format_map(row)
    return f"{work}\n  {speed}; {tokens}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--case", choices=[case.name for case in CASES], help="without one, all of the device")
    parser.add_argument(
        "--model", help=f"smollm2 or a folder (real weights), {', '.join(SHAPES)} (random ones, on a GPU; tiny tries "
        "one out), 5m (on a CPU); on a GPU 0.5b, on a CPU 5m by default",
    )  # fmt: skip
    parser.add_argument("--outliers", action=argparse.BooleanOptionalAction, default=True, help="of random weights")
    for name in ("prompts", "group", "prompt", "sampled"):
        parser.add_argument(f"--{name}", type=int, help="instead of the case's own number, for slow models")
    parser.add_argument("--lora", type=int, default=0, metavar="RANK", help="train adapters of this rank")
    parser.add_argument("--repeats", type=int, help="3 on a CPU, 2 on a GPU")
    parser.add_argument("--micro-batch-tokens", type=int, help="ours: 4,096 on a CPU, 16,384 on a GPU")
    parser.add_argument("--tried", type=int, nargs="*", help="TRL: sequences a micro-batch; without any, several")
    parser.add_argument("--json", action="store_true", help="one JSON line a case, nothing else")
    parser.add_argument("--side", choices=["ours", "trl"], help=argparse.SUPPRESS)  # one alone
    args = parser.parse_args()
    cases = [case for case in CASES if case.device == args.device and args.case in (None, case.name)]
    if not cases:
        parser.error(f"--case {args.case} is not for --device {args.device}")
    hf.logging.set_verbosity_error()
    hf.logging.disable_progress_bar()
    datasets.disable_progress_bars()
    cuda = args.device == "cuda"
    body = Body(args.model or ("0.5b" if cuda else "5m"), args.lora, args.outliers)
    if not body.is_real and (body.name == "5m") == cuda:
        parser.error(f"--model {body.name} is not for --device {args.device}")
    for case in cases:
        if args.tried:
            case = dataclasses.replace(case, tried=tuple(args.tried))
        if body.name == "tiny":
            prompt = case.prompt if case.turns > 1 else 16  # a lake's is what it is
            case = dataclasses.replace(case, prompts=2, prompt=prompt, sampled=8, tried=tuple(args.tried or (16, 8)))
        sizes = {name: getattr(args, name) for name in ("prompts", "group", "prompt", "sampled")}
        case = dataclasses.replace(case, **{name: size for name, size in sizes.items() if size})
        repeats, tokens = args.repeats or (2 if cuda else 3), args.micro_batch_tokens or (16384 if cuda else 4096)
        if args.side:
            timing, more = measure(args.side, case, body, repeats, tokens)
            print(json.dumps([dataclasses.asdict(timing), more]))
            continue
        row = compare(case, body, tokens)
        print(json.dumps(row) if args.json else describe(row))
        sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
