"""Law 2 over processes: however a learner lies in its ranks, it takes the step that one process takes."""

from __future__ import annotations

import dataclasses
import os
import signal
import socket
import threading

import numpy as np
import pytest
import torch
from cases import IS_ARM
from learner_fakes import SAMPLING, Fake, batch_of, random_groups
from worlds import Copies, alone, body, world

from arborl.config.run_config import LearnerConfig
from arborl.errors import ConfigError, LearnerRankLost
from arborl.learner.distributed.launch import check_ranks
from arborl.learner.distributed.learner_group import LearnerGroup
from arborl.learner.distributed.rank_group import close_connections_to
from arborl.learner.distributed.rank_worker import LearnerSpec
from arborl.learner.distributed.rendezvous import RankHeartbeatMonitor, Rendezvous, check_versions

CONFIG = LearnerConfig(lr=3e-5, decay="none", micro_batch_tokens=40)
NEEDS = Fake("value").needs
LATER = 1e-4 if IS_ARM else 1e-5  # tolerance of a step that follows another
SLOW = pytest.mark.slow
STRATEGIES = [
    ("ddp", 2, {}),
    ("fsdp2", 2, {}),
    pytest.param("tensor", 2, {}, marks=SLOW),
    pytest.param("fsdp2", 3, {}, marks=SLOW),
    pytest.param("zero1", 2, {}, marks=SLOW),
    pytest.param("zero2", 2, {}, marks=SLOW),
    pytest.param("zero3", 2, {}, marks=SLOW),
]


class Exploding(Fake):
    """Like `value`, but the gradient of episodes with a reward of 100 is infinite."""

    def loss(self, outputs, terms):
        loss_M, parts = super().loss(outputs, terms)
        return loss_M + outputs.logprob_M * torch.where(terms.advantage_M > 99, torch.inf, 0.0), parts


def assert_close(ours: dict, theirs: dict, tolerance: float) -> None:
    """Differences are measured against the largest number, since most are tiny."""
    assert ours.keys() == theirs.keys()
    scale = max(1.0, max(float(value.abs().max()) for value in theirs.values()))
    for name, value in theirs.items():
        assert float((ours[name] - value).abs().max()) < tolerance * scale, name


def assert_went_alike(ours, theirs) -> None:
    """From the same start to the same place. Where a gradient is nothing but rounding, AdamW still takes a step, so
    single weights may differ."""
    weights, other = ours.weights(), theirs.weights()
    start = body(lora=4 if any("lora_" in name for name in other) else 0).state_dict()
    gap = sum(float((weights[name] - value).double().square().sum()) for name, value in other.items())
    went = sum(float((value - start[name]).double().square().sum()) for name, value in other.items())
    assert went > 0
    assert gap < 1e-4 * went


def assert_same_step(group, single, groups, algorithm, tolerance: float = 1e-5) -> None:
    """What both say, their gradients, and what they are after an update. After an update the weights themselves differ
    by a step of AdamW where a gradient is nothing but rounding, so later steps take a larger `tolerance`."""
    forest, terms = batch_of(groups, algorithm)
    ours, theirs = (one.score_terms(forest.trees, terms, algorithm.needs) for one in (group, single))
    for name in ("value", "reference"):
        np.testing.assert_allclose(getattr(ours, name), getattr(theirs, name), atol=tolerance)
    logprobs = [one.logprobs(forest.trees, terms) for one in (group, single)]
    np.testing.assert_allclose(*logprobs, atol=tolerance)
    results = [one.backward(forest.trees, theirs, algorithm) for one in (group, single)]
    assert results[0]["policy/loss"] == pytest.approx(results[1]["policy/loss"], abs=tolerance)
    assert_close(group.gradients(), single.gradients(), tolerance)
    metrics = [one.update(forest.trees, theirs, algorithm) for one in (group, single)]
    for name, value in metrics[1].items():
        assert metrics[0][name] == pytest.approx(value, rel=10 * tolerance, abs=tolerance), name
    assert_went_alike(group, single)


