"""A hostile run folder in the viewer and in reports: it changes nothing, blocks nothing, and hurts no other run."""

from __future__ import annotations

import io
import json
import os
import shutil
import socket
import sqlite3
import threading
import zipfile
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("fastapi")
import pytest
from fastapi.testclient import TestClient
from typer.testing import CliRunner
from web_runs import made_run

from arborl.cli.main import app
from arborl.rollout.term_store import INDEX_COLUMNS, VALUE_COLUMNS, TermStore
from arborl.track.folder_files import MAX_LINE, Unreadable, read_arrays, read_json, read_yaml, replace_file
from arborl.view.web.app import make_app

DEADLINE = 120.0
"""Seconds, on a starved machine; what these attacks did before had no end."""


def snapshot(folder: Path) -> dict[str, tuple[int, ...]]:
    """Everything below a folder, and when it was changed."""
    found = {str(path): path.lstat() for path in sorted(folder.rglob("*"))}
    return {name: (one.st_ino, one.st_mode, one.st_size, one.st_mtime_ns) for name, one in found.items()}


def within(do):
    """The result, or a failure where it takes longer than the deadline."""
    box: dict[str, object] = {}
    thread = threading.Thread(target=lambda: box.update(done=do()), daemon=True)
    thread.start()
    thread.join(DEADLINE)
    assert "done" in box, "it has not ended, or has raised"
    return box["done"]


def ask(web: TestClient, path: str, **params):
    return within(lambda: web.get(f"/{path}", params=params))


def opened(root: Path) -> TestClient:
    return TestClient(make_app(root), base_url="http://127.0.0.1:7007", raise_server_exceptions=False)


def bomb(depth: int = 24) -> str:
    lines = ["a0: &a0 [x, x]"] + [f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}]" for n in range(1, depth)]
    return "\n".join([*lines, f"name: *a{depth - 1}", ""])


def at(name: str, make):
    """Put something in the place of a file."""

    def put(run: Path) -> None:
        (run / name).parent.mkdir(parents=True, exist_ok=True)
        (run / name).unlink(missing_ok=True)
        make(run / name)

    return put


def fifo(name: str):
    return at(name, os.mkfifo)


def text(name: str, content: str):
    return at(name, lambda path: path.write_text(content))


def link(name: str, to: str):
    return at(name, lambda path: path.symlink_to(to))


def sparse(name: str, size: int):
    return at(name, lambda path: (path.touch(), os.truncate(path, size)))


def unix_socket(run: Path) -> None:
    (run / "summary.json").unlink(missing_ok=True)
    before = os.getcwd()
    os.chdir(run)
    try:
        with socket.socket(socket.AF_UNIX) as bound:
            bound.bind("summary.json")
    finally:
        os.chdir(before)


HOSTILE = {
    "aliases that grow": text("config.yaml", bomb()),
    "a name in itself": text("config.yaml", "name: &a [*a]\n"),
    "a deep configuration": text("config.yaml", "name: " + "[" * 5000 + "]" * 5000),
    "a large configuration": text("config.yaml", "x: " + "y" * 2**21),
    "odd keys": text("config.yaml", "? [1, 2]\n: 3\n0x" + "f" * 9000 + ": 1\nseed: 0x" + "f" * 9000 + "\n"),
    "a date and a set": text("config.yaml", "name: 2024-01-01\nseed: !!set {a, b}\nmodel: {name: [1]}\n"),
    "a FIFO as configuration": fifo("config.yaml"),
    "a FIFO as summary": fifo("summary.json"),
    "a FIFO as metrics": fifo("metrics.jsonl"),
    "a FIFO as list of pictures": fifo("frames/episodes.json"),
    "a FIFO as picture": fifo("frames/a.gif"),
    "a FIFO as episodes": fifo("episodes/step-000009.jsonl"),
    "a FIFO as terms": fifo("terms/step-000001.npz"),
    "a FIFO as tokenizer": fifo("checkpoints/step-000001/model/tokenizer.json"),
    "a socket as summary": unix_socket,
    "a device as summary": link("summary.json", "/dev/zero"),
    "a link to itself": link("metrics.jsonl", "metrics.jsonl"),
    "a link to a secret": link("metrics.jsonl", "/etc/passwd"),
    "a deep summary": text("summary.json", '{"before": ' + '{"a":' * 900 + "1" + "}" * 901),
    "a deeper summary": text("summary.json", "[" * 100_000),
    "a summary of other types": text("summary.json", json.dumps(
        {"before": [1], "after": {"success": "x", "reward": {}}, "failures": {"a": 1}, "train_seconds": "long"})),
    "failures of other types": text("summary.json", '{"failures": [1, {"failure": 2}, {"count": "x"}], "stopped": []}'),
    "numbers that are none": text("summary.json", '{"train_seconds": 1e999, "after": {"success": NaN, "x": -1e999}}'),
    "metrics of other types": text("metrics.jsonl", '{"step": 1, "reward/mean": {"a": 1}, "episode/success": "x"}\n'
                                   '{"step": 1' + "0" * 400 + '}\n{"step": true}\n[1]\n{"step": 2, "time/step": []}\n'),
    "a file of 1 TB": sparse("metrics.jsonl", 2**40),
    "a summary of 1 TB": sparse("summary.json", 2**40),
    "episodes of 1 TB": sparse("episodes/step-000008.jsonl", 2**40),
    "a line without end": sparse("episodes/step-000008.jsonl", 2 * MAX_LINE + 5),
    "a step without end": text("episodes/step-" + "9" * 60 + ".jsonl", "{}\n"),
    "a folder as summary": lambda run: (run / "summary.json").mkdir(),
    "links to folders": link("frames", "/etc"),
}  # fmt: skip


