"""The per-token log of an update."""

from __future__ import annotations

import copy

import numpy as np
import pytest
from learner_fakes import SAMPLING, Fake, batch_of, random_groups

from arborl.config.run_config import LearnerConfig
from arborl.learner.core.learner import Learner
from arborl.learner.core.update_metrics import TermLog
from arborl.rollout.term_store import TermStore, gradient_norms
from arborl.rollout.token_trees import downsample_branches


def noted(tiny_llama, groups, **settings):
    algorithm = Fake()
    forest, terms = batch_of(groups, algorithm)
    learner = Learner(copy.deepcopy(tiny_llama), LearnerConfig(lr=1e-6, decay="none", **settings), SAMPLING)
    learner.term_log = TermLog(len(terms))
    metrics = learner.update(forest.trees, terms, algorithm)
    return learner.term_log, terms, metrics


def test_the_losses_of_the_terms_are_the_loss_and_a_clipped_term_pulls_nothing(tiny_llama):
    log, terms, metrics = noted(tiny_llama, random_groups(0))
    assert log.loss.sum() == pytest.approx(metrics["policy/loss"], rel=1e-5)
    clipped = np.where(terms.advantage > 0, log.ratio > 1.2, log.ratio < 0.8)
    assert clipped.any()
    expected = np.where(clipped, 0.0, -log.ratio * terms.advantage * terms.weight)
    np.testing.assert_allclose(log.pull, expected, rtol=1e-4, atol=1e-9)
    assert (log.entropy > 0).all()


def test_what_is_noted_does_not_depend_on_the_split(tiny_llama):
    groups = random_groups(1)
    one, _, _ = noted(tiny_llama, groups)
    other, _, _ = noted(tiny_llama, groups, micro_batch_tokens=8)
    for name in ("logprob", "ratio", "loss", "pull"):
        np.testing.assert_allclose(getattr(one, name), getattr(other, name), rtol=1e-4, atol=1e-7)


def test_pulls_of_several_passes_add_up(tiny_llama):
    groups = random_groups(1)
    one, _, _ = noted(tiny_llama, groups)
    three, _, _ = noted(tiny_llama, groups, epochs=3)
    np.testing.assert_allclose(three.pull, 3 * one.pull, rtol=1e-2, atol=1e-6)


def test_terms_keep_their_place_when_branches_are_left_out():
    groups = random_groups(3)
    _, terms = batch_of(groups, Fake())
    _, fewer, _ = downsample_branches(groups, terms, 1, "last", 0)
    assert len(fewer) < len(terms)
    assert (terms.token[fewer.place] == fewer.token).all()
    assert (terms.logprob[fewer.place] == fewer.logprob).all()


def test_of_too_many_terms_those_that_pushed_most_are_kept_in_order(tmp_path):
    size = 40
    names = ("episode", "call", "index", "logprob", "entropy", "advantage", "weight", "ratio", "loss", "pull")
    columns = {name: np.arange(size, dtype=float) for name in names}
    columns["logprob"] = np.full(size, -1.0)
    columns["pull"] = np.where(np.arange(size) % 10 == 3, -5.0, 0.1)
    store = TermStore(tmp_path)
    store.write(2, columns, most=4)
    found = store.read(2)
    assert found["index"].tolist() == [3, 13, 23, 33]
    assert int(found["of"]) == size
    assert float(found["pushed"]) == pytest.approx(gradient_norms(columns["pull"], columns["logprob"]).sum())


@pytest.mark.parametrize("damage", [b"", b"PK\x03\x04 torn", b"not a zip"])
def test_a_file_that_is_no_terms_file_is_none(tmp_path, damage):
    (tmp_path / "step-000001.npz").write_bytes(damage)
    assert TermStore(tmp_path).read(1) is None
    assert TermStore(tmp_path).read(2) is None
