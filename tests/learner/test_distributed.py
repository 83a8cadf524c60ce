"""Law 2 over processes: two, each with part of the trees, take the step that one takes with all of them."""

from __future__ import annotations

import copy
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from learner_fakes import SAMPLING, Fake, batch_of, random_groups

from arborl.config.run import LearnerConfig
from arborl.learner.learner import Learner

CONFIG = LearnerConfig(lr=1e-2, decay="none", micro_batch_tokens=40, minibatches=3)


OWNERS = {"shared out": [[0, 2], [1, 3, 4]], "one has nothing": [[0, 1, 2, 3, 4], []]}


def take_part(rank: int, folder: str, start) -> None:
    """One process of two."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    algorithm = Fake("value")
    forest, terms = batch_of(random_groups(7, groups=5), algorithm)
    found = {}
    for case, owners in OWNERS.items():
        mine = terms.pick(np.flatnonzero(np.isin(terms.tree, owners[rank])))
        model = copy.deepcopy(start)
        learner = Learner(model, CONFIG, SAMPLING, algorithm.needs)
        metrics = learner.update(forest.trees, mine, algorithm)
        if rank == 0:
            mine.advantage[:1] = np.nan
        found[case] = (metrics, dict(copy.deepcopy(model).state_dict()), learner.update(forest.trees, mine, algorithm))
    torch.save(found, f"{folder}/rank-{rank}.pt")
    dist.destroy_process_group()


def test_two_processes_give_the_loss_and_the_step_of_one(tiny_llama, tmp_path: Path):
    algorithm, groups = Fake("value"), random_groups(7, groups=5)
    forest, terms = batch_of(groups, algorithm)
    model = copy.deepcopy(tiny_llama)
    alone = Learner(model, CONFIG, SAMPLING, algorithm.needs).update(forest.trees, terms, algorithm)
    mp.spawn(take_part, (str(tmp_path), tiny_llama), nprocs=2)
    for rank in (0, 1):
        for metrics, weights, poisoned in torch.load(tmp_path / f"rank-{rank}.pt", weights_only=False).values():
            for name, value in alone.items():
                assert metrics[name] == pytest.approx(value, rel=1e-9, abs=1e-12), name
            assert poisoned["dropped/not_finite"] == len(groups[0].episodes)  # what one of them saw, both count
            assert poisoned["learner/skipped"] == 0.0
            for name, value in model.state_dict().items():
                torch.testing.assert_close(weights[name], value, rtol=1e-9, atol=1e-10)
