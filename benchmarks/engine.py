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
import json
import platform
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

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


def ours(model: PreTrainedModel, case: Case, seed: int) -> None:
    """All conversations at once, each asking for its next turn as soon as it has its answer."""
    engine = LocalEngine(model, max_context=case.length + 1, slots=case.conversations)
    vocabulary = model.config.vocab_size
    chance = np.random.default_rng(seed)

    async def converse(number: int, context: list[int]) -> None:
        own = np.random.default_rng((seed, number))
        for turn in range(case.turns):
            sampling = Sampling(case.sampled, seed=(seed * 1000 + number) * 100 + turn)
            done = await engine.generate(context, sampling, session=str(number))
            context += [*done.tokens, *own.integers(0, vocabulary, case.observed).tolist()]

    async def everyone() -> None:
        await asyncio.gather(*(converse(i, c) for i, c in enumerate(openings(case, vocabulary, chance))))

    asyncio.run(everyone())


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


def best(run: Callable[[int], None], repeats: int, cuda: bool) -> float:
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
    return model.eval()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--case", choices=["single", "multi-turn", "group", "all"], default="all")
    parser.add_argument("--model", help="seedling, smollm2, qwen (random Qwen2.5-0.5B) or a folder")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", action="store_true", help="one JSON line a case, nothing else")
    args = parser.parse_args()
    name = args.model or ("seedling" if args.device == "cpu" else "qwen")
    transformers.logging.set_verbosity_error()
    model = load(name, args.device)
    hardware = torch.cuda.get_device_name() if args.device == "cuda" else f"{platform.machine()} CPU"
    for case in CPU if args.device == "cpu" else CUDA:
        if args.case not in (case.name, "all"):
            continue
        with torch.inference_mode():
            model.set_attn_implementation("sdpa")
            torch.backends.mkldnn.enabled = True  # as torch comes; ours turns it off on Arm
            baseline = case.tokens / best(
                lambda seed, c=case: theirs(model, c, seed), args.repeats, args.device == "cuda"
            )
        tune_cpu()
        mine = case.tokens / best(lambda seed, c=case: ours(model, c, seed), args.repeats, args.device == "cuda")
        row = {
            "case": case.name, "model": name, "conversations": case.conversations, "turns": case.turns,
            "prompt": case.prompt, "sampled": case.sampled, "observed": case.observed, "ours_tok_s": round(mine, 1),
            "baseline_tok_s": round(baseline, 1), "ratio": round(mine / baseline, 2), "device": hardware,
            "threads": torch.get_num_threads(), "torch": torch.__version__, "transformers": transformers.__version__,
        }  # fmt: skip
        print(
            json.dumps(row)
            if args.json
            else f"{case}\n  ours {mine:,.0f} tok/s, generate {baseline:,.0f}, {mine / baseline:.2f}x"
        )
        sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
