"""The local engine beside transformers' `generate`, on the same work, in one run.

    python benchmarks/engine.py --device cpu --case multi-turn --json

Cases: `single` (one prompt, one completion each; several batch sizes), `multi-turn` (every turn adds an observation to
a growing conversation), `group` (eight attempts at each of a few long prompts). Both sides sample the same number of
tokens at temperature 1 from the same weights. Tokens a second count sampled tokens only; the best of `--repeats` runs
counts.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import gc
import json
import platform
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
import torch
import transformers
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from arborl.engines.cache import token_bytes
from arborl.engines.local import LocalEngine
from arborl.models.load import resolve, tune_cpu
from arborl.types import Sampling

QWEN = {
    "vocab_size": 151936, "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24,
    "num_attention_heads": 14, "num_key_value_heads": 2, "max_position_embeddings": 4096, "tie_word_embeddings": True,
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """`conversations` of `turns`: read `prompt` tokens, sample `sampled`; then read `observed` and sample again."""

    name: str
    conversations: int
    prompt: int
    sampled: int
    turns: int = 1
    observed: int = 0
    siblings: int = 1
    """Conversations that begin with the same prompt."""

    @property
    def tokens(self) -> int:
        return self.conversations * self.sampled * self.turns

    @property
    def length(self) -> int:
        return self.prompt + self.turns * self.sampled + (self.turns - 1) * self.observed


CPU = [
    Case("single", 16, 128, 64),
    Case("single", 64, 128, 64),
    Case("multi-turn", 32, 64, 8, turns=8, observed=32),
    Case("group", 32, 512, 16, siblings=8),
]
CUDA = [
    Case("single", 64, 128, 128),
    Case("single", 256, 128, 128),
    Case("single", 1024, 128, 128),
    Case("multi-turn", 256, 64, 64, turns=8, observed=64),
    Case("group", 64, 2048, 128, siblings=8),
]


def openings(case: Case, vocabulary: int, chance: np.random.Generator) -> list[list[int]]:
    prompts = [chance.integers(0, vocabulary, case.prompt).tolist() for _ in range(case.conversations // case.siblings)]
    return [list(prompt) for prompt in prompts for _ in range(case.siblings)]


def ours(engine: LocalEngine, case: Case, seed: int) -> list[float]:
    """All conversations at once, each asking for its next turn as soon as it has its answer; nothing cached before.
    Seconds until the last conversation has finished each turn."""
    finished = [0.0] * case.turns
    began = time.perf_counter()
    vocabulary = engine.model.config.vocab_size
    chance = np.random.default_rng(seed)

    async def converse(number: int, context: list[int]) -> None:
        own = np.random.default_rng((seed, number))
        for turn in range(case.turns):
            sampling = Sampling(case.sampled, seed=(seed * 1000 + number) * 100 + turn)
            done = await engine.generate(context, sampling, session=str(number))
            finished[turn] = time.perf_counter() - began
            context += [*done.tokens, *own.integers(0, vocabulary, case.observed).tolist()]

    async def everyone() -> None:
        await engine.load({}, seed)
        await asyncio.gather(*(converse(i, c) for i, c in enumerate(openings(case, vocabulary, chance))))

    asyncio.run(everyone())
    return [after - before for before, after in pairwise([0.0, *finished])]


def theirs(model: PreTrainedModel, case: Case, seed: int) -> None:
    """`generate` on one batch; every turn reads the whole conversation again. Equal lengths, so nothing is padded."""
    vocabulary = model.config.vocab_size
    chance = np.random.default_rng(seed)
    context = torch.tensor(openings(case, vocabulary, chance), device=model.device)
    for turn in range(case.turns):
        context = model.generate(
            context, attention_mask=torch.ones_like(context), do_sample=True, temperature=1.0, top_k=0, top_p=1.0,
            max_new_tokens=case.sampled, min_new_tokens=case.sampled, pad_token_id=0,
        )  # fmt: skip
        if turn < case.turns - 1:
            new = torch.tensor(chance.integers(0, vocabulary, (len(context), case.observed)), device=model.device)
            context = torch.cat([context, new], dim=1)


def continuous(model: PreTrainedModel, case: Case, seed: int) -> None:
    """transformers' own continuous batching, on the same work."""
    model.set_attn_implementation("paged|sdpa")
    vocabulary = model.config.vocab_size
    chance = np.random.default_rng(seed)
    contexts = openings(case, vocabulary, chance)
    settings = GenerationConfig(
        do_sample=True, temperature=1.0, top_k=0, max_new_tokens=case.sampled, eos_token_id=-1, pad_token_id=0
    )
    for _ in range(case.turns):
        done = model.generate_batch(inputs=contexts, generation_config=settings, progress_bar=False)
        answers = [done[key].generated_tokens for key in sorted(done, key=lambda k: int(str(k).split("_")[-1]))]
        contexts = [
            [*c, *a, *chance.integers(0, vocabulary, case.observed).tolist()]
            for c, a in zip(contexts, answers, strict=True)
        ]


