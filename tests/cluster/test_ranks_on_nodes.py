"""Ranks of the learner on two nodes of a cluster: the same run as on one machine, also where one of them is lost."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from arborl.config.load_config import load
from arborl.learner.distributed.rank_group import interface_of
from arborl.track.jsonl import read_metrics
from arborl.training_run import train

SMALL = [
    "rollout.tasks_per_step=2", "rollout.group_size=3", "trainer.steps=3", "trainer.save_every=1", "evaluation.tasks=0",
    "env.args.size=3", "env.args.max_steps=4", "track.gifs=0", "track.tensorboard=false", "deterministic=true",
    "threads=1", "model.device=cpu", "algorithm.skip_zero_variance=false", "learner.strategy=fsdp2",
]  # fmt: skip


class Look:
    """Where ranks are, and what is done to one of them."""

    def __init__(self, kill: int = 0):
        self.kill, self.nodes = kill, list[str]()

    async def after(self, trainer, groups, metrics):
        import ray

        actors = trainer.learner.launcher.all
        infos = [await actor.info.remote() for actor in actors.values()]
        self.nodes = self.nodes or [one.node for one in infos]
        if trainer.step == self.kill:
            self.kill = 0
            os.kill(infos[-1].pid, signal.SIGKILL)
        assert ray.is_initialized()


def weights(home: Path) -> dict[str, torch.Tensor]:
    return load_file(home / "checkpoints" / "step-000003" / "model" / "model.safetensors")


def run(home: Path, *words: str, hooks=()) -> dict[str, torch.Tensor]:
    train(load(None, [*SMALL, f"output_dir={home}", *words]), hooks=hooks)
    return weights(home)


@pytest.mark.slow
def test_ranks_on_two_nodes_learn_what_ranks_of_one_machine_do_and_one_may_be_lost(two_nodes, tmp_path):
    here = run(tmp_path / "here", "learner.ranks=3")
    for name, kill in (("there", 0), ("lost", 2)):
        look = Look(kill)
        there = run(tmp_path / name, "learner.ranks=3", "placement=ray", hooks=[look])
        assert len(set(look.nodes)) == 2
        assert all(torch.equal(there[key], here[key]) for key in here)
        rows = list(read_metrics(tmp_path / name / "metrics.jsonl"))
        assert [row["step"] for row in rows] == [1, 2, 3]
        assert [row["learner/ranks"] for row in rows] == [3.0] * 3
        assert sum(row.get("learner/lost", 0) for row in rows) == (1 if kill else 0)
    assert "of 3 was lost on the cluster" in (tmp_path / "lost" / "run.log").read_text()


def test_an_address_is_that_of_an_interface():
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("192.0.2.77") is None
