"""What the viewer answers, without a browser."""

from __future__ import annotations

import json
import os
import threading
import time

import pytest

pytest.importorskip("fastapi")
from fastapi.testclient import TestClient
from PIL import Image
from web_runs import CONTROL, EVIL, add_metrics, made_run, write_step

from arborl.view import Frame, save_gif
from arborl.view.web.app import make_app
from arborl.view.web.index import MAX_AGE_SECONDS, EpisodeIndex, delete_unused

HERE = {"run": "a", "kind": "train", "step": 2, "line": 1}


def opened(root, **more) -> TestClient:
    return TestClient(make_app(root), base_url="http://127.0.0.1:7007", **more)


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("runs")
    made_run(root / "a")
    made_run(root / "studies" / "b", seed=8, lr=0.002)
    (root / "a" / "secret.txt").write_text("secret")
    return root


@pytest.fixture(scope="module")
def web(root):
    return opened(root)


def ask(web, path, status=200, **params):
    answer = web.get(f"/api/{path}", params=params)
    assert answer.status_code == status, answer.text
    return answer.json()


def settled(web, **params):
    """A page of episodes, once every file has been read."""
    while (found := ask(web, "episodes", **params))["indexed"] < 1:
        pass
    return found


def test_runs_are_found_with_where_they_stand(web):
    runs = ask(web, "runs")["runs"]
    assert [one["run"] for one in runs] == ["a", "studies/b"]
    assert (runs[0]["step"], runs[0]["steps"], runs[0]["state"]) == (3, 9, "interrupted")


def test_a_run_may_be_viewed_alone_and_configurations_are_compared(web, root):
    assert [one["run"] for one in ask(opened(root / "a"), "runs")["runs"]] == ["."]
    found = ask(web, "differences", run=["a", "studies/b"])
    assert found["differ"] == {"seed": [7, 8], "learner.lr": [0.001, 0.002]}
    assert found["same"]["model.name"] == "seedling"


def test_series_have_steps_and_seconds(web):
    found = ask(web, "series", run=["a"], name=["reward/mean", "evaluation/success", "not there"])["a"]
    assert found["reward/mean"] == {
        "step": [1, 2, 3],
        "seconds": [2.0, 4.0, 6.0],
        "tokens": [0, 0, 0],
        "value": [0.1, 0.2, 0.3],
    }
    assert found["evaluation/success"]["step"] == [3]
    assert "not there" not in found


def test_seeds_of_one_setting_have_a_mean_with_a_band(web, tmp_path):
    for number in (1, 2):
        made_run(tmp_path / f"s{number}", seed=number, steps=1)
        add_metrics(tmp_path / f"s{number}", 2, m=float(number))
    made_run(tmp_path / "other", lr=0.5, steps=1)
    found = ask(opened(tmp_path), "bands", run=["s1", "other", "s2"], name=["m"], band="range")
    assert [group["runs"] for group in found] == [["s1", "s2"], ["other"]]
    assert (found[0]["changes"], found[0]["seeds"]) == ("learner.lr=0.001", [1, 2])
    mean = found[0]["means"]["m"]
    assert (mean["step"], mean["value"], mean["low"], mean["high"]) == ([2], [1.5], [1.0], [2.0])
    assert found[1]["means"] == {}
    assert web.get("/api/bands", params={"run": "a", "name": "m", "band": "other"}).status_code == 422


@pytest.mark.parametrize(
    ("params", "total"),
    [
        ({}, 32),
        ({"kind": "evaluation"}, 8),
        ({"step_from": 2, "step_to": 2, "kind": "train"}, 8),
        ({"source": "shop"}, 16),
        ({"stop": "max_turns"}, 12),
        ({"failure": "any"}, 4),
        ({"failure": "none", "reward_from": 1.0}, 16),
        ({"lag_from": 1, "kind": "train"}, 8),
        ({"text": "zebra2"}, 8),
        ({"text": "zebr"}, 32),
        ({"text": "right zebra1"}, 2),
        ({"text": '" OR 1=1 --'}, 0),
        ({"text": "*"}, 32),
    ],
)
def test_episodes_are_filtered(web, params, total):
    assert settled(web, run="a", **params)["total"] == total


def test_episodes_are_ordered_and_paged(web):
    settled(web, run="a")
    rewards = [row["reward"] for row in ask(web, "episodes", run="a", order="-reward", count=200)["rows"]]
    known = [one for one in rewards if one is not None]
    assert known == sorted(known, reverse=True)
    assert rewards[len(known) :] == [None] * 4  # what is not known comes last
    pages = [ask(web, "episodes", run="a", first=at, count=10)["rows"] for at in (0, 10, 20, 30)]
    places = [(row["kind"], row["step"], row["line"]) for page in pages for row in page]
    assert len(places) == len(set(places)) == 32
    assert ask(web, "episodes", run="a", order="reward; DROP TABLE episodes", count=1)["total"] == 32


