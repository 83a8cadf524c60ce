"""The local engine beside transformers' `generate`, on the same work, in one run.

    python benchmarks/engine.py --device cpu --case multi-turn --json
    python benchmarks/engine.py --device cuda --case single --model smollm2 --json
    python benchmarks/engine.py --device cuda --case single --model 7b --lora 16 --without-baseline --json

Cases: `single` (one prompt, one completion each; several batch sizes), `multi-turn` (every turn adds an observation to
a growing conversation), `ragged` (the same, but each reply and each observation has a length of its own, uniform
between a quarter and seven quarters of the mean: nobody is in step), `group` (eight attempts at each of a few long
prompts). Both sides sample the same number of tokens at temperature 1 from the same weights; where lengths differ,
`generate` pads on the left and runs until the longest reply is done. Tokens a second count sampled tokens that were
asked for; the best of `--repeats` runs counts. Real weights (`smollm2`, `seedling`, a folder) read English text in
their chat template; shapes read random ids, with weights that have outliers as real ones do (`bodies.add_outliers`).

`--lora RANK` measures the same model with adapters at all linear layers beside itself: `lora_ratio` is its share of the
speed without. `floor_share` is the share of what this device's bandwidth, measured in the same run, allows this model.
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import dataclasses
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
from bodies import SHAPES, give_adapters, load, settle, weights_of
from texts import Texts, texts_of
from transformers import GenerationConfig, PreTrainedModel

from arborl.engines.local import LocalEngine
from arborl.engines.local.kv_cache import token_bytes
from arborl.models.model_loading import tune_cpu
from arborl.types import Sampling


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
    spread: float = 0.0
    """Lengths of replies and observations are uniform in their mean ± this share of it."""

    def lengths(self, seed: int) -> tuple[np.ndarray, np.ndarray]:
        """Sampled and observed tokens, each `[conversations, turns]`."""
        chance = np.random.default_rng((seed, 1))

        def some(mean: int) -> np.ndarray:
            low, high = round(mean * (1 - self.spread)), round(mean * (1 + self.spread))
            return chance.integers(low, high + 1, (self.conversations, self.turns))

        return some(self.sampled), some(self.observed)

    def tokens(self, seed: int) -> int:
        return int(self.lengths(seed)[0].sum())

    @property
    def length(self) -> int:
        sampled, observed = (round(mean * (1 + self.spread)) for mean in (self.sampled, self.observed))
        return self.prompt + self.turns * sampled + (self.turns - 1) * observed


CPU = [
    Case("single", 16, 128, 64),
    Case("single", 64, 128, 64),
    Case("multi-turn", 32, 64, 8, turns=8, observed=32),
    Case("ragged", 32, 64, 8, turns=8, observed=32, spread=0.75),
    Case("group", 32, 512, 16, siblings=8),
]
CUDA = [
    Case("single", 64, 128, 128),
    Case("single", 256, 128, 128),
    Case("single", 1024, 128, 128),
    Case("multi-turn", 256, 64, 64, turns=8, observed=64),
    Case("ragged", 256, 64, 64, turns=8, observed=64, spread=0.75),
    Case("group", 64, 2048, 128, siblings=8),
]


def openings(case: Case, texts: Texts, chance: np.random.Generator) -> list[list[int]]:
    prompts = [texts.prompt(case.prompt, chance) for _ in range(case.conversations // case.siblings)]
    return [list(prompt) for prompt in prompts for _ in range(case.siblings)]


def ours(engine: LocalEngine, texts: Texts, case: Case, seed: int) -> list[float]:
    """All conversations at once, each asking for its next turn as soon as it has its answer; nothing cached before.
    Seconds until the last conversation has finished each turn."""
    finished = [0.0] * case.turns
    began = time.perf_counter()
    chance = np.random.default_rng(seed)
    sampled, observed = case.lengths(seed)

    async def converse(number: int, context: list[int]) -> None:
        own = np.random.default_rng((seed, number))
        for turn in range(case.turns):
            sampling = Sampling(int(sampled[number, turn]), seed=(seed * 1000 + number) * 100 + turn)
            done = await engine.generate(context, sampling, session=str(number))
            finished[turn] = time.perf_counter() - began
            context += [*done.tokens, *texts.observation(int(observed[number, turn]), own)]

    async def everyone() -> None:
        await engine.load({}, seed)
        await asyncio.gather(*(converse(i, c) for i, c in enumerate(openings(case, texts, chance))))

    asyncio.run(everyone())
    return [after - before for before, after in pairwise([0.0, *finished])]


def theirs(model: PreTrainedModel, texts: Texts, case: Case, seed: int) -> None:
    """`generate` on one batch, until the longest reply is done; every turn reads the whole conversation again."""
    chance = np.random.default_rng(seed)
    contexts = openings(case, texts, chance)
    for sampled, observed in zip(*(x.T for x in case.lengths(seed)), strict=True):
        width = max(map(len, contexts))
        ids = torch.tensor([[0] * (width - len(c)) + c for c in contexts], device=model.device)
        seen = torch.tensor([[0] * (width - len(c)) + [1] * len(c) for c in contexts], device=model.device)
        longest = int(sampled.max())
        done = model.generate(
            ids, attention_mask=seen, do_sample=True, temperature=1.0, top_k=0, top_p=1.0,
            max_new_tokens=longest, min_new_tokens=longest, pad_token_id=0,
        )[:, width:].tolist()  # fmt: skip
        for context, reply, kept, more in zip(contexts, done, sampled, observed, strict=True):
            context += [*reply[:kept], *texts.observation(int(more), chance)]


def continuous(model: PreTrainedModel, texts: Texts, case: Case, seed: int) -> None:
    """transformers' own continuous batching, on the same work."""
    model.set_attn_implementation("paged|sdpa")
    chance = np.random.default_rng(seed)
    contexts = openings(case, texts, chance)
    settings = GenerationConfig(
        do_sample=True, temperature=1.0, top_k=0, max_new_tokens=case.sampled, eos_token_id=-1, pad_token_id=0
    )
    if case.spread:
        raise ValueError("continuous batching is compared on equal lengths only")
    for _ in range(case.turns):
        done = model.generate_batch(inputs=contexts, generation_config=settings, progress_bar=False)
        answers = [done[key].generated_tokens for key in sorted(done, key=lambda k: int(str(k).split("_")[-1]))]
        contexts = [[*c, *a, *texts.observation(case.observed, chance)] for c, a in zip(contexts, answers, strict=True)]


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
    beat on this device. Prompts are taken to cost nothing, and so is looking up embeddings."""
    embeddings, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    weights = sum(p.nbytes for p in model.parameters()) - (0 if embeddings is head else embeddings.nbytes)
    steps = case.turns * case.sampled
    middle = case.prompt + (case.turns * case.sampled + (case.turns - 1) * case.observed) / 2
    return steps * (weights + case.conversations * middle * token_bytes(model)) / bandwidth(model.device.type)


def best(run: Callable[[int], Any], case: Case, repeats: int, cuda: bool) -> float:
    """Tokens a second of the fastest of `repeats` runs, after one that does not count."""
    run(0)
    speeds = []
    for repeat in range(1, repeats + 1):
        began = time.perf_counter()
        run(repeat)
        if cuda:
            torch.cuda.synchronize()
        speeds.append(case.tokens(repeat) / (time.perf_counter() - began))
    return max(speeds)


def speed_of(model: PreTrainedModel, texts: Texts, case: Case, repeats: int) -> tuple[float, list[float]]:
    """Tokens a second of our engine, and the seconds of each turn in one more run."""
    tune_cpu()
    engine = LocalEngine(model, case.length + 1, case.conversations, case.conversations * (case.length + 64))
    mine = best(lambda seed: ours(engine, texts, case, seed), case, repeats, model.device.type == "cuda")
    return mine, ours(engine, texts, case, 99) if case.turns > 1 else []


def generate_speed(model: PreTrainedModel, texts: Texts, case: Case, repeats: int) -> float:
    """Tokens a second of the library's `generate`."""
    with torch.inference_mode():
        model.set_attn_implementation("sdpa")
        torch.backends.mkldnn.enabled = True  # as torch comes; ours turns it off on Arm
        return best(lambda seed: theirs(model, texts, case, seed), case, repeats, model.device.type == "cuda")


