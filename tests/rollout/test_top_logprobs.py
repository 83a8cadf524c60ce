"""What else the model might have stated is kept beside what it stated, and asking for it changes nothing."""

from __future__ import annotations

import math

import pytest

import arborl
from arborl.config.run_config import RunConfig
from arborl.rollout.episode_store import EpisodeStore
from arborl.rollout.recorder import TopLogprobs

SMALL = {
    "steps": 1, "rollout.tasks_per_step": 1, "rollout.group_size": 2, "env.args.size": 3, "env.args.max_steps": 2,
    "evaluation.tasks": 0, "track.tensorboard": False, "track.gifs": 0, "threads": 1,
}  # fmt: skip


def episodes(folder, **settings):
    run = arborl.run(output_dir=folder, **SMALL | settings)
    return list(EpisodeStore.read(EpisodeStore(run.folder / "episodes").paths()[0]))


def test_rivals_are_kept_and_change_nothing(tmp_path):
    plain = episodes(tmp_path / "plain")
    requests = episodes(tmp_path / "with_top_logprobs", **{"track.top_logprobs": 3})
    assert [[call.completion.tokens for call in one.calls] for one in requests] == [
        [call.completion.tokens for call in one.calls] for one in plain
    ]
    assert all(call.top_logprobs == () for one in plain for call in one.calls)
    for call in (call for one in requests for call in one.calls):
        output = call.completion
        assert len(call.top_logprobs) == len(output.tokens)
        for token, logprob, others in zip(output.tokens, output.logprobs, call.top_logprobs, strict=True):
            assert len(others) == 3
            assert token not in [other for other, _ in others]
            assert math.exp(logprob) + sum(math.exp(rng) for _, rng in others) < 1.01


def test_a_token_is_not_its_own_rival_and_what_could_not_be_drawn_is_none():
    heard = TopLogprobs(2)
    heard(7, -1.0, [(4, -0.5), (7, -1.0), (5, -3.0)])
    heard(4, -0.1, [(4, -0.1), (7, -2.0), (9, -math.inf)])
    assert heard.alternatives == [((4, -0.5), (5, -3.0)), ((7, -2.0),)]


def test_an_engine_that_cannot_tell_them_is_refused():
    with pytest.raises(ValueError, match=r"track\.top_logprobs=2 with engine=vllm"):
        RunConfig(track={"top_logprobs": 2}, engine={"name": "vllm"})
