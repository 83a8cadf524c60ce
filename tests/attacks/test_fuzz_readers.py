"""Every reader of files against some with bytes changed, cut, doubled or replaced: each is read, or refused.

Quick by default; `pytest tests/attacks --hypothesis-profile thorough` reads ten times as many.
"""

import asyncio
import contextlib
import json
import random
import signal
import threading
import tracemalloc
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import settings

from arborl.checkpoint import checkpoint
from arborl.checkpoint.manifest import check
from arborl.config.load_config import load
from arborl.data import FileTasks
from arborl.data.reading.tables import ParquetTable
from arborl.errors import ConfigError
from arborl.rollout.episode_store import EpisodeStore, RolloutRecorder, RolloutReplay
from arborl.tools.remote.tool_dispatcher import CallJournal
from arborl.track.jsonl import JsonlTracker, read_metrics
from arborl.types import Call, Completion, Episode, FinishReason, Group, Message, Task, ToolCall, Turn

ROWS = [
    {"question": f"{n} + «é»?", "answer": str(n), "extra": {"numbers": [n, 2.5], "messages": None}} for n in range(20)
]
CONFIG = """
name: mine
env: &env {name: frozen_lake, args: {size: 4}}
agent: {name: chat, args: {}}
trainer: {steps: 3, save_every: 1}
evaluation: {tasks: 4}
output_dir: runs/${name}
"""
PIECES = [
    b"{", b"[", b"]", b"}", b'"', b",", b"\n", b"\0", b"\xff", b"\xed\xa0\x80", b"\\ud800", b"null", b"NaN", b"1e999",
    b"-1", b"9" * 5000, b"[" * 500, b'{"a":' * 500, b"*env", b"&a ", b"${name}", b"${", b"<<: ",
    b"!!python/object:os.system ",
    b"- ", b"? ", b"\t", b": ", b'"' * 3, b"\r", b"\xef\xbb\xbf", b"true", b"0x10", b"../..", b"/etc/passwd",
]  # fmt: skip


def mutated(data: bytes, rng: random.Random) -> bytes:
    """Some of it changed."""
    out = bytearray(data)
    for _ in range(rng.randrange(1, 5)):
        at, length = rng.randrange(len(out) + 1), rng.randrange(1, 16)
        match rng.randrange(6):
            case 0:
                out[at : at + length] = rng.randbytes(length)
            case 1 if at < len(out):
                out[at] ^= 1 << rng.randrange(8)
            case 2:
                del out[at : at + length * rng.choice([1, 1, 20])]
            case 3:
                out[at:at] = out[at : at + 50]
            case 4:
                del out[at:]
            case _:
                out[at:at] = rng.choice(PIECES)
    return bytes(out)


def rows_file(name: str, text: str):
    def make(folder: Path) -> Path:
        (folder / name).write_text(text, encoding="utf-8")
        return folder / name

    return make


def parquet(folder: Path) -> Path:
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), folder / "rows.parquet", row_group_size=7)
    return folder / "rows.parquet"


def by_blocks(path: Path) -> None:
    table = ParquetTable(path, block=4)
    table.rows(range(int(table.sizes.sum())))


def saved(folder: Path, name: str) -> Path:
    def write(to: Path) -> None:
        (to / "model").mkdir()
        (to / "model" / "config.json").write_text("{}")

    state = {"step": 3, "train_seconds": 1.5, "algorithm": {}, "data": {}, "before": {}, "seed": 0}
    return checkpoint.save(folder / "checkpoints", 3, write, state, keep=1) / name


def played() -> Group:
    call = ToolCall("1", "add", {"a": 1})
    turn = Turn(Message("assistant", "é", (call,), sampled=True), (Message("tool", "3", tool_call_id="1"),), 1.0, "k")
    first, second = Completion((3, 4), (-0.5, -0.25), FinishReason.STOP), Completion((5,), (-1.0,), FinishReason.STOP)
    calls = [Call((1, 2), first, 0), Call((1, 2, 3), second, 1)]
    return Group(Task("t", (Message("user", "hi"),)), [Episode("a", Task("t"), turns=[turn], calls=calls)])