def test_an_episode_has_its_conversation_and_its_tokens_with_their_numbers(web):
    found = ask(web, "episode", **HERE)
    looked = found["conversation"][2]
    assert [part.get("text") for part in looked["parts"]] == ["<answer>Right</answer>", None]
    assert looked["parts"][1]["call"]["result"] == f"moved Right {EVIL}"
    assert found["conversation"][-1]["parts"][0]["text"].endswith(CONTROL)
    assert found["turns"] == 2
    first, second = found["calls"]
    assert "".join(first["sampled"]["text"]) == "<answer>Right</answer>"
    assert first["repeats"] == [-1, 0]
    assert second["goes_on"]
    assert second["repeats"] == [0, first["prompt"] + len(first["sampled"]["ids"])]
    for name in ("logprob", "now", "advantage", "ratio", "weight", "entropy", "loss", "pull", "push", "version"):
        assert len(first["sampled"][name]) == len(first["sampled"]["ids"])
    assert [one["text"] for one in first["sampled"]["against"][0]] == ["Jump", "Down"]
    rivals = first["rivals"]["1"]  # the first word that siblings did not share
    assert {one["text"] for one in rivals} == {"Left", "Up", "Down"}


def test_the_tree_of_a_group_has_each_token_once(web):
    tree = ask(web, "group", **HERE)
    assert len(tree["group"]) == 4
    assert sum(one["length"] for one in tree["stretches"]) == tree["tokens"] < tree["raw"]
    for one in tree["stretches"]:
        if one["parent"] >= 0:
            above = tree["stretches"][one["parent"]]
            assert above["depth"] + above["length"] == one["depth"]
    lengths = tree["lengths"][-1]  # it forgot what was before
    assert lengths[1] < lengths[0]


def test_two_episodes_part_where_their_tokens_do(web):
    parted = ask(web, "parting", **HERE, other=0)
    assert (parted["call"], parted["part"], parted["token"]) == (0, "sampled", 1)
    assert ask(web, "parting", **HERE, other=1)["part"] == "never"


def test_a_gradient_is_summarized_by_its_strongest_tokens(web):
    found = ask(web, "gradient", run="a", step=2, most=5)
    pushes = [token["push"] for token in found["tokens"]]
    assert pushes == sorted(pushes, reverse=True)
    assert sum(one["push"] for one in found["by_episode"]) == pytest.approx(found["pushed"], rel=1e-3)
    assert found["half"] < found["of"]
    assert "no stored terms of step 99" in ask(web, "gradient", 404, run="a", step=99)["detail"]


@pytest.mark.parametrize("run", ["..", "../a", "a/../a", "/etc", "a/episodes", "", "a\x00"])
def test_a_run_is_looked_up_and_never_a_path(web, run):
    ask(web, "episodes", 404, run=run)


@pytest.mark.parametrize(
    "path",
    ["/static/../app.py", "/static/%2e%2e%2fapp.py", "/frame?run=a&name=../secret.txt", "/frame?run=a&name=secret.txt"],
)
def test_only_our_files_are_served(web, path):
    assert web.get(path).status_code == 404


def test_numbers_without_bounds_and_words_that_are_no_text_are_refused_or_not_found(web):
    ask(web, "episodes", 422, run="a", lag_from=10**20)
    ask(web, "episode", 404, run="a", kind="train", step=10**12, line=0)
    ask(web, "episode", 404, run="a", kind="../terms", step=1, line=0)
    assert settled(web, run="a", text="\x00'\"", order="\x00")["total"] == 32


def test_an_episode_that_is_none_costs_itself(tmp_path):
    run = made_run(tmp_path / "a", steps=1)
    file = run / "episodes" / "step-000001.jsonl"
    file.write_text(file.read_text().replace('"stop":"done"', '"stop":"never heard of"', 1))
    web = opened(tmp_path)
    assert len(ask(web, "episode", run="a", kind="train", step=1, line=0)["group"]) == 3
    assert "never heard of" in ask(web, "episode", 409, run="a", kind="train", step=1, line=1)["detail"]


def test_frames_are_pictures_of_the_run_and_say_whose_they_are(tmp_path):
    run = made_run(tmp_path / "a", steps=1)
    save_gif([Frame(Image.new("RGB", (8, 8)), "Left")], run / "frames" / "one.gif")
    (run / "frames" / "link.gif").symlink_to("/etc/passwd")
    (run / "frames" / "episodes.json").write_text(json.dumps({"one.gif": ["evaluation", 1, "lake/001-0#1"]}))
    web = opened(tmp_path)
    assert ask(web, "frames", run="a") == ["frames/one.gif"]
    assert web.get("/frame", params={"run": "a", "name": "frames/one.gif"}).content.startswith(b"GIF")
    assert web.get("/frame", params={"run": "a", "name": "frames/link.gif"}).status_code == 404
    assert ask(web, "episode", run="a", kind="evaluation", step=1, line=1)["frames"] == ["frames/one.gif"]


