"""MiniWoB++: in a browser where package, browser and driver are installed, otherwise with recorded pages."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import sys
from types import ModuleType

import numpy as np
import pytest

from arborl.envs import ENVS
from arborl.envs.adapters import miniwob_adapter
from arborl.envs.checker import check_env
from arborl.errors import ConfigError
from arborl.rollout.env_processes import ProcessEnv, ProcessPool
from arborl.types import Message, Task


def element(ref, tag, text="", children=(), **more):
    """As an element of `core.getDOMInfo()`, without places and colours."""
    return {"ref": ref, "tag": tag, "text": text, "children": list(children), "id": "", "classes": ""} | more


class Recorded:
    """As a browser, with pages recorded from `click-button`, `enter-text` and `choose-list`."""

    started, closed, episodes = 0, 0, 0

    def __init__(self):
        Recorded.started += 1

    def start(self, page, seed, mode):
        self.episodes += 1
        self.task, self.seed, self.mode = page.stem, seed, mode
        self.typed, self.chosen, self.focus, self.reward = "", "Albania", None, None
        return self.read()

    def read(self):
        if self.task == "enter-text":
            task = f'Enter "Name{self.seed % 7}" into the text field and press Submit.'
            children = [element(5, "INPUT_text", value=self.typed, id="tt"), element(6, "BUTTON", "Submit")]
        elif self.task == "choose-list":
            task = "Select Congo from the list and click Submit."
            children = [element(4, "SELECT"), element(6, "BUTTON", "Submit")]
        else:
            task = 'Click on the "Ok" button.'
            texts = [
                element(-1, "t", "some words"),
                element(9, "SPAN"),
                element(8, "text", "u", classes={"baseVal": ""}),
            ]
            children = [
                element(4, "BUTTON", "no"),
                element(5, "BUTTON", "Ok"),
                *texts,
                element(7, "INPUT_checkbox", value=False),
            ]
        for one in children:
            one["focused"] = one["ref"] == self.focus
        options = {"4": ["Albania", "Congo"]} if self.task == "choose-list" else {}
        dom = element(1, "BODY", children=[element(2, "DIV", children=children)])
        done, chosen = self.reward is not None, dict.fromkeys(options, self.chosen)
        return {
            "dom": dom,
            "options": options,
            "chosen": chosen,
            "task": task,
            "ready": True,
            "done": done,
            "reward": self.reward or 0.0,
        }

    def click(self, ref):
        self.focus = ref
        if self.task == "click-button" and ref in (4, 5):
            self.reward = 1.0 if ref == 5 else -1.0
        elif ref == 6:
            good = self.typed == f"Name{self.seed % 7}" or self.chosen == "Congo"
            self.reward = 1.0 if good else -1.0

    def select(self, ref, place):
        self.chosen = ["Albania", "Congo"][place]

    def send(self, text):
        self.typed += text

    def press(self, name):
        if name == "enter" and self.focus == 6:
            self.click(6)

    def close(self):
        Recorded.closed += 1


@pytest.fixture
def recorded(monkeypatch, tmp_path):
    """Arbor's adapter without a browser: names of pages, and recorded ones."""
    package = ModuleType("miniwob")
    package.__file__ = str(tmp_path / "__init__.py")
    pages = tmp_path / "html" / "miniwob"
    pages.mkdir(parents=True)
    for name in ("click-button", "enter-text", "choose-list"):
        (pages / f"{name}.html").touch()
    monkeypatch.setitem(sys.modules, "miniwob", package)
    monkeypatch.setitem(sys.modules, "selenium", ModuleType("selenium"))
    monkeypatch.setattr(miniwob_adapter.BROWSERS, "idle", [])
    monkeypatch.setattr(miniwob_adapter, "Browser", Recorded)
    monkeypatch.setattr(Recorded, "started", 0)
    monkeypatch.setattr(Recorded, "closed", 0)


def miniwob(task="click-button", **args):
    return ENVS.build("miniwob", {"task": task} | args, "env.args")


def play(env, *texts, task=None):
    async def run():
        opening = await env.reset(task or Task("t", seed=3), 0)
        steps = [await env.step(Message("assistant", text)) for text in texts]
        numbers = env.metrics()
        await env.close()
        return opening.messages[-1].content, steps, numbers

    return asyncio.run(run())


def solve(env):
    async def run():
        await env.reset(Task("t", seed=3), 0)
        step = None
        while (step is None or not step.over) and (text := env.oracle()) is not None:
            step = await env.step(Message("assistant", text))
        numbers = env.metrics()
        await env.close()
        return step.reward, numbers["success"]

    return asyncio.run(run())


@pytest.mark.parametrize("task", ["click-button", "enter-text", "choose-list"])
def test_recorded_pages_keep_our_contract_and_the_script_solves_them(recorded, task):
    assert check_env(lambda: miniwob(task), Task("t", seed=3)) == []
    assert solve(miniwob(task)) == (1.0, 1.0)


def test_a_page_is_shown_as_text_with_numbers(recorded):
    text, _, _ = play(miniwob())
    assert text.splitlines() == [
        'Click on the "Ok" button.',
        '[4] button "no"',
        '[5] button "Ok"',
        '"some words"',
        '[8] text "u"',
        "[7] input_checkbox not checked",
    ]
    assert '[4] select options=["Albania", "Congo"]' in play(miniwob("choose-list"))[0].replace('value="Albania" ', "")


