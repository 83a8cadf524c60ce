"""MiniWoB++: small web tasks in a headless browser, as text with numbered elements.

The package `miniwob` provides the pages; Chromium or Chrome shows them, driven by `chromedriver`. A browser is used
again by later episodes of its process, and loads the page anew for each.
"""

from __future__ import annotations

import atexit
import json
import os
import re
import shutil
import threading
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from arborl.envs.adapters.other_packages import MissingRequirementError, require_package
from arborl.envs.adapters.text_games import IdlePool
from arborl.envs.env import Observation, Step, format_answer, parse_answer, split_of, task_split
from arborl.envs.games.text_game import TextGame, require
from arborl.seeds import derive
from arborl.types import Message, Metrics, Task

if TYPE_CHECKING:
    from numpy.random import Generator

RULES = (
    "Do the task on the web page. Each turn, answer with one action: <answer>click 3</answer>, "
    '<answer>type 3 "some text"</answer>, <answer>select 3 "an option"</answer> or <answer>press Enter</answer>. The '
    "number is that of an element; keys are Enter, Tab, Escape, Backspace, Delete, Space, Up, Down, Left and Right."
)
KEYS = {
    "enter": "ENTER", "tab": "TAB", "escape": "ESCAPE", "backspace": "BACKSPACE", "delete": "DELETE",
    "space": "SPACE", "up": "ARROW_UP", "down": "ARROW_DOWN", "left": "ARROW_LEFT", "right": "ARROW_RIGHT",
}  # fmt: skip
"""Names of keys and Selenium's names."""
ACTION = re.compile(
    r"click\s+\[?(?P<click>\d+)\]?|(?P<act>type|select)\s+\[?(?P<ref>\d+)\]?\s+(?P<text>.+)|press\s+(?P<key>\w+)",
    re.IGNORECASE | re.DOTALL,
)
START = """
core.EPISODE_MAX_TIME = 1e9;
Math.seedrandom(arguments[0]);
core.setDataMode(arguments[1]);
core.startEpisodeReal();
"""
"""Start of an episode. Its time limit is lifted: a model may answer slowly, and `max_steps` limits it."""
READ = """
var dom = core.getDOMInfo(), options = {}, chosen = {};
for (var ref in core.previousDOMInfo) {
  var element = core.previousDOMInfo[ref];
  if (element instanceof HTMLSelectElement) {
    options[ref] = Array.from(element.options).map(function (option) { return option.text; });
    chosen[ref] = element.selectedIndex < 0 ? '' : element.options[element.selectedIndex].text;
  }
}
var task = core.getUtterance();
return {dom: dom, options: options, chosen: chosen, task: typeof task === 'string' ? task : task.utterance,
        ready: WOB_TASK_READY, done: WOB_DONE_GLOBAL, reward: WOB_RAW_REWARD_GLOBAL};
"""
SELECT = """
var element = core.previousDOMInfo[arguments[0]];
element.selectedIndex = arguments[1];
element.dispatchEvent(new Event('input', {bubbles: true}));
element.dispatchEvent(new Event('change', {bubbles: true}));
"""
READY_TRIES = 100
MAX_EPISODES = 50
"""Episodes of a browser; its memory grows with the pages that it has shown."""


# ------------------------------------------------------------------------------------------------ the browser


def _program(variable: str, *names: str) -> str:
    """A program of the variable, else the first that is installed."""
    given = os.environ.get(variable)
    found = shutil.which(given) if given else next(filter(None, map(shutil.which, names)), None)
    if found is None:
        raise MissingRequirementError(
            f"MiniWoB++ needs a browser and its driver, and there is no {given or names[-1]}. On Debian: apt install "
            f"chromium chromium-driver. Other paths: the variables MINIWOB_CHROME_BINARY and MINIWOB_CHROMEDRIVER."
        )
    return found


class Browser:
    """A headless browser that shows pages of MiniWoB++."""

    episodes = 0

    def __init__(self) -> None:
        require_package("selenium", "miniwob")
        webdriver = require_package("selenium.webdriver", "miniwob")
        service = require_package("selenium.webdriver.chrome.service", "miniwob").Service
        options = webdriver.ChromeOptions()
        options.binary_location = _program(
            "MINIWOB_CHROME_BINARY", "google-chrome", "chromium-browser", "chrome", "chromium"
        )
        for argument in ("headless=new", "disable-gpu", "disable-dev-shm-usage", "window-size=500,400"):
            options.add_argument(argument)
        if hasattr(os, "geteuid") and os.geteuid() == 0:
            options.add_argument("no-sandbox")  # Chromium refuses to start as root with it
        driver = _program("MINIWOB_CHROMEDRIVER", "chromedriver")
        self.driver = webdriver.Chrome(service=service(executable_path=driver), options=options)

    def start(self, page: Path, seed: int, mode: str) -> dict[str, Any]:
        self.episodes += 1
        self.driver.get(page.as_uri())
        self.driver.execute_script(START, seed, mode)
        for _ in range(READY_TRIES):
            found = self.read()
            if found["ready"]:
                return found
            threading.Event().wait(0.05)
        raise RuntimeError(f"{page.name} does not become ready")

    def read(self) -> dict[str, Any]:
        found: dict[str, Any] = self.driver.execute_script(READ)
        return found

    def click(self, ref: int) -> None:
        self.driver.execute_script("core.elementClick(arguments[0]);", ref)

    def select(self, ref: int, place: int) -> None:
        self.driver.execute_script(SELECT, ref, place)

    def send(self, text: str) -> None:
        chains = require_package("selenium.webdriver.common.action_chains", "miniwob").ActionChains
        chains(self.driver, duration=0).send_keys(text).perform()

    def press(self, name: str) -> None:
        keys = require_package("selenium.webdriver.common.keys", "miniwob").Keys
        self.send(getattr(keys, KEYS[name]))

    def close(self) -> None:
        with suppress(Exception):  # it may have ended already
            self.driver.quit()


