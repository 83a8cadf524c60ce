"""An episode becomes a moving picture again."""

import asyncio

import pytest
from PIL import Image

from arborl.envs.env import Env, Observation, Step
from arborl.envs.games.frozen_lake import FrozenLake
from arborl.rollout.recorder import EpisodeLimits, RecordedEnv
from arborl.seeds import derive
from arborl.types import Call, Completion, Episode, FinishReason, Message, Task, Turn
from arborl.view import Frame, replay, save_gif


class Counter(Env):
    """Counts messages; its picture is as many grey levels bright, its start depends on task and seed."""

    def __init__(self, pictures=True):
        self.pictures, self.closed, self.heard = pictures, 0, []

    async def reset(self, task, seed):
        self.start, self.heard = (task.seed, seed), []
        return Observation((Message("user", "go"),))

    async def step(self, action):
        self.heard.append(action.content)
        return Step(Observation(()), reward=0.5)

    async def close(self):
        self.closed += 1

    def picture(self):
        return Image.new("RGB", (40, 40), (10 * len(self.heard),) * 3) if self.pictures else None


def episode(*words):
    turns = [Turn(Message("assistant", word, sampled=True), reward=0.5) for word in words]
    return Episode("e", Task("t", seed=3), seed=9, turns=turns)


def test_a_replay_says_the_recorded_words_to_a_fresh_environment():
    env = Counter()
    frames = asyncio.run(replay(env, episode("Left", "Down")))
    assert env.start == (3, derive(9, "environment"))
    assert env.heard == ["Left", "Down"]
    assert env.closed == 1
    assert [(frame.caption, frame.note) for frame in frames] == [
        ("", "environment so far 0.00"),
        ("Left", "environment so far 0.50"),
        ("Down", "environment so far 1.00"),
    ]
    assert [frame.picture.getpixel((0, 0))[0] for frame in frames] == [0, 10, 20]


def test_a_turn_has_the_text_of_all_its_calls_and_the_last_frame_the_reward_and_its_parts():
    played = episode("42")
    played.rewards = {"env": 1.0, "brevity": 0.25}
    completion = Completion((2,), (-1.0,), FinishReason.STOP)
    replies = [Message("assistant", text, sampled=True) for text in ("calc(6*7)", "42")]
    played.calls = [Call((1,), completion, 0, reply=reply) for reply in replies]
    first, last = asyncio.run(replay(Counter(), played))
    assert (first.caption, last.caption) == ("", "calc(6*7)\n42")
    assert (first.note, last.note) == ("environment so far 0.00", "reward +1.25 (env +1, brevity +0.25)")


def recorded_on_slippery_ice():
    """An episode as the rollout records it."""
    episode = Episode("e", Task("t", seed=5), seed=11)

    async def play():
        env = RecordedEnv(FrozenLake(slippery=True), "frozen_lake", EpisodeLimits(), episode)
        await env.reset(episode.task, 0)
        while not (await env.step(Message("assistant", env.env.oracle()))).over:
            pass

    asyncio.run(play())
    return episode


def test_a_replay_equals_the_record_also_on_slippery_ice_and_another_environment_is_a_warning(caplog):
    episode = recorded_on_slippery_ice()
    env = FrozenLake(slippery=True)
    frames = asyncio.run(replay(env, episode))
    assert len(frames) == len(episode.turns) + 1
    assert episode.turns[-1].observation[0].content == env.render()
    assert caplog.text == ""
    asyncio.run(replay(FrozenLake(size=5), episode))
    assert "the replay of episode e differs from the record" in caplog.text


def test_the_gif_has_a_frame_for_the_start_and_for_each_turn_and_equal_frames_are_not_merged(tmp_path):
    still = save_gif([Frame(Image.new("RGB", (64, 64)), "wait", "reward 0.00")] * 5, tmp_path / "still.gif")
    with Image.open(still) as gif:
        assert gif.n_frames == 5
    frames = asyncio.run(replay(Counter(), episode("Left", "Left", "Down")))
    path = save_gif(frames, tmp_path / "frames" / "e.gif", seconds=0.5, last_seconds=2.0)
    with Image.open(path) as gif:
        durations = []
        for index in range(gif.n_frames):
            gif.seek(index)
            durations.append(gif.info["duration"])
    assert durations == [500, 500, 500, 2000]


@pytest.mark.parametrize("size", [(1, 1), (50, 20), (192, 192), (2000, 900)])
@pytest.mark.parametrize("words", ["", "word " * 400, "x" * 4000, "two\n\nlines", "<answer>√</answer> ürgh 漢字"])
def test_any_picture_and_any_words_fit(tmp_path, size, words):
    path = save_gif([Frame(Image.new("RGB", size), words), Frame(Image.new("P", size), words)], tmp_path / "e.gif")
    with Image.open(path) as gif:
        assert gif.width <= 720
        assert 192 <= gif.height <= 480


def test_an_environment_without_pictures_gives_no_frames_and_saving_none_says_why(tmp_path):
    frames = asyncio.run(replay(Counter(pictures=False), episode("Left")))
    assert frames == []
    with pytest.raises(ValueError, match="the environment has no images"):
        save_gif(frames, tmp_path / "e.gif")


def test_the_environment_is_closed_when_a_replay_breaks():
    class Breaks(Counter):
        async def step(self, action):
            raise RuntimeError("gone")

    env = Breaks()
    with pytest.raises(RuntimeError):
        asyncio.run(replay(env, episode("Left")))
    assert env.closed == 1
