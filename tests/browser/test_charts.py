"""Charts of the viewer in a browser: zoom, log scale, axes, bands over seeds, gaps, folded metrics, files."""

from __future__ import annotations

import csv
import io
import json
import re
from itertools import pairwise

import pytest

pytest.importorskip("playwright", reason="needs a browser: `make test-browser` installs what it takes and runs this")
from PIL import Image
from playwright.sync_api import expect

STEPS = 10
NOT_FINITE = 4
"""The step whose loss is not finite."""


def write_metrics(folder, seed, lr=0.001, offset=0.0):
    folder.mkdir(parents=True)
    config = f"name: {folder.name}\nseed: {seed}\nmodel: {{name: seedling}}\nalgorithm: grpo\nlearner: {{lr: {lr}}}\n"
    (folder / "config.yaml").write_text(config + f"output_dir: {folder}\ntrainer: {{steps: {STEPS}}}\n")
    rows = [
        {
            "step": step, "reward/mean": step / 10 + offset, "policy/loss": None if step == NOT_FINITE else -step / 7,
            "learner/grad_norm": 0.0 if step == 1 else 10.0 ** (step - 6), "policy/clipped": 0.0,
            "group/zero_variance": 0.25, "episode/count": 4.0, "episode/sampled": 2.5, "time/step": 2.0,
        }
        for step in range(1, STEPS + 1)
    ]  # fmt: skip
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    root = tmp_path_factory.mktemp("charts")
    write_metrics(root / "first", 1)
    write_metrics(root / "second", 2, offset=0.2)
    write_metrics(root / "other", 1, lr=0.5)
    return root


@pytest.fixture(scope="module")
def charts(runs, viewed):
    return viewed(runs)


def chart(page, name):
    return page.locator(f'.chart[data-name="{name}"]')


def opened(page, charts, query="run=first"):
    page.goto(f"{charts}/#/runs?{query}")
    page.wait_for_selector(".chart svg .line")
    return chart(page, "reward/mean")


def drag(page, plot, begin, end):
    """Select a range of a chart: shares of its width."""
    box = plot.locator(".plot").bounding_box()
    places = [box["x"] + box["width"] * share for share in (begin, end)]
    page.mouse.move(places[0], box["y"] + 60)
    page.mouse.down()
    page.mouse.move((places[0] + places[1]) / 2, box["y"] + 60, steps=4)
    page.mouse.move(places[1], box["y"] + 60, steps=4)
    page.mouse.up()


def saved(page, made, kind):
    with page.expect_download() as waiting:
        made.get_by_role("button", name=f"{kind} of").click()
    path = waiting.value.path()
    return waiting.value.suggested_filename, path.read_bytes()


def table(page, made):
    name, data = saved(page, made, "CSV")
    assert name.endswith(".csv")
    return list(csv.DictReader(io.StringIO(data.decode())))


def test_a_dragged_range_fills_all_charts_and_a_double_click_shows_everything(page, charts):
    made = opened(page, charts)
    drag(page, made, 0.4, 0.7)
    expect(made.get_by_role("button", name="reset zoom")).to_be_visible()
    expect(chart(page, "policy/loss").get_by_role("button", name="reset zoom")).to_be_visible()
    steps = [int(row["step"]) for row in table(page, made)]
    assert 1 < steps[0] <= steps[-1] < STEPS
    assert [int(row["step"]) for row in table(page, chart(page, "policy/loss"))] == steps
    page.reload()  # the range is in the address
    page.wait_for_selector(".chart svg .line")
    assert [int(row["step"]) for row in table(page, made)] == steps
    made.locator(".plot").dblclick(position={"x": 200, "y": 60})
    expect(made.get_by_role("button", name="reset zoom")).to_be_hidden()
    assert len(table(page, made)) == STEPS
    assert "zoom" not in page.url


def test_a_click_is_no_zoom_and_the_button_resets_one(page, charts):
    made = opened(page, charts)
    made.locator(".plot").click(position={"x": 200, "y": 60})
    assert "zoom" not in page.url
    drag(page, made, 0.7, 0.4)  # from right to left
    page.get_by_role("button", name="Reset zoom", exact=True).click()
    assert len(table(page, made)) == STEPS