def measure(model: PreTrainedModel, adapted: PreTrainedModel | None, case: Case, args: argparse.Namespace) -> dict:
    """One line of results."""
    texts = texts_of(args.model, model.config.vocab_size)
    baseline = None if args.without_baseline else generate_speed(model, texts, case, args.repeats)
    mine, turns = speed_of(model, texts, case, args.repeats)
    seconds = case.conversations * case.turns * case.sampled / mine
    cuda = args.device == "cuda"
    row = {
        "case": case.name, "model": args.model, "weights": weights_of(args.model, args.outliers),
        "dtype": str(model.dtype).removeprefix("torch."), "conversations": case.conversations, "turns": case.turns,
        "prompt": case.prompt, "sampled": case.sampled, "observed": case.observed, "ours_tok_s": round(mine, 1),
        "baseline_tok_s": baseline and round(baseline, 1), "ratio": baseline and round(mine / baseline, 2),
        "floor_share": round(floor_seconds(model, case) / seconds, 3),
        "device": torch.cuda.get_device_name() if cuda else f"{platform.machine()} CPU",
        "threads": torch.get_num_threads(), "torch": torch.__version__, "transformers": transformers.__version__,
    }  # fmt: skip
    if turns:
        row["turn_seconds"] = [round(turn, 4) for turn in turns]
    if adapted is not None:
        slower, _ = speed_of(adapted, texts, case, args.repeats)
        row |= {"lora": args.lora, "lora_tok_s": round(slower, 1), "lora_ratio": round(slower / mine, 3)}
    if args.continuous and not case.spread and case.tokens(0) < 40_000:
        row["continuous_tok_s"] = round(best(lambda seed: continuous(model, texts, case, seed), case, 1, cuda))
    return row