UNREADABLE = ("aliases that grow", "a name in itself", "a FIFO as summary", "a FIFO as metrics", "a deep summary",
              "a file of 1 TB", "a link to a secret")  # fmt: skip
"""Cases whose row in the list of runs must name the file."""


@pytest.fixture(scope="module")
def healthy(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("healthy")
    for name in ("good", "hostile"):
        made_run(folder / name, steps=1)
    return folder


@pytest.fixture
def runs(healthy, tmp_path, quick_figures) -> Path:
    return Path(shutil.copytree(healthy, tmp_path / "runs"))


@pytest.mark.parametrize("what", HOSTILE)
def test_a_hostile_folder_is_shown_and_reported_without_effect_on_anything_else(runs, what, tmp_path):
    HOSTILE[what](runs / "hostile")
    before = snapshot(runs)
    web = opened(runs)
    listed = ask(web, "api/runs")
    assert listed.status_code == 200, listed.text
    rows = {row["run"]: row for row in listed.json()["runs"]}
    assert (rows["good"]["title"], rows["good"]["problems"]) == ("good", [])
    named = "".join(rows["hostile"]["problems"][:1])
    assert what not in UNREADABLE or any(file in named for file in ("config.yaml", "summary.json", "metrics.jsonl"))
    first = {"run": "hostile", "kind": "train", "step": 1, "line": 0}
    for path, params in (
        ("api/differences", {"run": ["hostile", "good"]}),
        ("api/names", {"run": "hostile"}),
        ("api/frames", {"run": "hostile"}),
        ("api/series", {"run": ["hostile", "good"], "name": "reward/mean"}),
        ("api/steps", {"run": "hostile"}),
        ("api/pulse", {"run": ["hostile", "good"]}),
        ("api/episodes", {"run": "hostile", "facets": True}),
        ("api/episode", first),
        ("api/group", first),
        ("api/gradient", {"run": "hostile", "step": 1}),
        ("frame", {"run": "hostile", "name": "frames/a.gif"}),
    ):
        response = ask(web, path, **params)
        assert response.status_code in (200, 404, 409), (path, response.text)
        assert "root:" not in response.text
    assert ask(web, "api/episode", run="good", kind="train", step=1, line=0).status_code == 200
    for words in (["report", str(runs / "hostile"), "--out", str(tmp_path / "a.html")],
                  ["compare", str(runs / "good"), str(runs / "hostile"), "--out", str(tmp_path / "b.html")],
                  ["doctor", str(runs / "hostile")]):  # fmt: skip
        done = within(lambda words=words: CliRunner().invoke(app, words))
        assert done.exception is None or isinstance(done.exception, SystemExit), (words, done.exception)
        assert "Traceback" not in done.output
    assert snapshot(runs) == before


def test_an_index_in_a_run_folder_is_neither_opened_nor_believed(runs, tmp_path):
    """A hot journal makes SQLite delete the file that its header names; a link makes it write somewhere else."""
    victim = tmp_path / "victim.sqlite3"
    with sqlite3.connect(victim) as rows:
        rows.execute("CREATE TABLE mine (x)")
    run = runs / "hostile"
    (run / ".index.sqlite3").symlink_to(victim)
    (run / ".index.sqlite3-journal").write_bytes(b"\xd9\xd5\x05\xf9\x20\xa1\x63\xd7" + b"\0" * 600)
    (runs / "good" / ".index.sqlite3").symlink_to(tmp_path / "made-outside")
    before = (victim.read_bytes(), snapshot(runs))
    web = opened(runs)
    for name in ("good", "hostile"):
        assert ask(web, "api/episodes", run=name, kind="train").status_code == 200
        assert ask(web, "api/episode", run=name, kind="train", step=1, line=0).status_code == 200
    assert (victim.read_bytes(), snapshot(runs)) == before
    assert not (tmp_path / "made-outside").exists()


@pytest.mark.parametrize("name", ["report.html", "curve.png"])
@pytest.mark.parametrize("there", [True, False])
def test_report_writes_through_no_link(runs, tmp_path, name, there):
    victim = tmp_path / "victim"
    if there:
        victim.write_text("mine")
    (runs / "hostile" / name).symlink_to(victim)
    result = CliRunner().invoke(app, ["report", str(runs / "hostile")])
    assert result.exception is None or isinstance(result.exception, SystemExit)
    assert victim.read_text() == "mine" if there else not victim.exists()
    assert (runs / "hostile" / name).is_symlink()
    assert (result.exit_code == 2) == (name == "report.html")
    assert [path for path in (runs / "hostile").iterdir() if path.name.startswith(f".{name}")] == []


def packed(columns: dict[str, bytes]) -> bytes:
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED) as file:
        for name, data in columns.items():
            file.writestr(f"{name}.npy", data)
    return made.getvalue()


