"""Host time of a learner update on a GPU, measured without a GPU.

    pip install triton
    python benchmarks/update_host.py --layers 30 --json

With a small model the host cannot launch the kernels of an update as fast as a GPU runs them, so the time of an update
is the host's. Here the Triton kernels are compiled for an H200, and a launch does all work of the host except for the
launch itself; torch's operations run on the CPU with tensors of a few numbers. `update_ms` is the fastest of
`--repeats` updates with one micro-batch, without the optimizer's step; `launches` counts the Triton kernels. The cost
of CUDA's own launches is not included: the numbers compare versions of the code, they do not predict the time on a GPU.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import os
import platform
import pstats
import statistics
import time
from contextlib import nullcontext
from typing import Any

os.environ.pop("TRITON_INTERPRET", None)  # kernels are compiled here, also in tests

import arborl  # imported before torch, as in a training run

# isort: split
import numpy as np
import torch
import triton
from transformers import LlamaConfig, LlamaForCausalLM
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

import arborl.models.fast_forward
from arborl.algorithms import make_algorithm
from arborl.config.run_config import AlgorithmConfig, LearnerConfig
from arborl.learner.attention import fused_layers, layer_kernels, path_selection
from arborl.learner.attention.kernel_attention import TritonTreeAttention
from arborl.learner.core import optimizer
from arborl.learner.core.learner import Learner
from arborl.models.attention import ATTENTION_NAME
from arborl.rollout.token_trees import build_token_trees
from arborl.tokens import Tokens
from arborl.types import Call, Completion, Episode, FinishReason, Group, Sampling, Task

SAMPLED = 8
"""Tokens of an episode."""


class CountingLauncher:
    """In place of the launch of a compiled kernel."""

    count = 0

    def __init__(self, source: Any, metadata: Any):
        pass

    def __call__(self, *args: Any) -> None:
        CountingLauncher.count += 1


class HostDriver:
    """Triton's driver of an H200 that is not there."""

    launcher_cls = CountingLauncher

    @property
    def utils(self) -> HostDriver:
        return self

    def load_binary(self, *args: Any) -> tuple[int, int, int, int, int]:
        return 1, 1, 32, 0, 1024  # module, function, registers, spills, threads

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": 232_448, "multiprocessor_count": 132}

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


def use_gpu_path() -> None:
    """Make the learner run its GPU path on CPU tensors. Kernels compute nothing, so outputs are zeros and no path is
    checked; parameters have master weights, as in 16 bits."""
    driver.set_active(HostDriver())
    torch.empty, torch.empty_like, torch.Tensor.new_empty = torch.zeros, torch.zeros_like, torch.Tensor.new_zeros

    def heads(qkv: Any, norms: Any, key_heads: int, cos: Any, sin: Any) -> Any:
        return fused_layers._RotatedHeads.apply(qkv, None, None, cos, sin, key_heads, 0.0)

    fused = fused_layers.FUSED_OPS._replace(heads=heads)
    path = path_selection.ExecutionPath("kernel", fused=True)
    fused_layers._kernels = lambda x: layer_kernels
    path_selection.FUSED_OPS = fused
    path_selection.path_error = lambda model, path: None
    path_selection.PathSelector._candidates = lambda self, model, batch: iter([path])  # type: ignore[method-assign]
    path_selection.ATTENTION_BACKENDS["kernel"] = path_selection.AttentionBackend(TritonTreeAttention)
    arborl.models.fast_forward._matches_library = lambda model: True
    optimizer.LOW_PRECISION = (torch.float32,)  # type: ignore[assignment]


def make_learner(layers: int) -> tuple[Learner, Any]:
    config = LlamaConfig(
        vocab_size=512, hidden_size=48, intermediate_size=64, num_hidden_layers=layers, num_attention_heads=3,
        num_key_value_heads=1, head_dim=16, max_position_embeddings=1024, tie_word_embeddings=True,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    model.set_attn_implementation(ATTENTION_NAME)
    for parameter in model.parameters():
        parameter.data.fill_(0.01)
    algorithm = make_algorithm(AlgorithmConfig(name="grpo", std="group"))
    settings = LearnerConfig(lr=1e-6, decay="none", micro_batch_tokens=16_384)
    return Learner(model, settings, Sampling(SAMPLED), algorithm.needs), algorithm


def make_groups() -> list[Group]:
    """Two groups of four episodes."""
    rng, groups = np.random.default_rng(0), []
    for number in range(2):
        prompt, episodes = Tokens(rng.integers(0, 500, SAMPLED)), []
        for index in range(4):
            tokens = tuple(rng.integers(0, 500, SAMPLED).tolist())
            completion = Completion(tokens, (0.0,) * SAMPLED, FinishReason.LENGTH)
            episodes.append(Episode(f"{number} {index}", Task(str(number)), calls=[Call(prompt, completion, 0)]))
            episodes[-1].rewards["index"] = float(index)
        groups.append(Group(Task(str(number)), episodes))
    return groups


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=30, help="layers of the model; SmolLM2-135M has 30")
    parser.add_argument("--repeats", type=int, default=20, help="updates; the fastest is reported")
    parser.add_argument("--profile", type=int, default=0, help="number of functions in a printed profile; 0: none")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    use_gpu_path()
    learner, algorithm = make_learner(args.layers)
    learner.optimizer._step = lambda: None  # type: ignore[method-assign]
    forest = build_token_trees(algorithm.keep(make_groups()))
    terms = algorithm.credit(make_groups(), forest.terms)

    def update() -> float:
        began = time.perf_counter()
        metrics = learner.update(forest.trees, terms, algorithm)
        if metrics["learner/steps"] != 1:
            raise RuntimeError("the update was skipped")
        return time.perf_counter() - began

    for _ in range(3):  # compiles the kernels
        update()
    CountingLauncher.count, profile = 0, cProfile.Profile()
    seconds = [update() for _ in range(args.repeats)]
    launches = CountingLauncher.count // args.repeats
    with profile if args.profile else nullcontext():
        update()
    if args.profile:
        pstats.Stats(profile).sort_stats("tottime").print_stats(args.profile)
    row = {
        "layers": args.layers, "update_ms": round(1e3 * min(seconds), 1),
        "median_ms": round(1e3 * statistics.median(seconds), 1), "launches": launches, "machine": platform.machine(),
        "python": platform.python_version(), "torch": torch.__version__, "triton": triton.__version__,
    }  # fmt: skip
    print(json.dumps(row) if args.json else "  ".join(f"{name}={value}" for name, value in row.items()))


if __name__ == "__main__":
    main()
