"""`track.render_every` draws training and validation episodes, with the messages of the model beside the frames."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from PIL import Image

import arborl
from arborl.envs.env import Env, Observation, Step
from arborl.rollout.runner import EpisodeFactories
from arborl.training_run.artifacts import EpisodeRenderer, extremes
from arborl.types import Call, Completion, Episode, FinishReason, Group, Message, Task, Turn
from arborl.view import replay
from arborl.view.gif import turn_text


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    home = tmp_path_factory.mktemp("render")
    arborl.run(
        engine="scripted",
        steps=3,
        output_dir=home / "run",
        **{
            "track.render_every": 2,
            "track.gifs": 2,
            "track.tensorboard": False,
            "rollout.tasks_per_step": 2,
            "rollout.group_size": 3,
            "evaluation.tasks": 4,
            "evaluation.every": 2,
            "evaluation.greedy": False,
            "model.device": "cpu",
        },
    )
    return home / "run" / "frames"


def test_training_episodes_are_drawn_every_so_many_steps(folder):
    names = sorted(path.name for path in (folder / "train").iterdir())
    assert [name[:11] for name in names] == [f"step-{step:06}" for step in (1, 1, 3, 3)]
    assert all(name.endswith(".gif") for name in names)
    names = sorted(path.name for path in (folder / "validation").iterdir())
    assert [name[:11] for name in names] == [f"step-{step:06}" for step in (0, 0, 2, 2, 3, 3)]


def test_every_gif_is_listed_with_the_id_of_its_episode_which_is_also_in_its_name(folder):
    listed = json.loads((folder / "episodes.json").read_text())
    assert set(listed) == {str(path.relative_to(folder)) for path in folder.rglob("*.gif")}
    for file, (kind, step, episode) in listed.items():
        assert kind == ("train" if file.startswith("train/") else "evaluation")
        assert Path(file).name == f"step-{step:06}-{episode.replace('/', '-')}.gif"


def test_the_words_stand_beside_the_frames(folder):
    path = sorted((folder / "train").iterdir())[0]
    with Image.open(path) as gif:
        assert gif.n_frames > 1
        gif.seek(1)
        panel = gif.convert("L").crop((192, 36, gif.width, 80))
    assert panel.getextrema()[0] < 100  # there is ink


class Words(Env):
    """Shows itself as text alone, and its functions are plain."""

    def reset(self, task, seed):
        self.text = "before"
        return Observation((Message("user", self.text),))

    def step(self, action):
        self.text = f"after {action.content}"
        return Step(Observation((Message("user", self.text),)), terminated=True)

    def render(self):
        return self.text

    def close(self):
        pass


def test_an_environment_without_pictures_is_drawn_as_its_text():
    turn = Turn(Message("assistant", "yes", sampled=True), (Message("user", "after yes"),))
    episode = Episode("e", Task("t"), opening=(Message("user", "before"),), turns=[turn])
    frames = asyncio.run(replay(Words(), episode))
    assert [frame.caption for frame in frames] == ["", "yes"]
    assert frames[0].picture.tobytes() != frames[1].picture.tobytes()


def test_all_replies_of_a_turn_are_shown_with_their_tool_calls():
    calls = [
        Call((1,), Completion(tuple(ids), (0.0,) * len(ids), FinishReason.STOP), 0) for ids in ([65, 66, 0], [67, 0])
    ]
    episode = Episode("e", Task("t"), turns=[Turn(Message("assistant", "C", sampled=True))], calls=calls)

    def decode(ids):
        return "".join("<|im_end|>" if i == 0 else chr(i) for i in ids)

    assert turn_text(episode, 0, decode) == "AB\nC"
    assert turn_text(episode, 0, None) == "C"
    episode.calls.pop(0)
    assert turn_text(episode, 0, decode) == "C"


def test_an_episode_that_cannot_be_drawn_is_reported_and_costs_nothing_else(tmp_path, caplog):
    class Broken(Words):
        def step(self, action):
            raise RuntimeError("gone")

    broken = {"a": Broken, "b": Words}
    episode_factories = EpisodeFactories(agent=lambda task: None, env=lambda task: broken[task.id]())
    turn = Turn(Message("assistant", "yes"), (Message("user", "after yes"),))
    groups = [
        Group(Task(name), [Episode(f"{name}#0", Task(name), opening=(Message("user", "before"),), turns=[turn])])
        for name in "ab"
    ]
    written = asyncio.run(EpisodeRenderer(episode_factories, lambda ids: "", tmp_path, 1, 4).draw("train", 7, groups))
    assert [path.name for path in written] == ["step-000007-b#0.gif"]
    assert "episode a#0 could not be rendered" in caplog.text


def test_the_best_and_the_worst_are_drawn_first():
    episodes = [Episode(str(reward), Task("t"), rewards={"env": reward}) for reward in (0.3, 1.0, 0.0, 0.6)]
    assert [episode.reward for episode in extremes(episodes, 3)] == [1.0, 0.0, 0.6]
    assert len(extremes(episodes, 9)) == 4