def column(array, shape: tuple[int, ...] | None = None) -> bytes:
    """As NumPy writes it; with the shape that its header is to claim."""
    made = io.BytesIO()
    if shape is None:
        np.lib.format.write_array(made, np.asarray(array))
    else:
        kind = np.lib.format.dtype_to_descr(np.asarray(array).dtype)
        np.lib.format.write_array_header_1_0(made, {"descr": kind, "fortran_order": False, "shape": shape})
        made.write(np.asarray(array).tobytes())
    return made.getvalue()


def test_terms_that_grow_or_lie_are_no_terms(tmp_path, monkeypatch):
    """3.7 MB became 5.9 GB."""
    monkeypatch.setattr("arborl.rollout.term_store.read_arrays", partial(read_arrays, max_bytes=2**20))
    store = TermStore(tmp_path)
    good = {name: column(np.zeros(3, kind)) for name, kind in (INDEX_COLUMNS | VALUE_COLUMNS).items()}
    good |= {"of": column(np.uint64(3)), "pushed": column(np.float64(1))}
    for name, bad in {
        "large": column(np.zeros(2**20)), "lying": column(np.zeros(1, np.uint32), (2**40,)),
        "negative": column(np.zeros(1, np.uint32), (-1,)), "flat": column(np.zeros((3, 1), np.uint32)),
        "objects": b"\x93NUMPY\x01\x00v\x00{'descr': '|O', 'fortran_order': False, 'shape': (3,), }" + b" " * 60,
        "other kind": column(np.zeros(3, "S9")), "no array": b"x", "empty": b"",
    }.items():  # fmt: skip
        store.path(1).write_bytes(packed(good | {"episode": bad}))
        assert store.read(1) is None, name
    columns = (INDEX_COLUMNS | VALUE_COLUMNS).items()
    together = {name: column(np.zeros(2**16, kind)) for name, kind in columns}  # each within the bound
    store.path(1).write_bytes(packed(good | together))
    assert store.read(1) is None
    store.path(1).write_bytes(packed(good))
    assert store.read(1) is not None


def test_an_episode_whose_prompts_grow_without_end_is_not_written_out(runs):
    file = runs / "hostile" / "episodes" / "step-000001.jsonl"
    row = json.loads(file.read_text().splitlines()[0])
    call = row["calls"][0]
    row["calls"] = [call, *({**call, "prompt": [0, 2**20, [n]]} for n in range(1500))]
    nested = json.loads(file.read_text().splitlines()[0])
    nested["task"]["fields"] = json.loads('{"a":' * 300 + "1" + "}" * 300)
    file.write_text(json.dumps(row) + "\n" + json.dumps(nested) + "\n")
    web = opened(runs)
    for line in (0, 1):
        assert ask(web, "api/episode", run="hostile", kind="train", step=1, line=line).status_code in (404, 409)


def test_many_readers_of_a_hostile_folder_do_not_wait(runs):
    for what in ("a FIFO as summary", "a FIFO as metrics", "a FIFO as episodes"):
        HOSTILE[what](runs / "hostile")
    web = opened(runs)
    with ThreadPoolExecutor(64) as pool:
        responses = [pool.submit(web.get, "/api/episodes", params={"run": name}) for name in ("hostile", "good") * 32]
        assert all(one.result(DEADLINE).status_code == 200 for one in responses)


def test_files_are_read_within_bounds_and_written_whole(tmp_path):
    (tmp_path / "a.json").write_text("[1, 2]")
    assert read_json(tmp_path / "a.json") == [1, 2]
    with pytest.raises(Unreadable, match="at most 3 are read"):
        read_json(tmp_path / "a.json", max_bytes=3)
    with pytest.raises(FileNotFoundError):
        read_json(tmp_path / "none.json")
    (tmp_path / "a.yaml").write_text("a: &x {b: 1}\nc: *x\n2: 0x" + "f" * 400)
    assert read_yaml(tmp_path / "a.yaml") == {"a": {"b": 1}, "c": {"b": 1}, "2": None}
    replace_file(tmp_path / "new" / "file", b"x")
    replace_file(tmp_path / "new" / "file", b"y")
    assert (tmp_path / "new" / "file").read_bytes() == b"y"
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["file"]


@pytest.mark.parametrize("what", ["aliases that grow", "a name in itself", "a FIFO as summary", "a FIFO as metrics",
                                  "a deep summary", "a file of 1 TB", "a link to a secret"])  # fmt: skip
def test_the_row_of_a_folder_that_cannot_be_read_says_so(runs, what):
    HOSTILE[what](runs / "hostile")
    rows = {row["run"]: row for row in ask(opened(runs), "api/runs").json()["runs"]}
    assert any(file in rows["hostile"]["problems"][0] for file in ("config.yaml", "summary.json", "metrics.jsonl"))
