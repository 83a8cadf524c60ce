"""The list of runs and the page of a run in a browser."""

from __future__ import annotations

import json
import os

import pytest

pytest.importorskip("playwright", reason="needs a browser: `make test-browser` installs what it takes and runs this")
from playwright.sync_api import expect
from web_runs import EVIL, add_metrics, made_run

HOUR = 3600


@pytest.fixture
def runs(tmp_path):
    """Four runs, the newest last by name: three with two learning rates, and a stub."""
    for number, (name, lr, steps) in enumerate([("d", 0.001, 2), ("c", 0.002, 4), ("b", 0.001, 3), ("a", 0.001, 1)]):
        folder = made_run(tmp_path / name, steps=steps, seed=number, lr=lr)
        os.utime(folder / "config.yaml", (1_700_000_000 + number * HOUR,) * 2)
    with (tmp_path / "a" / "config.yaml").open("a") as file:
        file.write("stub: true\n")
    os.utime(tmp_path / "a" / "config.yaml", (1_700_000_000 + 9 * HOUR,) * 2)
    return tmp_path


def names(page):
    return [text.strip() for text in page.locator(".runs td.name a").all_inner_texts()]


def expect_names(page, *wanted):
    expect(page.locator(".runs td.name a")).to_have_text(list(wanted))


def test_runs_are_sorted_by_every_column_newest_first(page, runs, viewed):
    page.goto(f"{viewed(runs)}/#/runs")
    expect_names(page, "a", "b", "c", "d")
    expect(page.locator("th[aria-sort=descending]")).to_contain_text("started")
    heading = page.get_by_role("columnheader")
    heading.get_by_role("button", name="step").click()
    expect_names(page, "c", "b", "d", "a")
    expect(page.locator("th[aria-sort=descending]")).to_contain_text("↓")
    page.keyboard.press("Enter")  # the heading has kept the focus
    expect_names(page, "a", "d", "b", "c")
    expect(page.locator("th[aria-sort=ascending]")).to_contain_text("step ↑")
    heading.get_by_role("button", name="reward").click()
    expect_names(page, "c", "b", "d", "a")
    page.reload()
    expect_names(page, "c", "b", "d", "a")
    columns = [text.strip(" ↓↑") for text in page.locator("thead button").all_inner_texts()]
    assert len(columns) == 12
    for name in columns:
        heading.get_by_role("button", name=name).click()
        expect(page.locator("th[aria-sort]")).to_contain_text(name)
        assert sorted(names(page)) == ["a", "b", "c", "d"]


def test_a_filter_over_names_tags_and_settings_is_in_the_address(page, runs, viewed):
    (runs / "c" / "tags.json").write_text(json.dumps({"tags": ["baseline", EVIL[:40]], "note": EVIL}))
    page.goto(f"{viewed(runs)}/#/runs")
    filter_box = page.get_by_label("filter runs")
    expect(page.locator(".runs .tag").first).to_have_text("baseline")
    page.keyboard.press("/")
    page.keyboard.type("learner.lr=2e-3")
    expect_names(page, "c")
    expect(page.locator(".list-tools")).to_contain_text("1 of 4 runs")
    page.reload()
    expect_names(page, "c")
    filter_box.fill("tag=baseline")
    expect_names(page, "c")
    filter_box.fill("lr=0.001 stub=false")
    expect_names(page, "b", "d")
    filter_box.fill("nothing like it")
    expect(page.locator("main")).to_contain_text("No run matches the filter.")
    filter_box.fill("")
    expect_names(page, "a", "b", "c", "d")


def test_runs_are_grouped_by_a_setting_with_count_and_mean(page, runs, viewed):
    page.goto(f"{viewed(runs)}/#/runs")
    page.get_by_label("group by").select_option("learner.lr")
    groups = page.locator("tr.group")
    expect(groups).to_have_count(2)
    expect(groups.first).to_contain_text("learner.lr: 0.001")
    expect(groups.first).to_contain_text("3 runs, 1 stub")
    expect(groups.first).to_contain_text("mean reward 0.25")  # of b and d; the stub does not count
    expect(groups.nth(1)).to_contain_text("1 run · mean reward 0.4")
    groups.first.get_by_role("button").focus()
    page.keyboard.press("Enter")
    expect_names(page, "c")
    expect(groups.first.get_by_role("button")).to_have_attribute("aria-expanded", "false")
    expect(groups.first.get_by_role("button")).to_be_focused()
    page.reload()
    expect_names(page, "c")
    page.get_by_label("group by").select_option("")
    expect_names(page, "a", "b", "c", "d")