def test_keys_zoom_move_and_change_the_scale_of_a_chart(page, charts):
    made = opened(page, charts)
    made.locator(".plot").focus()
    page.keyboard.press("+")
    page.keyboard.press("+")
    inner = [int(row["step"]) for row in table(page, made)]
    assert 1 < inner[0] <= inner[-1] < STEPS
    made.locator(".plot").focus()
    page.keyboard.press("Shift+ArrowRight")
    page.keyboard.press("Shift+ArrowRight")
    moved = [int(row["step"]) for row in table(page, made)]
    assert moved[0] > inner[0]
    made.locator(".plot").focus()
    page.keyboard.press("0")
    page.keyboard.press("l")
    assert len(table(page, made)) == STEPS
    expect(made.get_by_role("button", name="log")).to_have_attribute("aria-pressed", "true")
    expect(page.locator("h1")).to_have_text("Runs")  # no key of the page was pressed


def test_on_a_log_scale_powers_are_equally_far_apart_and_zero_is_left_out_and_named(page, charts):
    opened(page, charts)
    made = chart(page, "learner/grad_norm")
    path = made.locator(".line.c0")
    assert path.get_attribute("d").count("L") == STEPS - 1
    page.get_by_label("log scale").check()
    heights = [float(point.split()[1]) for point in path.get_attribute("d").replace("M", "L").split("L")[1:]]
    assert len(heights) == STEPS - 1
    steps = [below - above for below, above in pairwise(heights)]
    assert max(steps) - min(steps) < 0.3
    assert min(steps) > 5
    expect(made.locator(".chart-notes")).to_have_text("log scale: 1 value ≤ 0 not drawn")
    expect(chart(page, "policy/loss").locator(".chart-notes")).to_contain_text(
        "no positive value, so the scale is linear"
    )
    page.reload()
    expect(page.get_by_label("log scale")).to_be_checked()


@pytest.mark.parametrize(
    ("axis", "shown"), [("step", "step 3"), ("tokens", "tokens 30"), ("seconds", "s of training 6")]
)
def test_the_axis_is_the_step_or_the_tokens_or_the_time_so_far(page, charts, axis, shown):
    made = opened(page, charts)
    if axis != "step":
        page.get_by_label("axis").select_option(axis)
    expect(made.locator(".plot")).to_have_attribute("aria-label", re.compile(f"by {shown.rpartition(' ')[0]}"))  # drawn
    page.wait_for_selector(".chart svg .line")
    made.locator(".plot").focus()
    for _ in range(3):
        page.keyboard.press("ArrowRight")
    expect(made.locator(".tip")).to_contain_text(shown)
    expect(made.locator(".tip")).to_contain_text("0.3")


def test_the_csv_has_the_values_of_the_metrics_file(page, charts, runs):
    opened(page, charts, "run=first&run=other")
    rows = [json.loads(line) for line in (runs / "first" / "metrics.jsonl").read_text().splitlines()]
    for name in ("reward/mean", "policy/loss"):
        own = [row for row in table(page, chart(page, name)) if row["series"] == "first"]
        assert [int(row["step"]) for row in own] == [row["step"] for row in rows]
        assert [row["value"] and float(row["value"]) for row in own] == [
            "" if row[name] is None else row[name] for row in rows
        ]
        assert [float(row["tokens"]) for row in own] == [10.0 * row["step"] for row in rows]
        assert [float(row["seconds"]) for row in own] == [2.0 * row["step"] for row in rows]


def test_names_in_a_csv_are_quoted_and_are_no_formulas(page, charts):
    opened(page, charts)
    made = page.evaluate("""async () => (await import("/static/chart_export.js")).csvOf(
        [{name: '=1+1,"x"', x: [1], y: [-2]}], {xName: "step"})""")
    assert made == 'series,step,value\r\n"\'=1+1,""x""",1,-2\r\n'


def test_the_png_is_the_picture_with_its_lines(page, charts):
    made = opened(page, charts)
    name, data = saved(page, made, "PNG")
    assert name == "reward-mean.png"
    assert data.startswith(b"\x89PNG\r\n\x1a\n")
    picture = Image.open(io.BytesIO(data)).convert("RGB")
    assert picture.width > 400
    counts = {colour: count for count, colour in picture.getcolors(2**24)}
    assert counts[(0x1F, 0x6F, 0xD1)] > 300  # the line, in its colour
    assert counts[(255, 255, 255)] > picture.width * picture.height // 2