def episodes(folder: Path) -> Path:
    return EpisodeStore(folder).write(1, [played(), played()])


def metrics(folder: Path) -> Path:
    tracker = JsonlTracker(folder / "metrics.jsonl")
    for step in range(5):
        tracker.log({"reward/mean": step / 3, "bad": float("nan")}, step)
    tracker.close()
    return folder / "metrics.jsonl"


def journal(folder: Path) -> Path:
    made = CallJournal(folder / "journal")
    made.begin("a", "digest")
    made.open_session("s")
    made._connection.execute("PRAGMA journal_mode=DELETE")
    made.close()
    return folder / "journal"


def open_journal(path: Path) -> None:
    for beside in ("-wal", "-shm", "-journal"):
        Path(f"{path}{beside}").unlink(missing_ok=True)
    CallJournal(path).close()


READERS = {
    "JSON rows": (rows_file("rows.json", json.dumps(ROWS)), FileTasks),
    "JSONL rows": (rows_file("rows.jsonl", "".join(json.dumps(row) + "\n" for row in ROWS)), FileTasks),
    "CSV rows": (rows_file("rows.csv", "question,answer\n" + 'a,"b, ""c"""\n' * 20), FileTasks),
    "Parquet rows": (parquet, FileTasks),
    "Parquet rows by blocks": (parquet, by_blocks),
    "configuration": (rows_file("run.yaml", CONFIG), load),
    "manifest": (lambda folder: saved(folder, "MANIFEST"), lambda path: check(path.parent, verify=True)),
    "state": (lambda folder: saved(folder, "state.json"), lambda path: checkpoint.load_state(path.parent)["before"]),
    "episodes": (episodes, lambda path: list(EpisodeStore.read(path))),
    "metrics": (metrics, lambda path: list(read_metrics(path))),
    "journal": (journal, open_journal),
}
SLOW = {"configuration": 4, "journal": 2}
"""Read so many times fewer."""


@contextlib.contextmanager
def no_longer_than(seconds: int):
    """A reader that hangs is a failure with a traceback of where."""
    before = signal.signal(signal.SIGALRM, lambda *_: pytest.fail(f"took longer than {seconds} s"))
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("kind", READERS)
def test_a_changed_file_is_read_or_refused_in_one_line(kind, tmp_path):
    make, read = READERS[kind]
    path = make(tmp_path)
    good = path.read_bytes()
    read(path)
    rng, threads = random.Random(kind), threading.active_count()
    received: list[str] = []
    for _ in range(5 * settings().max_examples // SLOW.get(kind, 1)):
        path.write_bytes(mutated(good, rng))
        try:
            with no_longer_than(20):
                read(path)
        except ConfigError as error:
            received.append(str(error))
    assert all(0 < len(text) < 20_000 for text in received)  # a name of 5,000 digits may be repeated
    assert received or kind == "metrics"  # torn lines are left out there
    assert threading.active_count() <= threads


@pytest.mark.parametrize("kind", ["JSON rows", "CSV rows", "episodes", "state"])
def test_reading_bad_files_holds_no_memory(kind, tmp_path):
    make, read = READERS[kind]
    path = make(tmp_path)
    good, rng = path.read_bytes(), random.Random(0)

    def several() -> int:
        for _ in range(60):
            path.write_bytes(mutated(good, rng))
            with contextlib.suppress(ConfigError):
                read(path)
        return tracemalloc.get_traced_memory()[0]

    tracemalloc.start()
    try:
        several()
        first, second = several(), several()
    finally:
        tracemalloc.stop()
    assert second - first < 200_000


def test_a_changed_recording_is_replayed_or_refused_in_one_line(tmp_path):
    async def play() -> list[Group]:
        return [played()]

    path, tasks = tmp_path / "tape.jsonl", [Task("t")]
    asyncio.run(RolloutRecorder(path).batch(7, tasks, play))
    good, rng, refused = path.read_bytes(), random.Random(0), 0
    for _ in range(5 * settings().max_examples):
        path.write_bytes(mutated(good, rng))
        try:
            asyncio.run(RolloutReplay(path).batch(7, tasks, play))
        except ConfigError:
            refused += 1
    assert refused
