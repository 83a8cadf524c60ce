"""The viewer in a browser, as people use it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("playwright", reason="needs a browser: `make test-browser` installs what it takes and runs this")
from playwright.sync_api import expect

LOOKS = (Path(__file__).parent / "looks.js").read_text()
PLACE = "run=a&kind=train&step=2&line=1"
PAGES = {
    "runs": "#/runs?run=a&run=b&smooth=0.5",
    "grouped": "#/runs?by=learner.lr",
    "run": "#/run?run=a&settings=all",
    "episodes": "#/episodes?run=a",
    "episode": f"#/episode?{PLACE}&colour=advantage&token=0.1",
    "conversation": f"#/episode?{PLACE}",
    "failed": "#/episode?run=a&kind=train&step=2&line=6",
    "group": f"#/group?{PLACE}",
    "beside": f"#/beside?{PLACE}&other=0",
    "gradient": "#/gradient?run=a&step=2",
}
READY = {
    "runs": ".chart svg", "grouped": "tr.group", "run": ".findings li", "episodes": "tbody tr",
    "episode": ".about dl", "conversation": ".tool-result",
    "failed": ".trace", "group": ".tree rect", "beside": ".parted", "gradient": ".pushes tbody tr",
}  # fmt: skip


def at(page, address, name):
    page.goto(f"{address}/{PAGES[name]}")
    page.wait_for_selector(READY[name])


def test_runs_stand_side_by_side_with_what_they_do_not_share(page, address):
    at(page, address, "runs")
    expect(page.locator(".runs tbody tr")).to_have_count(2)
    expect(page.locator(".differences")).to_contain_text("learner.lr")
    expect(page.locator(".differences")).to_contain_text("0.002")
    plot = page.locator(".chart", has_text="reward/mean").locator(".plot")
    plot.hover(position={"x": 200, "y": 80})
    tip = page.locator(".chart", has_text="reward/mean").locator(".tip")
    expect(tip).to_contain_text("step 3")
    expect(tip).to_contain_text("0.3")
    assert (
        page.locator(".cursor").evaluate_all("all => all.filter((one) => Number(one.getAttribute('x1')) > 0).length")
        > 1
    )
    page.get_by_label("axis").select_option("seconds")
    plot.hover(position={"x": 210, "y": 80})
    expect(tip).to_contain_text("s of training 6")
    assert "axis=seconds" in page.url


def test_episodes_are_filtered_and_the_address_leads_back(page, address):
    at(page, address, "episodes")
    expect(page.locator("main")).to_contain_text("48 episodes")
    page.get_by_label("text").fill("zebra2 righ")
    expect(page.locator("main")).to_contain_text("of 2 episodes")
    page.locator("select[name=stop]").select_option("done")
    page.reload()
    expect(page.locator("main")).to_contain_text("of 2 episodes")
    page.get_by_role("button", name="Clear").click()
    expect(page.locator("main")).to_contain_text("48 episodes")
    page.get_by_role("button", name=re.compile("^reward")).click()
    expect(page.locator("th[aria-sort=descending]")).to_contain_text("reward")
    expect(page.locator("tbody tr").first).to_contain_text("1.25")


def test_a_token_tells_everything_that_is_known_of_it(page, address):
    page.goto(f"{address}/#/episodes?run=a&step_from=2&step_to=2")
    page.get_by_role("link", name="lake/002-0#1").click()
    page.get_by_role("tab", name="Tokens").click()
    page.locator(".token.sampled", has_text="Right").first.hover()
    about = page.locator(".about")
    for name in (
        "probability",
        "log-probability, learner",
        "ratio",
        "advantage",
        "weight",
        "entropy",
        "pull",
        "version",
    ):
        expect(about).to_contain_text(name)
    expect(about).to_contain_text("Most likely other tokens")
    expect(about).to_contain_text("Jump")
    expect(about).to_contain_text("Other episodes sampled here")
    expect(about).to_contain_text("Left")
    before = page.locator(".token.sampled").first.evaluate("one => getComputedStyle(one).backgroundColor")
    page.locator("select[name=colour]").select_option("advantage")
    assert page.locator(".token.sampled").first.evaluate("one => getComputedStyle(one).backgroundColor") != before
    page.reload()
    expect(page.locator(".about")).to_contain_text("Other episodes sampled here")  # the token is in the address


def test_hostile_words_are_text(page, address):
    at(page, address, "conversation")
    expect(page.locator(".tool-result").first).to_contain_text("<script>window.hacked = 1</script>")
    expect(page.locator(".conversation")).to_contain_text("⟨U+202E⟩")
    expect(page.locator(".conversation")).to_contain_text("bell␇")
    at(page, address, "failed")
    expect(page.locator(".notice.bad")).to_contain_text("<script>")


def test_the_tree_and_two_episodes_from_where_they_part(page, address):
    at(page, address, "group")
    page.locator(".tree g").nth(1).hover()
    expect(page.locator("div.stretch")).to_contain_text("sampled by")
    page.get_by_label("compare episode #0 with another").check()
    page.get_by_label("compare episode #1 with another").check()
    page.get_by_role("link", name="Compare both episodes").click()
    expect(page.locator("main")).to_contain_text("They diverge in call 1, at token 2 of the reply")
    expect(page.locator(".parted")).to_have_count(2)


def test_a_gradient_leads_to_its_tokens(page, address):
    at(page, address, "gradient")
    expect(page.locator("main")).to_contain_text("Half of the gradient comes from")
    page.locator(".pushes tbody a").first.click()
    expect(page.locator(".about")).to_contain_text("push")


def test_everything_is_reached_with_keys_alone(page, address):
    at(page, address, "runs")
    press = page.keyboard.press
    press("?")
    expect(page.locator("dialog")).to_contain_text("token by token")
    press("Escape")
    press("2")
    expect(page.locator("h1")).to_contain_text("Episodes")
    press("/")
    page.keyboard.type("zebra3")
    expect(page.locator("main")).to_contain_text("of 8 episodes")
    press("Escape")
    press("j")
    press("j")
    expect(page.locator("tbody tr").nth(1)).to_have_class("chosen")
    press("Enter")
    expect(page.locator("h1")).to_contain_text("lake/003-0#1")
    expect(page.locator(".conversation")).to_be_visible()
    press("v")
    press("ArrowRight")
    press("ArrowRight")
    expect(page.locator(".about")).to_contain_text("call 1, number 2")
    press("ArrowDown")
    expect(page.locator(".about")).to_contain_text("call 2, number 1")
    press("c")
    assert "colour=ratio" in page.url
    press("v")
    expect(page.locator(".conversation")).to_be_visible()
    press("]")
    expect(page.locator("h1")).to_contain_text("lake/003-0#2")
    press("t")
    expect(page.locator("h1")).to_contain_text("Group")
    press("3")
    expect(page.locator("h1")).to_contain_text("Why this gradient")
    press("d")
    expect(page.locator("html")).to_have_attribute("data-theme", "dark")


def test_a_run_is_followed_while_it_goes_on(page, tmp_path, viewed):
    settings = (
        "trainer.steps=4", "rollout.tasks_per_step=2", "rollout.group_size=2", "env.args.size=3", "evaluation.tasks=0",
        "env.args.max_steps=3", "track.tensorboard=false", "track.gifs=0", "threads=1",
    )  # fmt: skip
    page.goto(f"{viewed(tmp_path)}/#/runs")
    expect(page.locator("main")).to_contain_text("There is no run here yet")
    command = [sys.executable, "-m", "arborl", "train", *settings, f"output_dir={tmp_path / 'lake'}"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as run:
        expect(page.locator(".runs")).to_contain_text("lake", timeout=120_000)
        page.get_by_role("link", name="lake").click()
        expect(page.locator("h1")).to_contain_text("lake")
        expect(page.locator("h1 .state")).to_have_text("running")
        expect(page.locator(".tile").first).to_contain_text(re.compile("[1-4] / 4"), timeout=120_000)
        page.keyboard.press("2")
        expect(page.locator("tbody tr").first).to_be_visible(timeout=120_000)
        expect(page.locator("main")).to_contain_text("16 episodes", timeout=120_000)  # without a reload of the page
        run.wait()
    page.keyboard.press("1")
    expect(page.locator(".runs")).to_contain_text("4 / 4", timeout=30_000)
    expect(page.locator(".state")).to_have_text("finished", timeout=30_000)


def test_a_hundred_thousand_episodes_are_there_before_they_are_read_and_are_filtered(page, tmp_path, viewed):
    from viewer import write_run

    write_run(tmp_path / "large", 100_000, 200, 5)
    page.goto(f"{viewed(tmp_path)}/#/episodes?run=large")
    expect(page.locator("tbody tr")).to_have_count(50)
    expect(page.locator("main")).to_contain_text("reading the files")
    expect(page.locator("main")).to_contain_text("1–50 of 100,000 episodes", timeout=300_000)
    expect(page.locator("main")).not_to_contain_text("reading the files", timeout=300_000)
    page.get_by_label("text").fill("needle42")
    expect(page.locator("main")).to_contain_text("of 2,151 episodes")
    page.get_by_role("button", name="next page").click()
    expect(page.locator("main")).to_contain_text("51–100 of 2,151 episodes")


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_text_stands_out_enough_on_every_page(page, address, theme):
    page.goto(address)
    page.evaluate(f"localStorage.setItem('theme', '{theme}')")
    found = {}
    for name in PAGES:
        page.goto("about:blank")
        at(page, address, name)
        found |= {name: bad} if (bad := page.evaluate(LOOKS)) else {}
    assert found == {}


@pytest.mark.parametrize("width", [360, 768, 3840])
def test_no_page_is_wider_than_the_window(page, address, width):
    page.set_viewport_size({"width": width, "height": 800})
    wide = []
    for name in PAGES:
        page.goto("about:blank")
        at(page, address, name)
        reached = page.evaluate("document.documentElement.scrollWidth")
        wide += [(name, reached)] if reached > width else []
    assert wide == []