def test_actions_are_read_with_and_without_tags_and_others_change_nothing(recorded):
    texts = ("hello", "click 99", "<answer>type 5 Name</answer>", 'type 5 "3"', "press F13", "press Tab", "click [6]")
    _, steps, numbers = play(miniwob("enter-text", format_penalty=-0.1), *texts)
    assert [step.info["valid"] for step in steps] == [0.0, 0.0, 1.0, 1.0, 0.0, 1.0, 1.0]
    assert [step.reward for step in steps[:3]] == [-0.1, -0.1, 0.0]
    assert 'value="Name3"' in steps[3].observation.messages[0].content
    assert (steps[-1].terminated, abs(steps[-1].reward)) == (True, 1.0)
    assert numbers["valid"] == pytest.approx(4 / 7)
    wrong = play(miniwob("choose-list"), 'select 4 "Atlantis"', 'select 6 "Congo"')[1]
    assert [step.info["valid"] for step in wrong] == [0.0, 0.0]
    assert play(miniwob(max_steps=1), "press Tab")[1][0].truncated


def test_a_wrong_click_costs_and_held_out_seeds_are_others(recorded):
    _, (step,), numbers = play(miniwob(), "click 4")
    assert (step.reward, step.terminated, numbers["success"]) == (-1.0, True, 0.0)

    def seeds(fields):
        found = set()
        for seed in range(40):
            env = miniwob()
            asyncio.run(env.reset(Task("t", seed=seed, fields=fields), 0))
            found.add((env.browser.seed, env.browser.mode))
            asyncio.run(env.close())
        return found

    train, held_out = seeds({}), seeds({"split": "held_out"})
    assert ({mode for _, mode in train}, {mode for _, mode in held_out}) == ({"train"}, {"test"})
    assert not {seed for seed, _ in train} & {seed for seed, _ in held_out}


def test_an_old_browser_is_replaced(recorded, monkeypatch):
    monkeypatch.setattr(miniwob_adapter, "MAX_EPISODES", 3)
    for _ in range(7):
        play(miniwob(), "press Tab")
    assert (Recorded.started, Recorded.closed) == (3, 2)


def test_a_browser_is_used_again_unless_a_call_was_left_in_it(recorded, monkeypatch):
    play(miniwob(), "press Tab")
    play(miniwob(), "press Tab")
    assert (Recorded.started, Recorded.closed) == (1, 0)
    env = miniwob()
    asyncio.run(env.reset(Task("t"), 0))
    monkeypatch.setattr(Recorded, "press", None)
    with pytest.raises(TypeError):
        asyncio.run(env.step(Message("assistant", "press Tab")))
    asyncio.run(env.close())
    assert (Recorded.started, Recorded.closed) == (1, 1)


def test_the_random_player_gives_legal_actions(recorded):
    env = miniwob("enter-text")
    asyncio.run(env.reset(Task("t", seed=3), 0))
    drawn = {env.random(np.random.default_rng(number)) for number in range(40)}
    assert drawn == set(env.actions())
    assert any(text.startswith('<answer>type 5 "Name') for text in drawn)


def test_unknown_tasks_and_missing_programs_are_named(recorded, monkeypatch):
    with pytest.raises(ConfigError, match="task='click-me': MiniWoB\\+\\+ has choose-list, click-button, enter-text"):
        miniwob("click-me")
    monkeypatch.setenv("MINIWOB_CHROMEDRIVER", "/no/such/driver")
    with pytest.raises(ConfigError, match=r"there is no /no/such/driver.*apt install"):
        miniwob_adapter._program("MINIWOB_CHROMEDRIVER", "chromedriver")


# ------------------------------------------------------------------------------------------------ a browser


@pytest.fixture
def real(monkeypatch):
    pytest.importorskip("miniwob", reason="needs pip install 'arborl[miniwob]'")
    browsers = ("google-chrome", "chromium-browser", "chrome", "chromium")
    if not (os.environ.get("MINIWOB_CHROMEDRIVER") or shutil.which("chromedriver")) or not any(
        map(shutil.which, browsers)
    ):
        pytest.skip("needs a browser and chromedriver")
    monkeypatch.setattr(miniwob_adapter.BROWSERS, "idle", [])
    yield
    miniwob_adapter._close_browsers()


@pytest.mark.parametrize("task", ["click-test", "click-button", "enter-text", "choose-list"])
def test_pages_in_a_browser_keep_our_contract_and_the_script_solves_them(real, task):
    assert check_env(lambda: miniwob(task), Task("t", seed=3), steps=5, seconds=60) == []
    assert solve(miniwob(task)) == (1.0, 1.0)


def test_a_killed_process_costs_no_other_episode_and_ends_its_browser(real):
    async def episodes():
        pool = ProcessPool(most=2)
        envs = [ProcessEnv(miniwob("enter-text"), pool, "miniwob", 120.0) for _ in range(2)]
        for env in envs:
            await env.reset(Task("t", seed=3), 0)
        killed = pool.alive[0]
        os.killpg(killed.child.pid, signal.SIGKILL)
        rewards = []
        for env in envs:
            step = None
            while step is None or not step.over:
                step = await env.step(Message("assistant", env.oracle()))
            rewards.append(step.reward)
            await env.close()
        pool.close()
        return rewards, killed.lost

    assert asyncio.run(episodes()) == ([1.0, 1.0], True)