def test_the_page_of_a_run_shows_all_that_is_known_of_it(page, runs, viewed):
    folder = runs / "c"
    numbers = {"success": 0.9, "success_low": 0.8, "success_high": 0.95, "tasks": 50}
    summary = {"before": {"success": 0.25}, "after": numbers, "steps": 4, "train_seconds": 200, "failures": []}
    (folder / "summary.json").write_text(json.dumps(summary))
    (folder / "execution.json").write_text(json.dumps({"device": "cpu (2 threads)", "precision": "float32"}))
    log = ["INFO    arborl: begins", "WARNING arborl: a warning", f"ERROR   arborl: {EVIL}"]
    (folder / "run.log").write_text("".join(f"2026-01-01T00:00:00.000 {line}\n" for line in log))
    add_metrics(folder, 5, **{"system/process_cpu": 0.5, "system/machine_cpu": 0.7, "system/process_memory_gib": 1.5})
    page.goto(f"{viewed(runs)}/#/runs")
    page.get_by_role("link", name="c", exact=True).click()
    expect(page.locator("h1")).to_contain_text("c finished")
    for words in ("5 / 9", "0.1 → 0.5", "25 % → 90 %", "80 % to 95 %, 50 tasks", "3 min"):
        expect(page.locator(".tiles")).to_contain_text(words)
    expect(page.locator(".facts").first).to_contain_text("cpu (2 threads)")
    expect(page.locator(".facts").first).to_contain_text("float32")
    expect(page.locator(".findings li", has_text="execution")).to_contain_text("float32")
    expect(page.locator(".chart", has_text="reward/mean").locator("svg").first).to_be_visible()
    expect(page.locator(".chart", has_text="CPU, share of the cores").locator("circle.dot")).to_have_count(2)
    expect(page.locator(".differences")).to_contain_text("learner.lr")
    expect(page.locator(".differences")).not_to_contain_text("sampling.temperature")
    expect(page.locator(".log pre")).to_have_count(3)
    page.get_by_label("level").select_option("WARNING")
    expect(page.locator(".log pre")).to_have_count(2)
    page.get_by_label("filter the log").fill("script")
    expect(page.locator(".log pre")).to_have_count(1)
    expect(page.locator(".log pre")).to_contain_text("<script>")
    page.locator("tr", has_text="best").first.get_by_role("link").click()
    expect(page.locator("h1")).to_contain_text("lake/")
    page.keyboard.press("r")
    expect(page.locator("h1")).to_contain_text("c finished")


def test_settings_are_all_shown_or_those_that_differ(page, runs, viewed):
    page.goto(f"{viewed(runs)}/#/run?run=b")
    rows = page.locator(".differences tbody tr")
    expect(page.locator(".differences")).to_contain_text("learner.lr")
    few = rows.count()
    with (runs / "b" / "config.yaml").open("a") as file:
        file.write("threads: 0\n")  # the default
    page.reload()
    expect(rows).to_have_count(few)
    page.get_by_label("differs from defaults only").uncheck()
    expect(page.locator(".differences")).to_contain_text("threads")
    page.get_by_label("find a setting").fill("learner.lr=")
    expect(rows).to_have_count(1)
    page.reload()
    expect(page.get_by_label("differs from defaults only")).not_to_be_checked()


def test_tags_and_notes_are_edited_and_kept(page, runs, viewed):
    address = viewed(runs)
    page.goto(f"{address}/#/run?run=b")
    page.get_by_label("add a tag").fill("baseline")
    page.keyboard.press("Enter")
    expect(page.get_by_role("status").get_by_text("Saved")).to_be_visible()
    expect(page.get_by_label("add a tag")).to_be_focused()
    page.keyboard.type("two words,")
    expect(page.locator(".tags .tag")).to_have_count(2)
    page.get_by_label("note").fill(f"{EVIL}\nsecond line")
    page.get_by_role("button", name="Save note").click()
    expect(page.get_by_role("button", name="Save note")).to_be_hidden()
    page.get_by_label("remove tag baseline").click()
    expect(page.locator(".tags .tag")).to_have_count(1)
    page.reload()
    expect(page.get_by_label("note")).to_have_value(f"{EVIL}\nsecond line")
    expect(page.locator(".tags .tag")).to_contain_text("two words")
    assert json.loads((runs / "b" / "tags.json").read_text()) == {"tags": ["two words"], "note": f"{EVIL}\nsecond line"}
    page.keyboard.press("1")
    expect(page.locator("tr", has_text="two words")).to_contain_text("<script>")


