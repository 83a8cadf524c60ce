"""What the viewer answers about one run and about the list of runs, without a browser."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from contextlib import contextmanager
from pathlib import Path

import pytest

pytest.importorskip("fastapi")
import yaml
from fastapi.testclient import TestClient
from web_runs import EVIL, add_metrics, made_run

from arborl.config.config_base import to_plain
from arborl.config.run_config import RunConfig
from arborl.diagnosis import examine_run
from arborl.view.web.app import make_app
from arborl.view.web.run_list import parse_filter


def opened(root) -> TestClient:
    return TestClient(make_app(root), base_url="http://127.0.0.1:7007")


def ask(web, path, status=200, **params):
    answer = web.get(f"/api/{path}", params=params)
    assert answer.status_code == status, answer.text
    return answer.json()


def save(web, run="a", headers=None, **body):
    return web.put("/api/tags", params={"run": run}, json=body, headers=headers or {})


@pytest.fixture
def root(tmp_path):
    made_run(tmp_path / "a")
    made_run(tmp_path / "b", seed=8, lr=0.002)
    stub = made_run(tmp_path / "c", steps=1)
    with (stub / "config.yaml").open("a") as file:
        file.write("stub: true\n")
    return tmp_path


@pytest.fixture
def web(root):
    return opened(root)


# ------------------------------------------------------------------------------------------------ list


@pytest.mark.parametrize(
    ("find", "runs"),
    [
        ("", "abc"),
        ("learner.lr=0.002", "b"),
        ("learner.lr=2e-3", "b"),
        ("lr=2e-3", "b"),
        ("lr!=0.002", "ac"),
        ("learner.lr<0.0015", "ac"),
        ("learner.lr>=1e-3 seed>7", "b"),
        ("model=SEEDLING", "abc"),
        ("algorithm.name=grpo", "abc"),
        ("algorithm=ppo", ""),
        ("stub", "c"),
        ("stub=true", "c"),
        ("stub=false state=interrupted", "ab"),
        ("seedl", "abc"),
        ("nothing.like=this", ""),
        ("nothing.like!=this", "abc"),
        ("learner.lr>text", ""),
        ('"no such words"', ""),
        ('a"', "abc"),
        ("=", ""),
    ],
)
def test_a_filter_selects_runs_by_words_and_settings(web, find, runs):
    found = ask(web, "runs", find=find)
    assert "".join(one["run"] for one in found["runs"]) == runs
    assert found["names"] == ["a", "b", "c"]


def test_tags_and_notes_are_filtered_by(web):
    assert save(web, tags=["baseline", "long run"], note="the first one").status_code == 200
    for find, runs in {
        "tag=baseline": "a",
        'tag="LONG run"': "a",
        "tag!=baseline": "bc",
        "first": "a",
        "long": "a",
    }.items():
        assert "".join(one["run"] for one in ask(web, "runs", find=find)["runs"]) == runs, find


def test_a_filter_that_is_too_long_is_refused_with_a_sentence(web):
    assert "at most 400" in ask(web, "runs", 422, find="x" * 401)["detail"]
    assert parse_filter(" \t ") == []


def test_runs_have_the_value_of_the_setting_that_they_are_grouped_by(web):
    assert [one["group"] for one in ask(web, "runs", by="learner.lr")["runs"]] == ["0.001", "0.002", "0.001"]
    assert {one["group"] for one in ask(web, "runs", by="algorithm")["runs"]} == {"grpo"}
    assert {one["group"] for one in ask(web, "runs", by="no.such.setting")["runs"]} == {"none"}
    assert ask(web, "varying") == ["learner.lr", "seed", "stub"]


def test_a_row_has_first_and_last_reward_and_time_and_whether_it_is_a_stub(web):
    rows = {one["run"]: one for one in ask(web, "runs")["runs"]}
    assert rows["a"]["reward"] == [pytest.approx(0.1), pytest.approx(0.3)]
    assert rows["a"]["seconds"] == pytest.approx(6.0)
    assert [rows[name]["stub"] for name in "abc"] == [False, False, True]


def test_the_pulse_of_the_list_changes_with_any_run_and_with_tags(web, root):
    def pulse():
        return ask(web, "pulse", every=1)

    first = pulse()
    assert pulse() == first
    add_metrics(root / "b", 4)
    second = pulse()
    assert second != first
    save(web, tags=["x"])
    assert pulse() != second


def test_five_hundred_runs_are_read_once(tmp_path):
    made = made_run(tmp_path / "runs" / "run-000", steps=2)
    for number in range(1, 500):
        copy = tmp_path / "runs" / f"run-{number:03}"
        copy.mkdir()
        (copy / "config.yaml").write_text((made / "config.yaml").read_text().replace("seed: 7", f"seed: {number}"))
        shutil.copy(made / "metrics.jsonl", copy)
    web = opened(tmp_path / "runs")
    assert len(ask(web, "runs")["runs"]) == 500
    assert [one["run"] for one in ask(web, "runs", find="seed=321")["runs"]] == ["run-321"]
    assert ask(web, "varying") == ["seed"]


# ------------------------------------------------------------------------------------------------ one run


def test_the_findings_are_those_of_the_doctor_with_places_of_episodes(web, root):
    found = ask(web, "findings", run="a")
    expected = [finding.as_json() for finding in examine_run(root / "a")]
    assert [(one["name"], one["state"], one["detail"]) for one in found] == [
        (one["name"], one["state"], one["detail"]) for one in expected
    ]
    shown = [episode for one in found for episode in one["evidence"]]
    assert shown
    first = shown[0]
    read = ask(web, "episode", run="a", kind=first["kind"], step=first["step"], line=first["line"])
    assert read["id"] == first["episode"]


def test_findings_follow_a_run_that_has_changed(web, root):
    before = ask(web, "findings", run="a")
    (root / "a" / "summary.json").write_text('{"before": {}, "after": {}, "steps": 3, "failures": []}')
    assert ask(web, "findings", run="a") != before


@pytest.mark.parametrize(
    "summary", ['{"stopped": true, "failures": [1]}', '{"stopped": 1, "failures": {"a": 1}}', "[]", "{"]
)
def test_a_folder_that_the_doctor_cannot_read_has_a_finding_that_says_so(web, root, summary):
    (root / "a" / "summary.json").write_text(summary)
    assert any(one["state"] != "ok" for one in ask(web, "findings", run="a"))


def test_settings_have_their_defaults_and_those_that_differ_are_listed(root):
    config = to_plain(RunConfig()) | {"seed": 5, "name": "whole"}
    config["learner"] = config["learner"] | {"lr": 0.01}
    (root / "d").mkdir()
    (root / "d" / "config.yaml").write_text(yaml.safe_dump(config))
    found = ask(opened(root), "settings", run="d")
    default = RunConfig()
    changed = {"learner.lr": [default.learner.lr, 0.01], "name": [default.name, "whole"], "seed": [default.seed, 5]}
    assert found["differ"] == changed
    assert found["settings"]["trainer.steps"] == RunConfig().trainer.steps
    assert len(found["settings"]) > 100


def test_settings_that_an_older_file_lacks_or_calls_otherwise_do_no_harm(web, root):
    (root / "a" / "config.yaml").write_text(
        "algorithm: ppo\nrenamed_since: {x: 1}\nengine: {args: {api_key: secret}}\n"
    )
    found = ask(web, "settings", run="a")
    assert found["differ"]["algorithm.name"][1] == "ppo"
    assert found["differ"]["renamed_since.x"] == [None, 1]
    assert "learner.lr" not in found["differ"]
    assert "secret" not in json.dumps(found)


def test_the_log_is_filtered_by_text_and_level(web, root):
    lines = ["2026-01-01T00:00:00.000 INFO    arborl: begins", f"2026-01-01T00:00:01.000 WARNING arborl: {EVIL}",
             "Traceback (most recent call last):", "2026-01-01T00:00:02.000 ERROR   arborl: fails"]  # fmt: skip
    (root / "a" / "run.log").write_text("\n".join(lines) + "\n")
    assert ask(web, "log", run="a")["lines"] == [lines[0], "\n".join(lines[1:3]), lines[3]]
    assert ask(web, "log", run="a", level="WARNING")["lines"] == ["\n".join(lines[1:3]), lines[3]]
    assert ask(web, "log", run="a", find="FAILS")["lines"] == [lines[3]]
    assert ask(web, "log", run="b")["lines"] == []


def test_of_a_long_log_the_end_is_shown(web, root):
    with (root / "a" / "run.log").open("wb") as file:
        file.write(b"\xff\xfe no text\n")
        for number in range(100_000):
            file.write(f"2026-01-01T00:00:00.000 INFO    arborl: line {number:06} {'x' * 40}\n".encode())
    found = ask(web, "log", run="a")
    assert found["lines"][-1].split()[4] == "099999"
    assert len(found["lines"]) == 400
    assert found["searched"] < found["bytes"]


@pytest.mark.parametrize("make", ["link", "fifo", "folder"])
def test_a_log_that_is_no_file_is_refused(web, root, make):
    path = root / "a" / "run.log"
    {"link": lambda: path.symlink_to("/etc/passwd"), "fifo": lambda: os.mkfifo(path), "folder": path.mkdir}[make]()
    assert "regular file" in ask(web, "log", 409, run="a")["detail"]


def test_replays_lead_to_their_episodes(web, root):
    frames = root / "a" / "frames"
    frames.mkdir()
    for name in ("one.gif", "two.gif", "three.gif"):
        (frames / name).write_bytes(b"GIF89a")
    named = {"one.gif": ["train", 2, "lake/002-0#1"], "two.gif": ["train", 10**30, "x"], "three.gif": "no list"}
    (frames / "episodes.json").write_text(json.dumps(named))
    found = {one["name"]: one for one in ask(web, "replays", run="a")}
    assert found["frames/one.gif"] | {"line": 1} == found["frames/one.gif"]
    assert found["frames/two.gif"] == {"name": "frames/two.gif"}
    assert found["frames/three.gif"] == {"name": "frames/three.gif"}


@pytest.mark.parametrize("path", ["run", "settings", "findings", "log", "replays"])
def test_a_run_without_files_or_with_damaged_ones_is_answered(tmp_path, path):
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "metrics.jsonl").write_text(
        '{"step": 1, "reward/mean": "text", "episode/count": "many"}\n{"step"'
    )
    (tmp_path / "broken").mkdir()
    for name in ("config.yaml", "metrics.jsonl", "summary.json", "execution.json", "tags.json"):
        (tmp_path / "broken" / name).write_bytes(b"\x00{[: \xff")
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "config.yaml").write_text("")
    web = opened(tmp_path)
    for run in ("old", "broken", "empty"):
        ask(web, path, run=run)
    assert len(ask(web, "runs")["runs"]) == 3
    ask(web, path, 404, run="../old")


# ------------------------------------------------------------------------------------------------ tags


def test_tags_and_note_are_kept_in_the_run_folder(web, root):
    answer = save(web, tags=[" baseline ", "two  words", "baseline", ""], note="line 1\r\nline 2  ")
    assert answer.status_code == 200
    assert (answer.json()["tags"], answer.json()["note"]) == (["baseline", "two words"], "line 1\nline 2")
    assert json.loads((root / "a" / "tags.json").read_text()) == {
        "tags": ["baseline", "two words"],
        "note": "line 1\nline 2",
    }
    assert ask(opened(root), "run", run="a")["tags"] == ["baseline", "two words"]
    assert not [path for path in (root / "a").iterdir() if path.name.startswith(".tags")]


def test_a_change_of_tags_that_were_changed_meanwhile_is_refused(web, root):
    assert save(web, tags=["mine"]).status_code == 200
    late = save(web, tags=["other"], before={"tags": [], "note": ""})
    assert late.status_code == 409
    assert "meanwhile" in late.json()["detail"]
    assert ask(web, "run", run="a")["tags"] == ["mine"]
    assert save(web, tags=["other"], before={"tags": ["mine"], "note": ""}).status_code == 200


@pytest.mark.parametrize(
    "body",
    [
        {"tags": "text"}, {"tags": [1]}, {"tags": ["x" * 41]}, {"tags": [str(number) for number in range(21)]},
        {"tags": ["a,b"]}, {"tags": ["bell\x07"]}, {"tags": ["\u202eturned"]}, {"note": 3}, {"note": "x" * 4001},
        {"path": "../b/tags.json"}, {"before": 1},
    ],
)  # fmt: skip
def test_tags_that_are_none_are_refused_and_nothing_is_written(web, root, body):
    assert save(web, **body).status_code == 422
    assert not (root / "a" / "tags.json").exists()


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"origin": "http://evil.example"}, 421),
        ({"origin": "null"}, 421),
        ({"origin": "http://127.0.0.1:9999"}, 421),
        ({"host": "evil.example"}, 421),
        ({"sec-fetch-site": "cross-site"}, 403),
        ({"sec-fetch-site": "same-site"}, 403),
        ({"content-type": "text/plain"}, 403),
        ({"content-type": "application/x-www-form-urlencoded"}, 403),
    ],
)
def test_other_pages_cannot_write(web, root, headers, status):
    assert save(web, headers=headers, tags=["x"]).status_code == status
    assert not (root / "a" / "tags.json").exists()


def test_only_tags_are_written_and_only_of_runs_that_exist(web, root):
    assert save(web, run="../x", tags=["x"]).status_code == 404
    for method in ("post", "delete", "patch"):
        assert getattr(web, method)("/api/tags?run=a").status_code == 405
    assert web.put("/api/runs").status_code == 405
    assert save(web, note="x" * 70_000).status_code == 413


@pytest.mark.parametrize("make", ["link", "folder"])
def test_tags_are_never_written_through_a_link(web, root, make, tmp_path_factory):
    outside = tmp_path_factory.mktemp("outside") / "file"
    outside.write_text("{}")
    path = root / "a" / "tags.json"
    if make == "link":
        path.symlink_to(outside)
    else:
        path.mkdir()
    answer = save(web, tags=["x"])
    assert answer.status_code == 409
    assert "not a regular file" in answer.json()["detail"]
    assert outside.read_text() == "{}"


def test_a_deleted_run_is_not_created_again(web, root):
    ask(web, "runs")
    shutil.rmtree(root / "a")
    assert save(web, tags=["x"]).status_code in (403, 404)
    assert not (root / "a").exists()


@contextmanager
def unprivileged():
    """As a user who may not write everywhere."""
    is_root = os.geteuid() == 0
    if is_root:
        os.seteuid(65534)
    try:
        yield
    finally:
        if is_root:
            os.seteuid(0)


def test_a_read_only_folder_is_said_to_be_one():
    root = Path(tempfile.mkdtemp())
    try:
        made_run(root / "a", steps=1)
        web = opened(root)
        ask(web, "runs")
        root.chmod(0o755)
        (root / "a").chmod(0o555)
        with unprivileged():
            answer = save(web, tags=["x"])
        assert answer.status_code == 403
        assert answer.json()["detail"] == "the run folder cannot be written: Permission denied"
    finally:
        (root / "a").chmod(0o755)
        shutil.rmtree(root)


@pytest.mark.parametrize(
    "text", ['{"tags": "x", "note": 1}', '{"tags": [1, "", "good", {"a": 1}]}', "[]", "{", "[" * 5000]
)
def test_a_tags_file_of_another_form_is_shown_without_harm(web, root, text):
    (root / "a" / "tags.json").write_text(text)
    row = next(one for one in ask(web, "runs")["runs"] if one["run"] == "a")
    assert row["tags"] in ([], ["good"])
    assert ask(web, "run", run="a")["note"] == ""


# ------------------------------------------------------------------------------------------------ accounting


def test_a_run_has_its_episodes_by_state_from_the_summary_or_from_its_last_step(web, root):
    assert ask(web, "run", run="a")["accounting"] == {}
    row = {"step": 9, "episodes/started": 9.0, "episodes/trained": 6.0, "episodes/pending": 1.0}
    row |= {"episodes/dropped": 2.0, "episodes/dropped/stale": 2.0}
    with (root / "a" / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(row) + "\n")
    shown = {"started": 9.0, "trained": 6.0, "pending": 1.0, "dropped/stale": 2.0}
    assert ask(web, "run", run="a")["accounting"] == shown
    table = {"started": 9, "trained": 6, "pending": 0, "dropped": {"stale": 2, "run_ended": 1, EVIL: "x"}}
    (root / "a" / "summary.json").write_text(json.dumps({"accounting": table}))
    assert ask(web, "run", run="a")["accounting"] == shown | {"pending": 0, "dropped/run_ended": 1}
    (root / "a" / "summary.json").write_text(json.dumps({"accounting": ["no", "table"]}))
    assert ask(web, "run", run="a")["accounting"] == shown


def test_a_run_has_what_is_set_aside(web, root):
    assert ask(web, "run", run="a")["quarantine"] == []
    rows = [{"what": "task 2", "failed_draws": 4, "until_step": 9, "failure": "tool: OSError"}, {"what": ["x"]}, 7]
    (root / "a" / "summary.json").write_text(json.dumps({"quarantine": rows}))
    nothing = {"what": None, "failed_draws": None, "until_step": None, "failure": None}
    assert ask(web, "run", run="a")["quarantine"] == [rows[0], nothing]
