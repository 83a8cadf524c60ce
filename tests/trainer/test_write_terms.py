"""A run writes the loss terms of its sampled tokens."""

import numpy as np

import arborl
from arborl.rollout.episode_store import EpisodeStore
from arborl.rollout.term_store import TermStore

SMALL = {
    "rollout.tasks_per_step": 2, "rollout.group_size": 3, "evaluation.tasks": 0, "track.tensorboard": False, "steps": 2,
    "env.args.size": 3, "env.args.max_steps": 4, "track.timeline": 0, "track.gifs": 0,
}  # fmt: skip


def test_every_trained_token_is_in_its_episode(tmp_path):
    run = arborl.run(**SMALL, output_dir=tmp_path / "run")
    store = EpisodeStore(run.folder / "episodes")
    for step, path in enumerate(store.paths(), start=1):
        found = TermStore(run.folder / "terms").read(step)
        episodes = list(store.read(path))
        places = zip(found["episode"], found["call"], found["index"], strict=True)
        old = [episodes[e].calls[c].completion.logprobs[i] for e, c, i in places]
        np.testing.assert_allclose(found["logprob"], old, atol=1e-3)  # the engine's number is the learner's
        assert len(old) == int(found["of"]) == sum(episodes[e].sampled for e in set(found["episode"].tolist()))


def test_track_terms_0_writes_none(tmp_path):
    run = arborl.run(**SMALL, output_dir=tmp_path / "run", **{"track.terms": 0}, stub=True)
    assert not (run.folder / "terms").exists()