def describe(row: dict[str, Any]) -> str:
    work = "{case}: {conversations} x {turns} of {prompt} + {sampled} tokens, {model}".format_map(row)
    beside = "" if row["ratio"] is None else ", generate {baseline_tok_s:,.0f}, {ratio:.2f}x".format_map(row)
    lora = ", with adapters {lora_tok_s:,.0f}, {lora_ratio:.2f} of it".format_map(row) if "lora" in row else ""
    share = f"{row['floor_share']:.0%} of what the memory's bandwidth allows"
    return f"{work}\n  ours {row['ours_tok_s']:,.0f} tok/s{beside}{lora}; {share}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--case", choices=["single", "multi-turn", "ragged", "group", "all"], default="all")
    parser.add_argument(
        "--model", help=f"smollm2, seedling or a folder (real weights), {', '.join(SHAPES)} (random ones)"
    )
    parser.add_argument("--dtype", choices=["bfloat16", "float16", "float32"], help="on a GPU bfloat16, else float32")
    parser.add_argument("--outliers", action=argparse.BooleanOptionalAction, default=True, help="of random weights")
    parser.add_argument("--prompt", type=int, help="tokens of a prompt, instead of the case's own number")
    parser.add_argument("--sampled", type=int, help="tokens of a reply, instead of the case's own number")
    parser.add_argument("--lora", type=int, default=0, metavar="RANK", help="also with adapters of this rank")
    parser.add_argument("--conversations", type=int, help="instead of the case's own number, for slow models")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--continuous", action="store_true", help="also run transformers' continuous batching")
    parser.add_argument("--without-baseline", action="store_true", help="do not run generate")
    parser.add_argument("--json", action="store_true", help="one JSON line a case, nothing else")
    args = parser.parse_args()
    args.model = args.model or ("seedling" if args.device == "cpu" else "0.5b")
    transformers.logging.set_verbosity_error()
    model = load(args.model, args.device, args.dtype and getattr(torch, args.dtype), args.outliers)
    settle()
    adapted = give_adapters(copy.deepcopy(model), args.lora) if args.lora else None
    for case in CUDA if args.device == "cuda" else CPU:
        if args.case not in (case.name, "all"):
            continue
        conversations = args.conversations or case.conversations
        case = dataclasses.replace(
            case, conversations=conversations, siblings=min(case.siblings, conversations),
            prompt=args.prompt or case.prompt, sampled=args.sampled or case.sampled,
        )  # fmt: skip
        row = measure(model, adapted, case, args)
        print(json.dumps(row) if args.json else describe(row))
        sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