BROWSERS = IdlePool(lambda: Browser())


@atexit.register
def _close_browsers() -> None:
    while BROWSERS.idle:
        BROWSERS.idle.pop().close()


# ------------------------------------------------------------------------------------------------ the environment


@dataclass(eq=False)
class MiniWob(TextGame):
    """A task of MiniWoB++. The reward, from -1 to 1, is the page's at the end of the task, whatever time it took."""

    tagged = True
    isolated = True
    rules = RULES
    invalid = "That is no action on this page."

    task: str = "click-test"
    """Name, for example `click-button`, `enter-text` or `choose-list`."""
    max_steps: int = 10
    """The episode is truncated after this many messages."""
    format_penalty: float = 0.0
    """Reward of a message that is no action on the page."""

    def __post_init__(self) -> None:
        self.check_limits()
        package = require_package("miniwob", "miniwob")
        require_package("selenium", "miniwob")
        pages = Path(package.__file__).parent / "html" / "miniwob"
        self.page = pages / f"{self.task}.html"
        known = sorted(page.stem for page in pages.glob("*.html"))
        require(self.task in known, f"task={self.task!r}: MiniWoB++ has {', '.join(known)}")
        self.browser: Any = None

    async def reset(self, task: Task, seed: int) -> Observation:
        split = task_split(task, "miniwob")
        numbers = (derive(task.seed, "miniwob", number) % 2**31 for number in range(1000))
        drawn = next(number for number in numbers if split_of((self.task, number)) == split)
        self.browser = self.browser or BROWSERS.take()
        self.is_idle = False
        self._take(self.browser.start(self.page, drawn, "train" if split == "train" else "test"))
        self.is_idle, self.reward = True, 0.0
        return self.opening()

    def _take(self, found: Mapping[str, Any]) -> None:
        self.instruction, self.is_done = str(found["task"]), bool(found["done"])
        self.options = {int(ref): list(texts) for ref, texts in found["options"].items()}
        self.elements = list(_elements(found["dom"]))
        for element in self.elements:
            if element["ref"] in self.options:
                element["value"] = found["chosen"][str(element["ref"])]

    async def step(self, action: Message) -> Step:
        found = parse_answer(action.content)
        act = self._parse((action.content if found is None else found).strip())
        if act is None:
            return self.next_step(False, False, self.format_penalty, False)
        before, self.is_idle = self.state_key(), False
        name, ref, text = act
        if name == "press":
            self.browser.press(text)
        elif name == "select":
            self.browser.select(ref, self.options[ref].index(text))
        else:
            self.browser.click(ref)
        if name == "type":
            self.browser.send(text)
        read = self.browser.read()
        self._take(read)
        self.is_idle = True
        self.reward = float(read["reward"]) if self.is_done else 0.0
        return self.next_step(True, self.state_key() != before, self.reward, self.is_done)

    def _parse(self, text: str) -> tuple[str, int, str] | None:
        """The action, its element and its text or key; None for what is no action on this page."""
        found = ACTION.fullmatch(text)
        if found is None:
            return None
        if found["key"]:
            return ("press", 0, found["key"].lower()) if found["key"].lower() in KEYS else None
        ref = int(found["click"] or found["ref"])
        if ref not in {element["ref"] for element in self.elements}:
            return None
        if found["click"]:
            return "click", ref, ""
        written = _unquoted(found["text"].strip())
        if found["act"].lower() == "type":
            return ("type", ref, written) if written.isprintable() else None
        return ("select", ref, written) if written in self.options.get(ref, ()) else None

    def metrics(self) -> Metrics:
        return {"success": float(self.is_done and self.reward >= 1.0), "score": self.reward, **self.shares()}

    def render(self) -> str:
        lines = [_line(element, self.options.get(element["ref"])) for element in self.elements]
        return "\n".join([self.instruction, "The task is over." if self.is_done else "\n".join(lines)])

    def state_key(self) -> str:
        return self.render()

    def actions(self) -> list[str]:
        """Clicks, options, and texts of the instruction; other texts are legal too."""
        if self.browser is None:
            return []
        words = re.findall(r'"([^"]+)"', self.instruction)
        legal = [f"click {element['ref']}" for element in self.elements if element["ref"] > 0]
        for element in self.elements:
            if element["tag"] in TYPED:
                legal += [f"type {element['ref']} {json.dumps(word)}" for word in words]
        for ref, texts in self.options.items():
            legal += [f"select {ref} {json.dumps(text)}" for text in texts]
        return [format_answer(text) for text in [*legal, "press Enter"]]

    def random(self, rng: Generator) -> str | None:
        legal = self.actions()
        return legal[int(rng.integers(len(legal)))] if legal else None

    def oracle(self) -> str | None:
        """The next action of a script for some simple tasks; None for the others."""
        script = SCRIPTS.get(self.task)
        act = None if script is None or self.is_done else script(self)
        return None if act is None else format_answer(act)

    def find(self, tag: str, text: str | None = None) -> int | None:
        """The number of the first element with this tag and text."""
        for element in self.elements:
            if element["tag"] == tag and (text is None or element["text"] == text):
                return int(element["ref"])
        return None

    def snapshot(self) -> None:
        return None

    async def close(self) -> None:
        """Keep the browser for the next episode; an old one, or one left in the middle of a call, is ended."""
        browser, self.browser = self.browser, None
        if browser is not None and self.is_idle and browser.episodes < MAX_EPISODES:
            BROWSERS.give_back(browser)
        elif browser is not None:
            browser.close()