@pytest.mark.parametrize(("strategy", "ranks", "more"), STRATEGIES)
def test_several_ranks_take_the_step_of_one(strategy, ranks, more):
    """Trees of unequal size, a critic, a reference, several minibatches; then less than a tree a rank, then nothing,
    and groups that are not finite."""
    config = CONFIG.model_copy(update={"minibatches": 2})
    algorithm = Fake("value", reference=True)
    single = alone(body(), algorithm.needs, config)
    with world(strategy, ranks, body(), algorithm.needs, config, **more) as group:
        groups = random_groups(7, groups=5)
        assert_same_step(group, single, groups, algorithm)
        assert_same_step(group, single, random_groups(3, groups=1), algorithm, LATER)
        forest, terms = batch_of(groups, algorithm)
        none = group.update(forest.trees, terms.pick(np.zeros(0, dtype=int)), algorithm)
        assert none["learner/skipped/no_terms"] == 1.0
        single.update(forest.trees, terms.pick(np.zeros(0, dtype=int)), algorithm)
        terms.advantage[:1] = np.nan
        for one in (group, single):
            assert one.update(forest.trees, terms, algorithm)["dropped/not_finite"] == len(groups[0].episodes)
        assert_went_alike(group, single)
        terms = dataclasses.replace(terms, advantage=np.where(terms.tree == 3, 100.0, 0.5))
        bad = Exploding("value", reference=True)
        for one in (group, single):
            metrics = one.update(forest.trees, terms, bad)
            assert metrics["dropped/not_finite"] == len(groups[3].episodes)
            assert metrics["learner/steps"] == 2.0
        assert_went_alike(group, single)


def test_a_learner_that_was_not_closed_does_not_keep_the_next_one_from_starting(monkeypatch, caplog):
    monkeypatch.setattr(RankHeartbeatMonitor, "close", lambda monitor: 1 / 0)  # closing fails at its first step
    with pytest.raises(ZeroDivisionError), world("ddp", 2, body(), NEEDS, CONFIG):
        pass
    assert not torch.distributed.is_initialized()  # the other steps were taken
    monkeypatch.undo()
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    with world("ddp", 2, body(), NEEDS, CONFIG) as group:
        assert group.rendezvous.count == 2
    assert "an earlier learner in this process was not closed" in caplog.text


@pytest.mark.parametrize(("strategy", "ranks", "more"), STRATEGIES)
def test_adapters_take_the_same_step_too(strategy, ranks, more):
    """And a loss of whole sequences, whose groups are cut into several micro-batches."""
    algorithm = Fake("sequence", reference=True)
    single = alone(body(lora=4), algorithm.needs, CONFIG)
    with world(strategy, ranks, body(lora=4), algorithm.needs, CONFIG, **more) as group:
        for seed, tolerance in ((7, 1e-5), (8, LATER)):
            assert_same_step(group, single, random_groups(seed, groups=4, longest=30), algorithm, tolerance)
        for one in (group, single):
            one.update_reference()
        assert_same_step(group, single, random_groups(9, groups=3), algorithm, LATER)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["fsdp2", "zero2", "tensor"])
def test_a_critic_of_its_own_is_sharded_like_the_policy(strategy):
    config = CONFIG.model_copy(update={"critic": "separate", "recompute": True})
    algorithm = Fake("value", reference=True)
    single = alone(body(), algorithm.needs, config)
    with world(strategy, 2, body(), algorithm.needs, config) as group:
        for seed, tolerance in ((1, 1e-5), (2, LATER)):
            assert_same_step(group, single, random_groups(seed, groups=4), algorithm, tolerance)


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "lora"), [("fsdp2", 0), ("fsdp2", 4), ("tensor", 0), ("tensor", 4), ("ddp", 0)])
def test_in_bfloat16_steps_are_taken_in_float32(strategy, lora):
    """Rounding differs, so what is compared is where an update goes."""
    algorithm = Fake("value")
    forest, terms = batch_of(random_groups(7, groups=5), algorithm)
    config = CONFIG.model_copy(update={"lr": 1e-3})
    before = {name: value.clone().float() for name, value in body(lora, torch.bfloat16).state_dict().items()}
    single = alone(body(lora, torch.bfloat16), algorithm.needs, config)
    with world(strategy, 2, body(lora, torch.bfloat16), algorithm.needs, config) as group:
        for one in (single, group):
            for _ in range(3):
                assert one.update(forest.trees, terms, algorithm)["learner/skipped"] == 0.0
        ours, theirs = (
            torch.cat([(value.float() - before[name]).flatten() for name, value in one.weights().items()])
            for one in (group, single)
        )
    assert float(theirs.norm()) > 0
    assert float(torch.cosine_similarity(ours, theirs, dim=0)) > 0.95


