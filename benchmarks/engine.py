"""Throughput of the local engine, and of transformers' `generate` or vLLM on the same requests, measured in one run.

    python benchmarks/engine.py --device cpu --case multi-turn --json
    python benchmarks/engine.py --device cuda --case single --model smollm2 --json
    python benchmarks/engine.py --device cuda --case single --model 7b --lora 16 --without-baseline --json
    python benchmarks/engine.py --device cpu --model smollm2 --beside vllm --json     # after make test-vllm

Cases: `single` (one prompt and one completion per conversation; several batch sizes), `multi-turn` (every turn appends
an observation to the conversation), `ragged` (the same, but the length of each reply and observation is drawn
uniformly between 0.25 and 1.75 times the mean, so that requests finish at different times), `group` (eight completions
for each of a few long prompts). Both systems sample the same number of tokens at temperature 1 from the same weights;
where lengths differ, `generate` pads on the left and decodes until the longest reply is complete. Throughput counts
only requested tokens; the best of `--repeats` runs is reported. Trained weights (`smollm2`, `seedling`, a folder) get
English text in their chat template; random weights get random token ids and have outliers like trained ones
(`benchmark_models.add_outliers`).

`--beside vllm` measures vLLM instead of `generate`, in a process of the interpreter `--vllm-python`, with prefix
caching and log-probabilities of the sampled tokens, which training needs; on a CPU with all cores, and without torch's
compilation, which takes minutes. `--vllm-args` are further arguments of its `AsyncEngineArgs`. All conversations are
concurrent in both systems, so here no request waits for the longest one.

`--constrained N` also measures the same requests beside N requests that a JSON schema constrains at all times:
`constrained_tok_s` counts the unconstrained tokens only, and `constrained_ratio` compares it with the throughput
without them; `beside_ratio` compares with N unconstrained requests beside, which take the same share of each step.

`--lora RANK` also measures the model with adapters on all linear layers: `lora_ratio` is the throughput with adapters
divided by the throughput without. `floor_share` is the lower bound of the run time that follows from the memory
bandwidth of the device, measured in the same run, divided by the measured time.
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import dataclasses
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cache
from itertools import count, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from benchmark_models import SHAPES, VLLM_PYTHON, add_random_adapters, freeze_garbage_collector, load, weights_kind
from gpu_profile import GpuProfile
from texts import Texts, make_texts
from transformers import GenerationConfig, PreTrainedModel

from arborl.chat import Renderer
from arborl.engines.local import LocalEngine
from arborl.engines.local.kv_cache import token_bytes
from arborl.models.model_files import resolve
from arborl.models.model_loading import tune_cpu
from arborl.tokens import Tokens
from arborl.types import Sampling

VllmWork = dict[str, Any]
"""`args` of vLLM's engine, and `runs`: prompts, numbers of sampled tokens, and texts between replies."""
SCHEMA = '{"type":"object","required":["notes"],"properties":{"notes":{"type":"array","items":{"type":"string"}}}}'


@dataclass(frozen=True)
class Case:
    """Token counts of a workload: a prompt, then in each turn a reply (`sampled`) and an observation (`observed`)."""

    name: str
    conversations: int
    prompt: int
    sampled: int
    turns: int = 1
    observed: int = 0
    group_size: int = 1
    """Number of conversations with the same first prompt."""
    spread: float = 0.0
    """Lengths of replies and observations are uniform in mean × (1 ± spread)."""

    def lengths(self, seed: int) -> tuple[np.ndarray, np.ndarray]:
        """Sampled and observed tokens, each `[conversations, turns]`."""
        rng = np.random.default_rng((seed, 1))

        def draw_lengths(mean: int) -> np.ndarray:
            low, high = round(mean * (1 - self.spread)), round(mean * (1 + self.spread))
            return rng.integers(low, high + 1, (self.conversations, self.turns))

        return draw_lengths(self.sampled), draw_lengths(self.observed)

    def tokens(self, seed: int) -> int:
        return int(self.lengths(seed)[0].sum())

    @property
    def length(self) -> int:
        sampled, observed = (round(mean * (1 + self.spread)) for mean in (self.sampled, self.observed))
        return self.prompt + self.turns * sampled + (self.turns - 1) * observed