TYPED = ("input_text", "input_password", "input_number", "input_date", "input_time", "input_search", "textarea")
"""Elements that take text."""


def _unquoted(text: str) -> str:
    if len(text) > 1 and text[0] == text[-1] == '"':
        with suppress(ValueError):
            return str(json.loads(text))
        return text[1:-1]
    return text


def _elements(dom: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """What a reader of the page can name: elements without children, controls, and texts between elements."""
    text, tag = str(dom.get("text") or "").strip(), str(dom["tag"]).lower()
    is_control = tag in ("select", "button", "a") or tag.startswith(("input", "textarea"))
    if is_control or (not dom["children"] and (text or tag not in ("br", "hr", "body", "div", "span", "p"))):
        value = dom.get("value")
        yield {
            "ref": int(dom["ref"]), "tag": tag, "text": text, "value": value, "id": str(dom.get("id") or ""),
            "classes": dom.get("classes") if isinstance(dom.get("classes"), str) else "",
            "focused": bool(dom.get("focused")),
        }  # fmt: skip
    for child in dom["children"]:
        yield from _elements(child)


def _line(element: Mapping[str, Any], options: list[str] | None) -> str:
    """`[5] input_text #tt value="x" focused`"""
    if element["ref"] < 0:  # a text between elements has no lasting number
        return f'"{element["text"]}"'
    value = element["value"]
    state = {True: "checked", False: "not checked"}.get(value) if isinstance(value, bool) else None
    text = element["text"]
    parts = [
        f"[{element['ref']}] {element['tag']}", json.dumps(text, ensure_ascii=False) if text else "",
        f"#{element['id']}" if element["id"] else "", f".{element['classes']}" if element["classes"] else "",
        f"value={json.dumps(value, ensure_ascii=False)}" if isinstance(value, str) and value else "",
        f"options={json.dumps(options, ensure_ascii=False)}" if options is not None else "",
        state or "", "focused" if element["focused"] else "",
    ]  # fmt: skip
    return " ".join(filter(None, parts))


# ------------------------------------------------------------------------------------------------ scripts


def _quoted(env: MiniWob) -> str:
    return (re.findall(r'"([^"]*)"', env.instruction) or [""])[0]


def _click(env: MiniWob, tag: str, text: str | None = None) -> str | None:
    ref = env.find(tag, text)
    return None if ref is None else f"click {ref}"


def _enter_text(env: MiniWob) -> str | None:
    field = next((element for element in env.elements if element["tag"] in TYPED), None)
    if field is None:
        return None
    if field["value"] != _quoted(env):
        return f"type {field['ref']} {json.dumps(_quoted(env))}"
    return _click(env, "button", "Submit")


def _choose_list(env: MiniWob) -> str | None:
    ref = env.find("select")
    wanted = re.fullmatch(r"Select (.+) from the list and click Submit\.", env.instruction)
    if ref is None or wanted is None:
        return None
    chosen = any(element["ref"] == ref and element["value"] == wanted[1] for element in env.elements)
    return _click(env, "button", "Submit") if chosen else f"select {ref} {json.dumps(wanted[1])}"


SCRIPTS = {
    "click-test": lambda env: _click(env, "button"),
    "click-test-2": lambda env: _click(env, "button", "ONE"),
    "click-button": lambda env: _click(env, "button", _quoted(env)),
    "enter-text": _enter_text,
    "choose-list": _choose_list,
    "focus-text": lambda env: _click(env, "input_text"),
}
"""Players of simple tasks, by name of the task."""
