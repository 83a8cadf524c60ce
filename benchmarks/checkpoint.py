"""How long a checkpoint blocks a run, and how long it takes to write it in the background.

    python benchmarks/checkpoint.py --model 0.5b --device cpu
    python benchmarks/checkpoint.py --model 4b --device cuda --folder /data/checkpoints

Random bfloat16 weights with the shapes of Qwen2.5 (0.5b, 1.5b, 7b) and Qwen3 (4b), float32 master weights and AdamW's
state, or adapters with `--lora`. Prints one JSON line. `held_s` is the time that a checkpoint blocks the run (best;
`held_worst_s` is the worst of `--repeats`), after memory was allocated in `reserve_s`. `copied_s` is the time until the
GPU has copied everything to the host, `written_s` the time of hashing, writing and syncing in the background,
`at_once_s` the time of the same checkpoint in the foreground. `beside` is the slowdown of 1,000 small matrix products
while a checkpoint is written.
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

import arborl  # noqa: F401  # imported before torch, as in a training run

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


def _qwen2(hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int, tied: bool = True) -> Qwen2Config:
    return Qwen2Config(
        vocab_size=151_936, hidden_size=hidden, intermediate_size=intermediate, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=kv_heads, tie_word_embeddings=tied,
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
    """Create a model with random weights on its device."""
    torch.manual_seed(0)
    config = SHAPES[name]()
    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    model.set_attn_implementation(ATTENTION_NAME)
    return model


def make_learner(model: PreTrainedModel) -> Learner:
    """A learner whose optimizer has made a step, so that its state exists."""
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


def time_host_work(device: str) -> float:
    """Seconds of 1,000 small matrix products: a proxy for the host time of sampling."""
    x = torch.ones(64, 64, device=device)

    def work() -> None:
        for _ in range(1000):
            x @ x
        if device == "cuda":
            torch.cuda.synchronize()

    return timed(work, device)


def measure(learner: Learner, root: Path, device: str, repeats: int) -> dict[str, float]:
    background, held, copied, written, busy_seconds = BackgroundWriter(), [], [], [], []
    idle_seconds = min(time_host_work(device) for _ in range(5))
    reserve = timed(learner.reserve(), device)
    for step in range(repeats):
        began = time.perf_counter()
        snapshot = learner.snapshot()

        def write(snapshot=snapshot, step=step) -> float:
            write_start = time.perf_counter()
            save(root, step, snapshot.write, {}, keep=1)
            return time.perf_counter() - write_start

        background.start(write)
        job = background.job
        assert job is not None
        held.append(time.perf_counter() - began)
        snapshot.copied.event.synchronize() if snapshot.copied.event is not None else None
        copied.append(time.perf_counter() - began)
        while background.busy:
            busy_seconds.append(time_host_work(device))
        written.append(job.result())
        background.wait()
    background.close()
    mean = sum(busy_seconds) / len(busy_seconds) if busy_seconds else idle_seconds
    return {
        "reserve_s": reserve, "held_s": min(held), "held_worst_s": max(held), "copied_s": min(copied),
        "written_s": min(written), "beside": mean / idle_seconds, "beside_worst_s": max(busy_seconds, default=0.0),
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=list(SHAPES), default="0.5b")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--lora", type=int, default=0, help="rank of adapters; 0 trains all weights")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="folder for the checkpoints; default: a temporary folder")
    args = parser.parse_args()
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    model = random_model(args.model, args.device)
    if args.lora:
        add_lora(model, LoraConfig(rank=args.lora))
    learner = make_learner(model)
    folder = Path(tempfile.mkdtemp(dir=args.folder))
    try:
        measurements = measure(learner, folder, args.device, args.repeats)
        size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
        measurements["at_once_s"] = timed(lambda: save(folder, args.repeats, learner.save, {}, keep=1), args.device)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    row = {"model": args.model, "lora": args.lora, "gib": round(size / 2**30, 2)}
    row |= {name: round(value, 4) for name, value in measurements.items()}
    row |= {
        "device": torch.cuda.get_device_name() if args.device == "cuda" else f"{platform.machine()} CPU",
        "threads": torch.get_num_threads(), "torch": torch.__version__, "transformers": transformers.__version__,
    }  # fmt: skip
    print(json.dumps(row))
    return 0


if __name__ == "__main__":
    sys.exit(main())