CPU_CASES = [
    Case("single", 16, 128, 64),
    Case("single", 64, 128, 64),
    Case("multi-turn", 32, 64, 8, turns=8, observed=32),
    Case("ragged", 32, 64, 8, turns=8, observed=32, spread=0.75),
    Case("group", 32, 512, 16, group_size=8),
]
CUDA_CASES = [
    Case("single", 64, 128, 128),
    Case("single", 256, 128, 128),
    Case("single", 1024, 128, 128),
    Case("multi-turn", 256, 64, 64, turns=8, observed=64),
    Case("ragged", 256, 64, 64, turns=8, observed=64, spread=0.75),
    Case("group", 64, 2048, 128, group_size=8),
]


def first_prompts(case: Case, texts: Texts, rng: np.random.Generator) -> list[list[int]]:
    prompts = [texts.prompt(case.prompt, rng) for _ in range(case.conversations // case.group_size)]
    return [list(prompt) for prompt in prompts for _ in range(case.group_size)]


def run_engine(
    engine: LocalEngine,
    texts: Texts,
    case: Case,
    seed: int,
    start_others: Callable[[], Awaitable[list[asyncio.Task[None]]]] | None = None,
) -> list[float]:
    """Run all conversations concurrently, from an empty KV cache; each sends its next request when a reply is complete.
    Returns the seconds of each turn, measured at the last conversation to finish it."""
    finished = [0.0] * case.turns
    began = time.perf_counter()
    rng = np.random.default_rng(seed)
    sampled, observed = case.lengths(seed)

    async def converse(number: int, context: Tokens) -> None:
        observation_rng = np.random.default_rng((seed, number))
        for turn in range(case.turns):
            sampling = Sampling(int(sampled[number, turn]), seed=(seed * 1000 + number) * 100 + turn)
            output = await engine.generate(context, sampling, session=str(number))
            finished[turn] = time.perf_counter() - began
            context += output.tokens
            context += texts.observation(int(observed[number, turn]), observation_rng)

    async def run_all() -> None:
        await engine.load({}, seed)
        others = [] if start_others is None else await start_others()
        prompts = map(Tokens, first_prompts(case, texts, rng))  # as the recorder of an episode gives them
        await asyncio.gather(*(converse(i, c) for i, c in enumerate(prompts)))
        for other in others:
            other.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    asyncio.run(run_all())
    return [after - before for before, after in pairwise([0.0, *finished])]


def run_beside(engine: LocalEngine, texts: Texts, case: Case, seed: int, samplings: Sequence[Sampling]) -> list[float]:
    """As `run_engine`, while requests with these parameters run one after the other, each beside all conversations."""
    prompt = texts.prompt(case.prompt, np.random.default_rng(seed))

    async def repeat(number: int, sampling: Sampling) -> None:
        for again in count():
            one = dataclasses.replace(sampling, seed=again, max_tokens=case.sampled)
            await engine.generate(prompt, one, session=f"beside {number}")

    async def start() -> list[asyncio.Task[None]]:
        return [asyncio.create_task(repeat(number, sampling)) for number, sampling in enumerate(samplings)]

    return run_engine(engine, texts, case, seed, start)


def run_generate(model: PreTrainedModel, texts: Texts, case: Case, seed: int) -> None:
    """`generate` on one batch until the longest reply is complete; every turn prefills the whole conversation again."""
    rng = np.random.default_rng(seed)
    contexts = first_prompts(case, texts, rng)
    for sampled, observed in zip(*(x.T for x in case.lengths(seed)), strict=True):
        width = max(map(len, contexts))
        ids = torch.tensor([[0] * (width - len(c)) + c for c in contexts], device=model.device)
        attention_mask = torch.tensor([[0] * (width - len(c)) + [1] * len(c) for c in contexts], device=model.device)
        longest = int(sampled.max())
        output = model.generate(
            ids, attention_mask=attention_mask, do_sample=True, temperature=1.0, top_k=0, top_p=1.0,
            max_new_tokens=longest, min_new_tokens=longest, pad_token_id=0,
        )[:, width:].tolist()  # fmt: skip
        for context, reply, num_sampled, num_observed in zip(contexts, output, sampled, observed, strict=True):
            context += [*reply[:num_sampled], *texts.observation(int(num_observed), rng)]


def run_continuous_batching(model: PreTrainedModel, texts: Texts, case: Case, seed: int) -> None:
    """Continuous batching of transformers on the same requests."""
    model.set_attn_implementation("paged|sdpa")
    rng = np.random.default_rng(seed)
    contexts = first_prompts(case, texts, rng)
    settings = GenerationConfig(
        do_sample=True, temperature=1.0, top_k=0, max_new_tokens=case.sampled, eos_token_id=-1, pad_token_id=0
    )
    if case.spread:
        raise ValueError("continuous batching is compared on equal lengths only")
    for _ in range(case.turns):
        output = model.generate_batch(inputs=contexts, generation_config=settings, progress_bar=False)
        answers = [output[key].generated_tokens for key in sorted(output, key=lambda k: int(str(k).split("_")[-1]))]
        contexts = [[*c, *a, *texts.observation(case.observed, rng)] for c, a in zip(contexts, answers, strict=True)]


@cache
def bandwidth(device: str) -> float:
    """Memory bandwidth of the device in bytes per second, measured by summing a large vector."""
    vector = torch.ones(2**28 if device == "cuda" else 2**25, device=device)
    seconds = []
    for _ in range(10):
        if device == "cuda":
            torch.cuda.synchronize()
        began = time.perf_counter()
        vector.sum().item()
        seconds.append(time.perf_counter() - began)
    return vector.nbytes / min(seconds)


def floor_seconds(model: PreTrainedModel, case: Case) -> float:
    """Lower bound of the decode time on this device: reading all weights and the KV cache of every conversation once
    per decode step. Prefill and embedding lookups are not counted."""
    embeddings, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    weights = sum(p.nbytes for p in model.parameters()) - (0 if embeddings is head else embeddings.nbytes)
    steps = case.turns * case.sampled
    mean_context = case.prompt + (case.turns * case.sampled + (case.turns - 1) * case.observed) / 2
    return steps * (weights + case.conversations * mean_context * token_bytes(model)) / bandwidth(model.device.type)


# ------------------------------------------------------------------------------------------------ vLLM


def vllm_work(model: PreTrainedModel, texts: Texts, case: Case, args: argparse.Namespace, folder: Path) -> VllmWork:
    """The requests of all runs, the first to warm up; those of `run_engine`."""
    runs = []
    for seed in range(args.repeats + 1):
        prompts = first_prompts(case, texts, np.random.default_rng(seed))
        sampled, observed = case.lengths(seed)
        rngs = [np.random.default_rng((seed, number)) for number in range(case.conversations)]
        texts_between = [
            [texts.observation(int(length), rng) for length in lengths]
            for lengths, rng in zip(observed, rngs, strict=True)
        ]
        runs.append({"prompts": prompts, "sampled": sampled.tolist(), "observed": texts_between})
    engine_args = {
        "model": str(folder), "skip_tokenizer_init": True, "dtype": str(model.dtype).removeprefix("torch."),
        "max_model_len": case.length + 1, "max_num_seqs": case.conversations, "enable_prefix_caching": True,
        "kv_cache_memory_bytes": 2 * case.conversations * (case.length + 64) * token_bytes(model),
        "generation_config": "vllm", "disable_log_stats": True, "enforce_eager": args.device == "cpu",
    }  # fmt: skip
    return {"args": engine_args | json.loads(args.vllm_args), "runs": runs}


def vllm_speed(model: PreTrainedModel, texts: Texts, case: Case, args: argparse.Namespace) -> tuple[str, float]:
    """Version and tokens per second of vLLM."""
    with tempfile.TemporaryDirectory() as scratch:
        if args.model in SHAPES:
            model.save_pretrained(scratch)
        folder = Path(scratch) if args.model in SHAPES else resolve(args.model)
        work, (reader, writer) = vllm_work(model, texts, case, args, folder), os.pipe()
        with os.fdopen(reader) as result:
            command = [args.vllm_python, str(Path(__file__).with_name("engine_vllm.py")), str(writer)]
            cores = ",".join(map(str, sorted(os.sched_getaffinity(0))))  # by default vLLM reserves one of them
            process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, pass_fds=[writer], text=True,
                env={"VLLM_CPU_OMP_THREADS_BIND": cores, **os.environ},
            )  # fmt: skip
            os.close(writer)
            assert process.stdin is not None
            with process.stdin:
                json.dump(work, process.stdin)
            found = result.read()
        if process.wait() or not found:
            sys.exit(f"vLLM failed with exit code {process.returncode}; its messages are above")
    measured = json.loads(found)
    speeds = [case.tokens(seed) / seconds for seed, seconds in enumerate(measured["seconds"]) if seed]
    return f"vllm {measured['vllm']}", max(speeds)


# ------------------------------------------------------------------------------------------------ one case


def best_speed(run: Callable[[int], Any], case: Case, repeats: int, cuda: bool) -> float:
    """Tokens per second of the fastest of `repeats` runs, after one warm-up run."""
    run(0)
    speeds = []
    for repeat in range(1, repeats + 1):
        began = time.perf_counter()
        run(repeat)
        if cuda:
            torch.cuda.synchronize()
        speeds.append(case.tokens(repeat) / (time.perf_counter() - began))
    return max(speeds)


def engine_speed(
    model: PreTrainedModel, texts: Texts, case: Case, repeats: int, profile: AbstractContextManager[Any] | None = None
) -> tuple[float, list[float]]:
    """Tokens per second of the local engine, and the seconds of each turn in one further run; with `profile` another
    run inside it."""
    tune_cpu()
    engine = LocalEngine(model, case.length + 1, case.conversations, case.conversations * (case.length + 64))
    speed = best_speed(lambda seed: run_engine(engine, texts, case, seed), case, repeats, model.device.type == "cuda")
    if profile is not None:
        with profile:
            run_engine(engine, texts, case, 98)
    return speed, run_engine(engine, texts, case, 99) if case.turns > 1 else []


def speed_beside(model: PreTrainedModel, texts: Texts, case: Case, args: argparse.Namespace, schema: str) -> float:
    """Tokens per second of the conversations beside `args.constrained` further requests, with or without a schema."""
    renderer = Renderer.from_folder(resolve(args.model))
    more = case.conversations + args.constrained
    engine = LocalEngine(model, case.length + 1, more, more * (case.length + 64), tokenizer=renderer.tokenizer)
    samplings = [Sampling(stop=renderer.stop if schema else (), schema=schema)] * args.constrained
    cuda = model.device.type == "cuda"
    return best_speed(lambda seed: run_beside(engine, texts, case, seed, samplings), case, args.repeats, cuda)


def generate_speed(model: PreTrainedModel, texts: Texts, case: Case, repeats: int) -> float:
    """Tokens per second of transformers' `generate`."""
    with torch.inference_mode():
        model.set_attn_implementation("sdpa")
        torch.backends.mkldnn.enabled = True  # torch's default; `tune_cpu` turns it off on Arm
        return best_speed(
            lambda seed: run_generate(model, texts, case, seed), case, repeats, model.device.type == "cuda"
        )


def measure(model: PreTrainedModel, adapted: PreTrainedModel | None, case: Case, args: argparse.Namespace) -> dict:
    """Measure one case; returns the result row."""
    texts = make_texts(args.model, model.config.vocab_size)
    baseline, baseline_name = None, "generate"
    if args.beside == "vllm":
        baseline_name, baseline = vllm_speed(model, texts, case, args)
    elif not args.without_baseline:
        baseline = generate_speed(model, texts, case, args.repeats)
    profile = GpuProfile() if args.profile else None
    speed, turns = engine_speed(model, texts, case, args.repeats, profile)
    seconds = case.conversations * case.turns * case.sampled / speed
    cuda = args.device == "cuda"
    row = {
        "case": case.name, "model": args.model, "weights": weights_kind(args.model, args.outliers),
        "dtype": str(model.dtype).removeprefix("torch."), "conversations": case.conversations, "turns": case.turns,
        "prompt": case.prompt, "sampled": case.sampled, "observed": case.observed, "ours_tok_s": round(speed, 1),
        "baseline": baseline and baseline_name, "baseline_tok_s": baseline and round(baseline, 1),
        "ratio": baseline and round(speed / baseline, 2),
        "floor_share": round(floor_seconds(model, case) / seconds, 3),
        "device": torch.cuda.get_device_name() if cuda else f"{platform.machine()} CPU",
        "threads": torch.get_num_threads(), "torch": torch.__version__, "transformers": transformers.__version__,
    }  # fmt: skip
    if profile is not None:
        row["profile"] = profile.row
    if turns:
        row["turn_seconds"] = [round(turn, 4) for turn in turns]
    if adapted is not None:
        adapter_speed, _ = engine_speed(adapted, texts, case, args.repeats)
        row |= {"lora": args.lora, "lora_tok_s": round(adapter_speed, 1), "lora_ratio": round(adapter_speed / speed, 3)}
    if args.constrained:
        beside, plain = (speed_beside(model, texts, case, args, schema) for schema in (SCHEMA, ""))
        row |= {"constrained": args.constrained, "constrained_tok_s": round(beside, 1),
                "constrained_ratio": round(beside / speed, 3), "beside_ratio": round(beside / plain, 3)}  # fmt: skip
    if args.continuous and not case.spread and case.tokens(0) < 40_000:
        row["continuous_tok_s"] = round(
            best_speed(lambda seed: run_continuous_batching(model, texts, case, seed), case, 1, cuda)
        )
    return row


def format_row(row: dict[str, Any]) -> str:
    work = "{case}: {conversations} x {turns} of {prompt} + {sampled} tokens, {model}".format_map(row)
    baseline = "" if row["ratio"] is None else ", {baseline} {baseline_tok_s:,.0f}, {ratio:.2f}x".format_map(row)
    lora = ", with adapters {lora_tok_s:,.0f}, {lora_ratio:.2f} of it".format_map(row) if "lora" in row else ""
    share = f"{row['floor_share']:.0%} of the bound by memory bandwidth"
    return f"{work}\n  arborl {row['ours_tok_s']:,.0f} tok/s{baseline}{lora}; {share}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--case", choices=["single", "multi-turn", "ragged", "group", "all"], default="all")
    parser.add_argument(
        "--model", help=f"smollm2, seedling or a folder (trained weights), {', '.join(SHAPES)} (random weights)"
    )
    parser.add_argument(
        "--dtype", choices=["bfloat16", "float16", "float32"], help="default: bfloat16 on a GPU, float32 on a CPU"
    )
    parser.add_argument(
        "--outliers", action=argparse.BooleanOptionalAction, default=True, help="add outliers to random weights"
    )
    parser.add_argument("--prompt", type=int, help="tokens per prompt; default: set by the case")
    parser.add_argument("--sampled", type=int, help="tokens per reply; default: set by the case")
    parser.add_argument("--lora", type=int, default=0, metavar="RANK", help="also measure with adapters of this rank")
    parser.add_argument(
        "--constrained", type=int, default=0, metavar="N", help="also measure beside N requests with a JSON schema"
    )
    parser.add_argument("--conversations", type=int, help="number of conversations; default: set by the case")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--continuous", action="store_true", help="also measure continuous batching of transformers")
    parser.add_argument("--without-baseline", action="store_true", help="do not measure generate")
    parser.add_argument("--beside", choices=["generate", "vllm"], default="generate", help="what to compare with")
    parser.add_argument("--vllm-python", default=str(VLLM_PYTHON), help="interpreter that has vLLM")
    parser.add_argument("--vllm-args", default="{}", metavar="JSON", help="further arguments of vLLM's AsyncEngineArgs")
    parser.add_argument("--profile", action="store_true", help="add a run whose GPU kernels are listed in `profile`")
    parser.add_argument("--json", action="store_true", help="print only one JSON line per case")
    args = parser.parse_args()
    if args.profile and args.device != "cuda":
        parser.error("--profile needs --device cuda")
    args.model = args.model or ("seedling" if args.device == "cpu" else "0.5b")
    transformers.logging.set_verbosity_error()
    model = load(args.model, args.device, args.dtype and getattr(torch, args.dtype), args.outliers)
    freeze_garbage_collector()
    adapted = add_random_adapters(copy.deepcopy(model), args.lora) if args.lora else None
    for case in CUDA_CASES if args.device == "cuda" else CPU_CASES:
        if args.case not in (case.name, "all"):
            continue
        conversations = args.conversations or case.conversations
        case = dataclasses.replace(
            case, conversations=conversations, group_size=min(case.group_size, conversations),
            prompt=args.prompt or case.prompt, sampled=args.sampled or case.sampled,
        )  # fmt: skip
        row = measure(model, adapted, case, args)
        print(json.dumps(row) if args.json else format_row(row))
        sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