def test_a_rank_that_dies_ends_the_run_with_its_name():
    algorithm = Fake("value")
    forest, terms = batch_of(random_groups(7, groups=3), algorithm)
    with world("ddp", 2, body(), algorithm.needs, CONFIG) as group:
        group.update(forest.trees, terms, algorithm)
        os.kill(group.launcher.all[1].pid, signal.SIGKILL)
        with pytest.raises(LearnerRankLost, match=r"learner rank 1 of 2 .*--resume latest"):
            group.update(forest.trees, terms, algorithm)
        with pytest.raises(LearnerRankLost, match="learner rank 1"):
            group.update(forest.trees, terms, algorithm)


class Broken(Fake):
    """Fails in one process."""

    def loss(self, outputs, terms):
        if torch.distributed.get_rank() == 1:
            raise ValueError("a loss of my own")
        return super().loss(outputs, terms)


def test_a_rank_that_fails_says_why():
    algorithm = Broken("value")
    forest, terms = batch_of(random_groups(7, groups=3), algorithm)
    with (
        world("fsdp2", 2, body(), algorithm.needs, CONFIG) as group,
        pytest.raises(LearnerRankLost, match=r"rank 1 of 2 failed \(ValueError: a loss of my own\)"),
    ):
        group.update(forest.trees, terms, algorithm)


def test_a_rank_with_other_versions_is_named_and_all_are_stopped():
    rendezvous, info = Rendezvous.create(3)
    others = Copies(3, info, '{"torch": "2.11.0", "host": "elsewhere"}')
    spec = LearnerSpec(CONFIG.model_copy(update={"strategy": "ddp", "ranks": 3}), SAMPLING, NEEDS, 0, 0, body)
    with pytest.raises(ConfigError, match=r"rank 1 on elsewhere runs torch 2.11.0, and rank 0 on .* Install the same"):
        LearnerGroup(rendezvous, spec, body(), others)
    assert all(rank.poll() is not None for rank in others.all.values())


def test_who_waits_for_a_host_that_is_lost_is_let_go():
    """127.0.0.2 is a host of its own, as far as connections go."""
    with socket.create_server(("127.0.0.2", 0)) as there, socket.create_server(("127.0.0.1", 0)) as here:
        lost, kept = (socket.create_connection(one.getsockname()) for one in (there, here))
        near, other = socket.socketpair()  # such as the event loop has: its ends have no address
        with lost, kept, near, other:
            lost.settimeout(20)
            threading.Timer(0.1, close_connections_to, ["127.0.0.2"]).start()
            assert lost.recv(1) == b""
            kept.send(b"still there")
            near.send(b"and there")


def test_more_ranks_than_cores_cause_a_warning(caplog):
    check_ranks(CONFIG.model_copy(update={"strategy": "ddp", "ranks": 4_000}), "cpu")
    assert "learner.ranks=4000" in caplog.text


def test_ranks_of_different_versions_are_refused():
    here = {"arborl": "0.1.0", "torch": "2.13.0", "python": "3.11.7", "host": "a"}
    check_versions([here, here | {"host": "b"}])
    with pytest.raises(ConfigError, match=r"rank 1 on b runs torch 2.11.0, and rank 0 on a runs 2.13.0"):
        check_versions([here, here | {"host": "b", "torch": "2.11.0"}])
