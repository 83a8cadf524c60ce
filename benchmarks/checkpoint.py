"""How long a checkpoint holds a run up, and how long writing it takes beside the run.

    python benchmarks/checkpoint.py --model 0.5b --device cpu
    python benchmarks/checkpoint.py --model 4b --device cuda --folder /data/checkpoints

Random weights of the shapes of Qwen2.5 (0.5b, 1.5b, 7b) and Qwen3 (4b) in bfloat16, float32 masters and AdamW's state,
or adapters with `--lora`. One JSON line. `held_s` is what the run waits at a checkpoint (best and worst of `--repeats`,
after memory has been taken in `reserve_s`), `copied_s` when a GPU has sent everything, `written_s` what hashing,
writing and syncing take in the background, `at_once_s` the same checkpoint with nothing in the background, and `beside`
how many times as long a thousand small products take the host while a checkpoint is written.
"""

from __future__ import annotations

import argparse
import json
import platform
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import arborl  # noqa: F401  # before torch, as everyone does who starts a run

# isort: split
import torch
import transformers
from transformers import PreTrainedModel, Qwen2Config, Qwen3Config

from arborl.checkpoint import BackgroundWriter, save
from arborl.config.run_config import LearnerConfig, LoraConfig
from arborl.learner.core.learner import Learner
from arborl.models.attention import ATTENTION_NAME
from arborl.models.lora import add_lora
from arborl.types import Sampling


def _qwen2(hidden: int, inner: int, layers: int, heads: int, keys: int, tied: bool = True) -> Qwen2Config:
    return Qwen2Config(
        vocab_size=151_936, hidden_size=hidden, intermediate_size=inner, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=keys, tie_word_embeddings=tied,
    )  # fmt: skip


SHAPES = {
    "tiny": lambda: _qwen2(256, 512, 4, 4, 2),
    "0.5b": lambda: _qwen2(896, 4864, 24, 14, 2),
    "1.5b": lambda: _qwen2(1536, 8960, 28, 12, 2),
    "4b": lambda: Qwen3Config(
        vocab_size=151_936, hidden_size=2560, intermediate_size=9728, num_hidden_layers=36, num_attention_heads=32,
        num_key_value_heads=8, head_dim=128, tie_word_embeddings=True,
    ),
    "7b": lambda: _qwen2(3584, 18_944, 28, 28, 4, tied=False),
}  # fmt: skip


def random_model(name: str, device: str) -> PreTrainedModel:
    """A model of these shapes, made where it will be."""
    torch.manual_seed(0)
    config = SHAPES[name]()
    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    model.set_attn_implementation(ATTENTION_NAME)
    return model


def learner_of(model: PreTrainedModel) -> Learner:
    """A learner whose optimiser has made a step."""
    learner = Learner(model, LearnerConfig(lr=1e-6), Sampling())
    learner.optimizer.gradients()
    learner.optimizer.step(1.0)
    learner.optimizer.zero_grad()
    return learner


def timed(work: Callable[[], object], device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def host_work(device: str) -> float:
    """Seconds that the host takes for a thousand small products: what sampling is made of."""
    x = torch.ones(64, 64, device=device)

    def work() -> None:
        for _ in range(1000):
            x @ x
        if device == "cuda":
            torch.cuda.synchronize()

    return timed(work, device)


def measure(learner: Learner, root: Path, device: str, repeats: int) -> dict[str, float]:
    background, held, copied, written, beside = BackgroundWriter(), [], [], [], []
    alone = min(host_work(device) for _ in range(5))
    reserve = timed(learner.reserve(), device)
    for step in range(repeats):
        began = time.perf_counter()
        snapshot = learner.snapshot()

        def write(snapshot=snapshot, step=step) -> float:
            since = time.perf_counter()
            save(root, step, snapshot.write, {}, keep=1)
            return time.perf_counter() - since

        background.start(write)
        job = background.job
        assert job is not None
        held.append(time.perf_counter() - began)
        snapshot.copied.event.synchronize() if snapshot.copied.event is not None else None
        copied.append(time.perf_counter() - began)
        while background.busy:
            beside.append(host_work(device))
        written.append(job.result())
        background.wait()
    background.close()
    mean = sum(beside) / len(beside) if beside else alone
    return {
        "reserve_s": reserve, "held_s": min(held), "held_worst_s": max(held), "copied_s": min(copied),
        "written_s": min(written), "beside": mean / alone, "beside_worst_s": max(beside, default=0.0),
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=list(SHAPES), default="0.5b")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--lora", type=int, default=0, help="rank of adapters; 0 trains all weights")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="where to write; without it, a temporary folder")
    args = parser.parse_args()
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    model = random_model(args.model, args.device)
    if args.lora:
        add_lora(model, LoraConfig(rank=args.lora))
    learner = learner_of(model)
    folder = Path(tempfile.mkdtemp(dir=args.folder))
    try:
        found = measure(learner, folder, args.device, args.repeats)
        size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
        found["at_once_s"] = timed(lambda: save(folder, args.repeats, learner.save, {}, keep=1), args.device)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    row = {"model": args.model, "lora": args.lora, "gib": round(size / 2**30, 2)}
    row |= {name: round(value, 4) for name, value in found.items()}
    row |= {
        "device": torch.cuda.get_device_name() if args.device == "cuda" else f"{platform.machine()} CPU",
        "threads": torch.get_num_threads(), "torch": torch.__version__, "transformers": transformers.__version__,
    }  # fmt: skip
    print(json.dumps(row))
    return 0


if __name__ == "__main__":
    sys.exit(main())