def test_pages_of_others_are_refused_and_ours_let_nothing_in(web):
    assert web.get("/api/runs", headers={"host": "evil.example"}).status_code == 421
    assert web.get("/api/runs", headers={"origin": "http://evil.example"}).status_code == 421
    assert web.post("/api/runs").status_code == 405
    page = web.get("/")
    assert "default-src 'none'" in page.headers["content-security-policy"]
    assert page.headers["x-content-type-options"] == "nosniff"


def test_everything_the_page_loads_is_in_the_package(web):
    page = web.get("/").text
    assert "http://" not in page
    assert "https://" not in page
    for name in ("main.js", "base.css", "pages.css", "icon.svg"):
        assert f"/static/{name}" in page
        assert web.get(f"/static/{name}").status_code == 200


# ------------------------------------------------------------------------------------------------ while it is written


def test_what_is_written_meanwhile_is_seen(tmp_path):
    run = made_run(tmp_path / "a", steps=1)
    web = opened(tmp_path)
    assert settled(web, run="a")["total"] == 16
    before = ask(web, "pulse", run="a")
    add_metrics(run, 2)
    write_step(run, 2)
    assert ask(web, "pulse", run="a") != before
    assert settled(web, run="a")["total"] == 24
    assert ask(web, "episode", run="a", kind="train", step=2, line=0)["step"] == 2
    write_step(run, 2, groups=1)  # the run was resumed, and the step is another one
    assert settled(web, run="a", step_from=2)["total"] == 4
    assert settled(web, run="a", text="zebra2")["total"] == 4
    (run / "episodes" / "step-000002.jsonl").unlink()
    assert settled(web, run="a")["total"] == 16


def test_a_file_that_grows_is_read_on_from_where_it_ended(tmp_path):
    run = made_run(tmp_path / "a", steps=1)
    file = run / "episodes" / "step-000001.jsonl"
    whole = file.read_bytes()
    lines = whole.splitlines(keepends=True)
    file.write_bytes(b"".join(lines[:3]) + lines[3][:40])  # the last one is torn
    web = opened(tmp_path)
    assert settled(web, run="a", kind="train")["total"] == 3
    with file.open("ab") as more:
        more.write(lines[3][40:] + b'{"not": "an episode"}\n' + lines[4])
    assert settled(web, run="a", kind="train")["total"] == 5
    assert ask(web, "episode", run="a", kind="train", step=1, line=5)["id"] == json.loads(lines[4])["id"]


def test_two_viewers_make_one_index(tmp_path):
    run = made_run(tmp_path / "a", steps=3)
    indices = [EpisodeIndex(run) for _ in range(4)]
    threads = [threading.Thread(target=index.begin) for index in indices]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(index.wait(20) for index in indices)
    with indices[0].reading() as rows:
        assert rows.execute("SELECT count(*) FROM episodes").fetchone()[0] == 32


def test_an_index_is_in_the_cache_and_a_damaged_one_or_a_cache_that_cannot_be_written_is_replaced(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    made_run(tmp_path / "runs" / "one", steps=1)
    assert settled(opened(tmp_path / "runs"), run="one")["total"] == 16
    (index,) = (tmp_path / "cache" / "arborl" / "view").glob("*.sqlite3")
    index.write_bytes(b"this is no index" * 99)
    assert settled(opened(tmp_path / "runs"), run="one")["total"] == 16
    (tmp_path / "file").write_text("a file")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert settled(opened(tmp_path / "runs"), run="one")["total"] == 16


def test_another_folder_in_the_place_of_a_run_has_an_index_of_its_own(tmp_path):
    run = made_run(tmp_path / "a", steps=1)
    before = EpisodeIndex(run)
    before.begin()
    run.rename(tmp_path / "moved")
    after = EpisodeIndex(made_run(tmp_path / "a", steps=1))
    after.begin()
    assert before.path != after.path


def test_an_index_without_recent_use_is_deleted(tmp_path):
    for name, age in (("old", MAX_AGE_SECONDS + 60), ("new", 60)):
        for end in ("", "-wal"):
            (tmp_path / f"{name}.sqlite3{end}").touch()
        os.utime(tmp_path / f"{name}.sqlite3", (time.time() - age,) * 2)
    delete_unused(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["new.sqlite3", "new.sqlite3-wal"]


def test_a_run_without_anything_is_shown_empty(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "config.yaml").write_text("{ not yaml")
    web = opened(tmp_path)
    assert ask(web, "runs")["runs"][0]["state"] == "empty"
    assert settled(web, run="a")["rows"] == []
    assert ask(web, "names", run="a") == []
    assert ask(web, "steps", run="a") == []


def test_a_running_run_is_known_by_its_lock(tmp_path):
    filelock = pytest.importorskip("filelock")
    if not os.path.exists("/proc/locks"):
        pytest.skip("needs the system's table of locks")
    run = made_run(tmp_path / "a", steps=1)
    web = opened(tmp_path)
    with filelock.FileLock(run / ".lock"):
        assert ask(web, "runs")["runs"][0]["state"] == "running"
    assert ask(web, "runs")["runs"][0]["state"] == "interrupted"