@cache
def bandwidth(device: str) -> float:
    """Bytes a second that this device reads, measured by summing a large vector."""
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
    """Time to read the weights once a sampled token, and every conversation's keys and values: what decoding cannot
    beat on this device. Prompts are taken to cost nothing."""
    weights = sum(p.nbytes for p in model.parameters())
    steps = case.turns * case.sampled
    middle = (case.prompt + case.length) / 2
    return steps * (weights + case.conversations * middle * token_bytes(model)) / bandwidth(model.device.type)


def best(run: Callable[[int], Any], repeats: int, cuda: bool) -> float:
    """Seconds of the fastest of `repeats` runs, after one that does not count."""
    run(0)
    seconds = []
    for repeat in range(repeats):
        began = time.perf_counter()
        run(repeat + 1)
        if cuda:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    return min(seconds)


def load(name: str, device: str) -> PreTrainedModel:
    if name == "qwen":
        torch.manual_seed(0)
        model = Qwen2ForCausalLM(Qwen2Config(**QWEN)).to(device, torch.bfloat16 if device == "cuda" else torch.float32)
    else:
        dtype = torch.bfloat16 if device == "cuda" else torch.float32
        model = AutoModelForCausalLM.from_pretrained(resolve(name), dtype=dtype).to(device)
    model.generation_config.eos_token_id = None
    gc.collect()
    gc.freeze()  # as a run does: the library's objects are not looked through again and again, on either side
    return model.eval()


def describe(row: dict[str, Any]) -> str:
    work = "{case}: {conversations} x {turns} of {prompt} + {sampled} tokens".format_map(row)
    speed = "ours {ours_tok_s:,.0f} tok/s, generate {baseline_tok_s:,.0f}, {ratio:.2f}x".format_map(row)
    return f"{work}\n  {speed}; {row['floor_share']:.0%} of what the memory's bandwidth allows"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--case", choices=["single", "multi-turn", "group", "all"], default="all")
    parser.add_argument("--model", help="seedling, smollm2, qwen (random Qwen2.5-0.5B) or a folder")
    parser.add_argument("--conversations", type=int, help="instead of the case's own number, for slow models")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--continuous", action="store_true", help="also run transformers' continuous batching")
    parser.add_argument("--json", action="store_true", help="one JSON line a case, nothing else")
    args = parser.parse_args()
    name = args.model or ("seedling" if args.device == "cpu" else "qwen")
    transformers.logging.set_verbosity_error()
    model = load(name, args.device)
    hardware = torch.cuda.get_device_name() if args.device == "cuda" else f"{platform.machine()} CPU"
    cuda = args.device == "cuda"
    for case in CUDA if cuda else CPU:
        if args.case not in (case.name, "all"):
            continue
        case = dataclasses.replace(case, conversations=args.conversations or case.conversations)
        with torch.inference_mode():
            model.set_attn_implementation("sdpa")
            torch.backends.mkldnn.enabled = True  # as torch comes; ours turns it off on Arm
            baseline = case.tokens / best(lambda seed, c=case: theirs(model, c, seed), args.repeats, cuda)
        tune_cpu()
        engine = LocalEngine(model, case.length + 1, case.conversations, case.conversations * (case.length + 64))
        seconds = best(lambda seed, c=case, e=engine: ours(e, c, seed), args.repeats, cuda)
        mine = case.tokens / seconds
        row = {
            "case": case.name, "model": name, "conversations": case.conversations, "turns": case.turns,
            "prompt": case.prompt, "sampled": case.sampled, "observed": case.observed, "ours_tok_s": round(mine, 1),
            "baseline_tok_s": round(baseline, 1), "ratio": round(mine / baseline, 2),
            "floor_share": round(floor_seconds(model, case) / seconds, 3), "device": hardware,
            "threads": torch.get_num_threads(), "torch": torch.__version__, "transformers": transformers.__version__,
        }  # fmt: skip
        if case.turns > 1:
            row["turn_seconds"] = [round(turn, 4) for turn in ours(engine, case, 99)]
        if args.continuous and case.tokens < 40_000:
            row["continuous_tok_s"] = round(
                case.tokens / best(lambda seed, c=case: continuous(model, c, seed), 1, cuda)
            )
        print(json.dumps(row) if args.json else describe(row))
        sys.stdout.flush()
        del engine
    return 0


if __name__ == "__main__":
    sys.exit(main())
