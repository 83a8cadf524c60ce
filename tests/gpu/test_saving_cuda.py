"""Checkpoints on a GPU: copies run beside the computation and hold the moment they were begun at."""

from __future__ import annotations

import copy

import pytest
import torch

from arborl.config.run_config import LearnerConfig
from arborl.learner.core.checkpoint_files import checkpoint_tensors
from arborl.learner.core.learner import Learner
from arborl.learner.core.offload import HostCopier
from arborl.models.model_loading import load_model, resolve
from arborl.types import Sampling

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def test_tensors_may_change_as_soon_as_the_device_waits_for_the_copy():
    tree = {f"t{n}": torch.full((2**24,), float(n), device="cuda") for n in range(16)}
    copies = HostCopier(torch.device("cuda"))
    for turn in range(3):
        copied = copies.copy(tree)
        copied.block_stream()
        for tensor in tree.values():
            tensor.add_(1.0)
        copied.wait()
        for n in range(16):
            assert bool((copied.tree[f"t{n}"] == n + turn).all()), (turn, n)
    assert all(slab.is_pinned() for slab in copies.slabs)


def test_a_tensor_that_is_freed_meanwhile_is_copied_all_the_same():
    copies = HostCopier(torch.device("cuda"))
    for turn in range(5):
        tree = {"a": torch.full((2**26,), float(turn), device="cuda")}
        copied = copies.copy(tree)
        del tree
        torch.full((2**26,), -1.0, device="cuda")  # would be given the same memory
        copied.wait()
        assert bool((copied.tree["a"] == turn).all())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_learner_steps_on_while_its_snapshot_is_written(tmp_path, dtype):
    model = load_model(resolve("seedling"), dtype, "cuda")
    start = copy.deepcopy(model)
    learner = Learner(model, LearnerConfig(lr=1e-2, decay="none"), Sampling())

    def step(one: Learner) -> None:
        one._finish_copies()  # as an update does
        for gradient in one.optimizer.gradients():
            gradient.normal_(generator=torch.Generator("cuda").manual_seed(0))
        one.optimizer.step(1.0)
        one.optimizer.zero_grad()

    step(learner)
    then = copy.deepcopy(checkpoint_tensors(learner))
    snapshot = learner.snapshot()
    for _ in range(5):
        step(learner)
    snapshot.write(tmp_path)
    resumed = Learner(start, LearnerConfig(lr=1e-2, decay="none"), Sampling())
    resumed.load(tmp_path)
    found = checkpoint_tensors(resumed)
    assert all(torch.equal(found["model"][name], value) for name, value in then["model"].items())
    for number, state in then["state"]["optimizer"]["adam"]["state"].items():
        for name, value in state.items():
            assert torch.equal(found["state"]["optimizer"]["adam"]["state"][number][name].cpu(), value.cpu())