def test_metrics_that_never_change_are_one_line_that_opens(page, charts):
    opened(page, charts, "run=first&run=other")
    folded = page.locator("details.constant").first
    words = (
        "4 metrics are constant: policy/clipped = 0, group/zero_variance = 0.25, episode/sampled = 2.5, time/step = 2"
    )
    expect(folded.locator("summary")).to_have_text(words)
    expect(chart(page, "policy/clipped")).to_have_count(0)
    folded.locator("summary").click()
    expect(chart(page, "policy/clipped").locator("svg")).to_be_visible()
    page.reload()
    expect(chart(page, "policy/clipped").locator("svg")).to_be_visible()


def test_a_value_that_is_not_finite_is_a_marked_gap(page, charts):
    opened(page, charts)
    made = chart(page, "policy/loss")
    path = made.locator(".line.c0").get_attribute("d")
    assert (path.count("M"), path.count("L")) == (2, STEPS - 3)
    expect(made.locator(".lost")).to_have_count(1)
    expect(made.locator(".chart-notes")).to_have_text("× 1 value is not finite")
    made.locator(".plot").focus()
    for _ in range(NOT_FINITE):
        page.keyboard.press("ArrowRight")
    expect(made.locator(".tip")).to_contain_text("not finite")
    expect(chart(page, "reward/mean").locator(".lost, .chart-notes:not([hidden])")).to_have_count(0)


def test_seeds_of_one_setting_are_a_mean_with_a_band_that_the_legend_names(page, charts):
    made = opened(page, charts, "run=first&run=second&run=other")
    expect(made.locator(".band")).to_have_count(1)
    expect(made.locator(".faint-line")).to_have_count(2)
    expect(page.locator(".lines")).to_contain_text("learner.lr=0.001: mean of 2 runs (seeds 1, 2)")
    expect(page.locator(".lines")).to_contain_text("band: lowest to highest")
    rows = [row for row in table(page, made) if "mean of 2" in row["series"]]
    assert [float(row["value"]) for row in rows] == pytest.approx([step / 10 + 0.1 for step in range(1, STEPS + 1)])
    assert [float(row["high"]) - float(row["low"]) for row in rows] == pytest.approx([0.2] * STEPS)
    page.get_by_label("seeds").select_option("interval")
    expect(page.locator(".lines")).to_contain_text("95 % interval")
    rows = [row for row in table(page, made) if "mean of 2" in row["series"]]
    assert float(rows[0]["high"]) - float(rows[0]["low"]) == pytest.approx(2 * 12.706 * 0.1, rel=1e-3)
    page.get_by_label("seeds").select_option("each")
    expect(made.locator(".band")).to_have_count(0)
    expect(page.locator(".lines")).not_to_contain_text("mean")


def test_a_zoomed_range_of_a_long_run_is_read_in_full_detail(page, tmp_path, viewed):
    (tmp_path / "long").mkdir()
    rows = [{"step": step, "reward/mean": (step * 7919) % 101 / 101} for step in range(1, 4001)]
    (tmp_path / "long" / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    made = opened(page, viewed(tmp_path), "run=long")
    expect(made.locator(".chart-notes")).to_contain_text("of 4,000 points")
    drag(page, made, 0.5, 0.6)
    expect(made.locator(".chart-notes")).to_be_hidden()
    found = [int(row["step"]) for row in table(page, made)]
    assert found == list(range(found[0], found[-1] + 1))
    assert 100 < len(found) < 1000
    made.locator(".plot").focus()
    page.keyboard.press("Shift+ArrowLeft")  # further than what was read
    firsts = (int(table(page, made)[0]["step"]) for _ in range(50))
    assert any(first < found[0] - 10 for first in firsts)  # once it is read
    page.get_by_role("button", name="Reset zoom", exact=True).click()
    expect(made.locator(".chart-notes")).to_contain_text("of 4,000 points")


def test_without_recorded_tokens_the_chart_says_so(page, address):
    page.goto(f"{address}/#/runs?run=a&axis=tokens")
    expect(chart(page, "reward/mean")).to_contain_text("not recorded")
