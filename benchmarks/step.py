"""One complete GRPO step of Arbor, and of TRL's `GRPOTrainer` or of Arbor with vLLM, on the same work in one run.

    python benchmarks/step.py --device cpu --case single --json
    python benchmarks/step.py --device cuda --case W1 --model smollm2 --json
    python benchmarks/step.py --device cpu --model smollm2 --beside vllm --json     # after make test-vllm

A step is rollout, rewards and update. Cases on a CPU, with a Llama of 5 million parameters: `single` (4 prompts x 8
episodes, 64 tokens each) and `multi-turn` (4 FrozenLake maps x 8 episodes, four turns of 15 tokens). Cases on a GPU,
with a random Qwen2.5-0.5B in bfloat16 or another `--model`: `W1` (32 prompts of 512 tokens x 8, 128 sampled), `W2` (8
prompts of 2,048 tokens x 8, 256 sampled) and `multi-turn` (16 maps x 8, four turns of 64 tokens). Trained weights
(`smollm2`, a folder) get prompts of text. `--lora RANK` trains adapters on all linear layers in both systems.

Equal by construction: no token ends a reply, and in `multi-turn` no control token can be sampled, so that both systems
sample the same number of tokens, which is checked. Both use the same environment for the same number of turns, rewards
are a function of the token ids, and there is no reference model. TRL runs without vLLM and without gradient
checkpointing, generates once per optimizer step, and is measured with several micro-batch sizes, of which the best is
reported. In `multi-turn` it uses its own tool-call loop with the environment as the tool; every reply is a tool call.
In bfloat16 TRL's optimizer updates the weights directly, Arbor's updates float32 copies.

`--beside vllm` compares Arbor's learner with its own engine and with vLLM, in a process of `--vllm-python`. A step of
the latter includes sending the weights.

Each system runs in its own process; process settings of Arbor are not applied to TRL. Both have one warm-up step; the
best of `--repeats` is reported. `first_step_s` is the time of the warm-up step, including compilation and recording of
CUDA graphs by Arbor's engine; `peak_gib` is the peak memory, of the GPU if there is one. `--profile` adds a step of
Arbor on a GPU at the end: `rollout_profile` and `update_profile` list its kernels and the moments at which the GPU
computes nothing. Needs `trl` and `datasets`.
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

import arborl  # noqa: F401  # imported before torch, as in a training run

# isort: split
import datasets
import torch
import transformers as hf
import trl
from benchmark_models import SHAPES, VLLM_PYTHON
from step_ours import measure_ours
from step_trl import measure_trl
from step_work import CASES, Case, ModelSpec, Timing

LIBRARY_DEFAULTS = {"MIMALLOC_PURGE_DELAY": "10", "GOMP_SPINCOUNT": "300000"}
"""Library defaults of allocator purging and OpenMP spinning, which Arbor changes for its own process."""


def measure(
    side: str, case: Case, model_spec: ModelSpec, repeats: int, micro_batch: int, vllm_python: str, profiled: bool
) -> tuple[Timing, dict[str, Any]]:
    if side == "trl":
        return measure_trl(case, model_spec, repeats)
    if side == "vllm":
        return measure_ours(case, model_spec, repeats, micro_batch, vllm_python)
    return measure_ours(case, model_spec, repeats, micro_batch, profiled=profiled)


def measure_in_process(side: str, case: Case) -> tuple[Timing, dict[str, Any]]:
    """Run `measure` in a separate process with the command-line arguments of this one."""
    command = [sys.executable, *sys.argv, "--side", side, "--case", case.name]
    environment = os.environ | (LIBRARY_DEFAULTS if side == "trl" else {})
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True, text=True)
    timing, extra = json.loads(done.stdout.splitlines()[-1])
    return Timing(**timing), extra


def compare(case: Case, model_spec: ModelSpec, micro_batch_tokens: int, beside: str) -> dict[str, Any]:
    baseline, tried = measure_in_process(beside, case)
    print(f"{case.name}: {beside} {baseline.seconds:.3f} s per step, {tried}; next: Arbor", file=sys.stderr, flush=True)
    if beside == "vllm":  # the same learner: its share and memory are reported once
        tried = {"baseline_first_step_s": tried["first_step_s"]}
    arborl_timing, share = measure_in_process("ours", case)
    bf16 = case.device == "cuda"
    name_5m = "seedling grown to 5M" if case.turns > 1 else "random 5M Llama"
    return {
        "case": case.name, "baseline": beside, "model": name_5m if model_spec.name == "5m" else model_spec.name,
        "weights": model_spec.weights(case), "lora": model_spec.lora, "prompts": case.prompts,
        "group": case.group, "turns": case.turns, "prompt": case.prompt, "sampled_a_turn": case.sampled,
        "top_p": case.top_p,
        "ours_s": round(arborl_timing.seconds, 4), "baseline_s": round(baseline.seconds, 4),
        "ratio": round(baseline.seconds / arborl_timing.seconds, 2),
        "ours_rollout_s": round(arborl_timing.rollout, 4), "baseline_rollout_s": round(baseline.rollout, 4),
        "ours_sampled": arborl_timing.sampled, "baseline_sampled": baseline.sampled,
        "ours_read": arborl_timing.read, "baseline_read": baseline.read, **share, **tried,
        "ours_weights": f"bfloat16, float32 {'adapters' if model_spec.lora else 'masters'}" if bf16 else "float32",
        "baseline_weights": "as ours" if beside == "vllm" else "bfloat16" if bf16 else "float32",
        "micro_batch_tokens": micro_batch_tokens,
        "device": torch.cuda.get_device_name() if bf16 and model_spec.name != "tiny" else f"{platform.machine()} CPU",
        "threads": torch.get_num_threads(), "torch": torch.__version__, "transformers": hf.__version__,
        "trl": trl.__version__, "python": platform.python_version(),
    }  # fmt: skip


def format_row(row: dict[str, Any]) -> str:
    work = "{case}: {prompts} x {group} x {turns} of {prompt} + {sampled_a_turn} tokens, {model}".format_map(row)
    speed = "Arbor {ours_s:.3f} s per step, {baseline} {baseline_s:.3f} s, {ratio:.2f}x".format_map(row)
    tokens = "sampled {ours_sampled} and {baseline_sampled}, read {ours_read} and {baseline_read}".format_map(row)
    return f"{work}\n  {speed}; {tokens}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--case", choices=[case.name for case in CASES], help="default: all cases of the device")
    parser.add_argument(
        "--model", help=f"smollm2 or a folder (trained weights), {', '.join(SHAPES)} (random weights, GPU; tiny for "
        "quick tests), 5m (CPU); default: 0.5b on a GPU, 5m on a CPU",
    )  # fmt: skip
    parser.add_argument(
        "--outliers", action=argparse.BooleanOptionalAction, default=True, help="add outliers to random weights"
    )
    for name in ("prompts", "group", "prompt", "sampled"):
        parser.add_argument(f"--{name}", type=int, help="default: set by the case")
    parser.add_argument("--lora", type=int, default=0, metavar="RANK", help="train adapters of this rank")
    parser.add_argument(
        "--top-p", type=float, default=1.0, help="sample from the likeliest tokens; TRL's loss ignores it"
    )
    parser.add_argument("--repeats", type=int, help="default: 3 on a CPU, 2 on a GPU")
    parser.add_argument(
        "--micro-batch-tokens",
        type=int,
        help="of Arbor; default: 4,096 on a CPU, 65,536 on a GPU, as a run chooses for small models",
    )
    parser.add_argument(
        "--tried", type=int, nargs="*", help="sequences per micro-batch to try with TRL; default: set by the case"
    )
    parser.add_argument("--beside", choices=["trl", "vllm"], default="trl", help="what to compare with")
    parser.add_argument("--vllm-python", default=str(VLLM_PYTHON), help="interpreter that has vLLM")
    parser.add_argument("--profile", action="store_true", help="add a step of Arbor whose GPU kernels are listed")
    parser.add_argument("--json", action="store_true", help="print only one JSON line per case")
    parser.add_argument("--side", choices=["ours", "trl", "vllm"], help=argparse.SUPPRESS)  # measures one system
    args = parser.parse_args()
    if args.profile and args.device != "cuda":
        parser.error("--profile needs --device cuda")
    cases = [case for case in CASES if case.device == args.device and args.case in (None, case.name)]
    if not cases:
        parser.error(f"--case {args.case} is not available with --device {args.device}")
    hf.logging.set_verbosity_error()
    hf.logging.disable_progress_bar()
    datasets.disable_progress_bars()
    cuda = args.device == "cuda"
    model_spec = ModelSpec(args.model or ("0.5b" if cuda else "5m"), args.lora, args.outliers)
    if not model_spec.is_real and (model_spec.name == "5m") == cuda:
        parser.error(f"--model {model_spec.name} is not available with --device {args.device}")
    for case in cases:
        if args.tried:
            case = dataclasses.replace(case, tried=tuple(args.tried))
        if model_spec.name == "tiny":
            prompt = case.prompt if case.turns > 1 else 16  # the prompt of a map has a fixed length
            case = dataclasses.replace(case, prompts=2, prompt=prompt, sampled=8, tried=tuple(args.tried or (16, 8)))
        sizes = {name: getattr(args, name) for name in ("prompts", "group", "prompt", "sampled")}
        case = dataclasses.replace(case, **{name: size for name, size in sizes.items() if size})
        tried = sorted({min(size, case.episodes) for size in case.tried}, reverse=True)
        case = dataclasses.replace(case, tried=tuple(tried), top_p=args.top_p)
        repeats, tokens = args.repeats or (2 if cuda else 3), args.micro_batch_tokens or (65536 if cuda else 4096)
        if args.side:
            timing, extra = measure(args.side, case, model_spec, repeats, tokens, args.vllm_python, args.profile)
            print(json.dumps([dataclasses.asdict(timing), extra]))
            continue
        row = compare(case, model_spec, tokens, args.beside)
        print(json.dumps(row) if args.json else format_row(row))
        sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