def test_a_note_that_cannot_be_saved_stays_in_its_field(chromium, runs, viewed):
    with chromium.new_context() as context:
        page = context.new_page()
        page.goto(f"{viewed(runs)}/#/run?run=b")
        expect(page.get_by_label("note")).to_be_visible()
        (runs / "b" / "tags.json").symlink_to(runs / "elsewhere")
        page.get_by_label("note").fill("kept")
        page.get_by_role("button", name="Save note").click()
        expect(page.get_by_role("status").get_by_text("Not saved")).to_contain_text("is not a regular file")
        expect(page.get_by_label("note")).to_have_value("kept")
        assert not (runs / "elsewhere").exists()


def test_tags_that_another_page_saves_are_shown_unless_they_are_being_edited(page, runs, viewed):
    page.goto(f"{viewed(runs)}/#/run?run=b")
    expect(page.locator(".findings")).to_be_visible()
    (runs / "b" / "tags.json").write_text(json.dumps({"tags": ["from elsewhere"], "note": "other"}))
    expect(page.locator(".tags .tag")).to_contain_text("from elsewhere")
    page.get_by_label("note").fill("mine")
    (runs / "b" / "tags.json").write_text(json.dumps({"tags": [], "note": "third"}))
    add_metrics(runs / "b", 4)
    expect(page.locator(".tiles")).to_contain_text("4 / 9")
    expect(page.get_by_label("note")).to_have_value("mine")


def test_a_stub_run_is_marked_everywhere(page, runs, viewed):
    page.goto(f"{viewed(runs)}/#/runs")
    expect(page.locator(".runs .stub")).to_have_count(1)
    expect(page.locator("tr", has=page.locator(".stub"))).to_contain_text("a")
    expect(page.get_by_label("compare a")).not_to_be_checked()  # others are compared first
    page.get_by_role("link", name="a", exact=True).click()
    expect(page.locator("h1 .stub")).to_have_text("stub")
    expect(page.locator(".notice")).to_contain_text("Its replies are scripted")


def test_old_and_broken_runs_have_pages(page, tmp_path, viewed):
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "metrics.jsonl").write_text('{"step": 1, "reward/mean": 0.5}\n')
    (tmp_path / "broken").mkdir()
    for name in ("config.yaml", "metrics.jsonl", "summary.json", "tags.json"):
        (tmp_path / "broken" / name).write_bytes(b"\x00{[: \xff")
    address = viewed(tmp_path)
    page.goto(f"{address}/#/run?run=old")
    expect(page.locator(".tiles")).to_contain_text("0.5")
    expect(page.locator("main")).to_contain_text("There is no run.log yet.")
    expect(page.locator("main")).to_contain_text("no readable config.yaml")
    expect(page.locator("main")).to_contain_text("Not recorded")
    page.goto(f"{address}/#/run?run=broken")
    expect(page.locator(".problem").first).to_contain_text("config.yaml")
    expect(page.locator(".findings li").first).to_be_visible()


def test_five_hundred_runs_are_pages_of_a_list(page, tmp_path, viewed):
    for number in range(500):
        folder = tmp_path / f"run-{number:03}"
        folder.mkdir()
        (folder / "config.yaml").write_text(f"seed: {number}\nalgorithm: {'grpo' if number % 2 else 'ppo'}\n")
        add_metrics(folder, 1, **{"reward/mean": number / 500})
        os.utime(folder / "config.yaml", (1_700_000_000 + number,) * 2)
    page.goto(f"{viewed(tmp_path)}/#/runs")
    expect(page.locator(".runs tbody tr")).to_have_count(50)
    expect(page.locator(".runs td.name a").first).to_have_text("run-499")
    page.keyboard.press("n")
    expect(page.locator(".runs td.name a").first).to_have_text("run-449")
    page.get_by_label("group by").select_option("algorithm")
    expect(page.locator("tr.group").first).to_contain_text("250 runs")
    expect(page.locator("main")).to_contain_text("page 1 of 11")
    page.get_by_label("filter runs").fill("seed<10")
    expect(page.locator(".runs td.name a")).to_have_count(10)
