"""Episodes in a browser: one number on every page, the sign of rewards, each tool call once."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest

pytest.importorskip("playwright", reason="needs a browser: `make test-browser` installs what it takes and runs this")
from PIL import Image
from playwright.sync_api import expect
from web_runs import add_metrics, made_group, tokenizer, write_terms

from arborl.rollout.episode_store import EpisodeStore
from arborl.types import Message, ToolCall, Turn
from arborl.view import Frame, save_gif, write_report

EPISODE = "lake/001-0#2"
PLACE = "run=run&kind=train&step=1&line=2"
REWARDS = (1.0, 0.0, -0.01, 0.5)


def with_tool(episode):
    """The first call asks a calculator, whose result is in the context of the second."""
    first, second = episode.calls
    text = '<tool_call>{"name": "calculator", "arguments": {"expression": "12 + 30"}}</tool_call>'
    call = ToolCall("call_0", "calculator", {"expression": "12 + 30"})
    asked = Message("assistant", text, (call,), sampled=True)
    answer = Message("assistant", "<answer>42</answer>", sampled=True)
    result = Message("tool", "= 42", tool_call_id="call_0", name="calculator")
    episode.calls[:] = [
        replace(first, messages=episode.opening, reply=asked),
        replace(second, messages=(*episode.opening, asked, result), reply=answer, turn=0),
    ]
    episode.turns[:] = [Turn(answer)]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("episodes") / "run"
    folder.mkdir()
    (folder / "config.yaml").write_text("name: run\nseed: 1\nmodel: {name: seedling}\nalgorithm: grpo\nenv: lake\n")
    group = made_group(tokenizer(), 1, 0, 4, 0)
    for episode, reward in zip(group.episodes, REWARDS, strict=True):
        episode.rewards = {"env": reward}
        with_tool(episode)
    EpisodeStore(folder / "episodes").write(1, [group])
    write_terms(folder, 1, [group])
    add_metrics(folder, 1)
    gif = save_gif([Frame(Image.new("RGB", (32, 32)), "")], folder / "frames" / "step-000001-lake-001-0#2.gif")
    (folder / "frames" / "episodes.json").write_text(json.dumps({gif.name: ["train", 1, EPISODE]}))
    return folder


@pytest.fixture(scope="module")
def viewer(run, viewed):
    return viewed(run.parent)


def at(page, viewer, where, ready):
    page.goto("about:blank")
    page.goto(f"{viewer}/{where}")
    page.wait_for_selector(ready)


def test_an_episode_has_the_same_number_on_every_page(page, viewer, run):
    at(page, viewer, "#/episodes?run=run", "tbody tr")
    page.get_by_role("link", name=EPISODE).click()
    expect(page.locator("h1")).to_have_text(f"Episode {EPISODE}")
    assert page.title().startswith(f"Episode {EPISODE}")
    expect(page.locator(".chip[aria-current]")).to_contain_text("#2")
    expect(page.locator(".chip")).to_have_count(len(REWARDS))
    expect(page.locator(".gifs img")).to_have_count(1)  # its replay
    at(page, viewer, f"#/group?{PLACE}", ".tree rect")
    row = page.locator("tbody tr.on")
    expect(row.get_by_role("link")).to_have_text("#2")
    expect(row.get_by_role("checkbox")).to_have_attribute("aria-label", "compare episode #2 with another")
    row.get_by_role("link").click()
    expect(page.locator("h1")).to_have_text(f"Episode {EPISODE}")
    at(page, viewer, f"#/beside?{PLACE}&other=0", ".two h2")
    assert page.locator(".two h2").all_inner_texts() == [EPISODE, "lake/001-0#0"]
    at(page, viewer, "#/gradient?run=run&step=1", ".pushes tbody tr")
    page.locator(".bars").get_by_role("link", name=EPISODE).click()
    expect(page.locator(".chip[aria-current]")).to_contain_text("#2")
    page.get_by_role("tab", name="Tokens").click()
    page.locator(".token.contested").first.hover()
    rivals = page.locator(".about .rivals").last.locator("button").all_inner_texts()
    assert {text.split()[0] for text in rivals} <= {"#0", "#1", "#3"}
    page.goto(write_report(run, out=run.parent / "report.html").as_uri())
    assert f"episode {EPISODE}" in page.locator("body").inner_text()
    expect(page.locator("figcaption")).to_have_text(f"episode {EPISODE} · step 1")


def colour(page, locator):
    return locator.evaluate("one => getComputedStyle(one).color"), page.evaluate(
        """() => Object.fromEntries(["good", "bad", "faint"].map((name) => {
            const one = document.body.appendChild(document.createElement("i"));
            one.style.color = `var(--${name})`;
            const found = getComputedStyle(one).color;
            one.remove();
            return [name, found];
        }))"""
    )


WORTH = {"#0": ("+1", "good"), "#1": ("0", "faint"), "#2": ("−0.01", "bad"), "#3": ("+0.5", "good")}


@pytest.mark.parametrize("number", WORTH)
def test_rewards_are_green_with_a_plus_red_with_a_minus_or_neutral(page, viewer, number):
    text, name = WORTH[number]
    place = f"run=run&kind=train&step=1&line={number[1]}"
    worth = ".positive, .negative, .zero"
    places = {
        "#/episodes?run=run": page.locator("tbody tr", has_text=f"lake/001-0{number}").locator(worth).first,
        f"#/episode?{place}": page.locator(".outcome b").locator(worth),
        f"#/episode?{place}&": page.locator(".chip[aria-current]").locator(worth),
        f"#/group?{place}": page.locator("tbody tr.on").locator(worth),
        f"#/beside?{place}&other=0": page.locator(".two .facts").first.locator(worth),
    }
    for where, locator in places.items():
        at(page, viewer, where, "h1")
        expect(locator).to_have_text(text)
        shown, known = colour(page, locator)
        assert shown == known[name], where


def test_the_bars_of_a_gradient_have_the_sign_of_what_they_do_to_the_probability(page, viewer):
    at(page, viewer, "#/gradient?run=run&step=1", ".bars li")
    rows = {row.locator("a").inner_text(): row for row in page.locator(".bars").last.locator("li").all()}
    likelier, less = rows["lake/001-0#0"], rows["lake/001-0#2"]  # the sign of their advantages
    expect(likelier.locator(".bar")).to_have_class(re.compile("positive"))
    expect(likelier).to_contain_text("▲")
    expect(less.locator(".bar")).to_have_class(re.compile("negative"))
    expect(less).to_contain_text("▼")


def test_an_episode_opens_as_a_conversation_with_each_tool_call_once(page, viewer):
    at(page, viewer, f"#/episode?{PLACE}", ".conversation")
    conversation = page.locator(".conversation")
    expect(page.get_by_role("tab", name="Conversation")).to_have_attribute("aria-selected", "true")
    expect(page.locator(".lens")).to_be_hidden()
    words = conversation.inner_text()
    assert [words.count(word) for word in ("calculator", "12 + 30", "= 42", "<answer>42</answer>")] == [1, 1, 1, 1]
    assert "<tool_call>" not in words
    assert [one.split(" ")[0] for one in conversation.locator(".message > .role").all_inner_texts()] == [
        "system", "user", "assistant", "assistant",
    ]  # fmt: skip
    expect(conversation.locator("> *").last).to_contain_text("Reward −0.01")


def test_the_tabs_are_in_the_address_and_work_with_keys(page, viewer):
    at(page, viewer, f"#/episode?{PLACE}", ".conversation")
    page.get_by_role("tab", name="Conversation").focus()
    page.keyboard.press("ArrowRight")
    expect(page.get_by_role("tab", name="Tokens")).to_be_focused()
    expect(page.locator(".lens")).to_be_visible()
    expect(page.locator(".conversation")).to_be_hidden()
    page.reload()
    expect(page.locator(".lens")).to_be_visible()
    page.keyboard.press("v")
    expect(page.locator(".conversation")).to_be_visible()


def test_a_link_to_a_token_opens_the_tokens(page, viewer):
    at(page, viewer, f"#/episode?{PLACE}&token=0.1", ".about dl")
    expect(page.get_by_role("tab", name="Tokens")).to_have_attribute("aria-selected", "true")


def test_the_number_of_a_restarted_or_foreign_episode_is_the_end_of_its_id(page, viewer):
    at(page, viewer, "#/episodes?run=run", "tbody tr")
    found = page.evaluate(
        """async () => { const { numberOf } = await import("/static/dom.js");
        const ids = [["t#2+1", "t"], ["t#2", "other"], ["plain", ""]];
        return ids.map(([episode, task]) => numberOf({ episode, task })); }"""
    )
    assert found == ["#2+1", "t#2", "plain"]
