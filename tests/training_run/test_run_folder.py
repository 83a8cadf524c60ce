"""A run's folder belongs to one process; conflicts give a one-line error and leave no files."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from small_runs import LAKE, invoke
from typer.testing import CliRunner

from arborl.cli.main import app
from arborl.config.config_base import dump_yaml
from arborl.config.run_config import RunConfig
from arborl.errors import ConfigError
from arborl.training_run.run_folder import claimed, link_checkpoints

CLAIM = """
import sys, time
from pathlib import Path
from arborl.training_run.run_folder import claimed
from arborl.config.run_config import RunConfig
given = Path(sys.argv[1]) if len(sys.argv) > 1 else None
print("ready", flush=True)
sys.stdin.readline()
with claimed(RunConfig(output_dir=given), resuming=False) as folder:
    (folder / "config.yaml").write_text("")
    print(folder, flush=True)
    time.sleep(60)
"""


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def start(*words: str) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", CLAIM, *words], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        stderr=subprocess.PIPE,
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def go(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


def line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def test_runs_started_at_once_get_a_folder_each():
    processes = [start() for _ in range(4)]
    try:
        for process in processes:
            go(process)
        assert sorted(map(line, processes)) == [f"runs/frozen-lake-00{n}" for n in range(1, 5)]
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def test_of_two_runs_into_one_folder_one_is_refused_and_the_lock_dies_with_its_process(here):
    both = [start("x"), start("x")]
    for process in both:
        go(process)
    output = [line(process) for process in both]
    assert sorted(output) == ["", "x"]
    winner, loser = (both[output.index(name)] for name in ("x", ""))
    assert "is locked: another process trains there" in loser.communicate()[1]
    with pytest.raises(ConfigError, match="is locked"), claimed(RunConfig(output_dir=here / "x"), resuming=True):
        pass
    winner.send_signal(signal.SIGKILL)
    winner.communicate()
    with claimed(RunConfig(output_dir=here / "x"), resuming=True) as folder:
        assert folder == here / "x"


def test_numbers_go_on_beyond_999(here):
    for name in ("frozen-lake-007", "frozen-lake-1234", "frozen-lake-x", "other-5000"):
        (here / "runs" / name).mkdir(parents=True)
    with claimed(RunConfig(), resuming=False) as folder:
        assert folder == Path("runs/frozen-lake-1235")


def fail_in(output_dir: Path | None, write: bool = False) -> None:
    with claimed(RunConfig(output_dir=output_dir), resuming=False) as folder:
        if write:
            (folder / "config.yaml").touch()
        raise RuntimeError


@pytest.mark.parametrize("given", [None, Path("a/b/c")])
def test_what_was_made_for_nothing_is_taken_away_again(here, given):
    with pytest.raises(RuntimeError):
        fail_in(given)
    assert list(here.iterdir()) == []


def test_what_was_there_or_was_written_stays(here):
    (here / "mine").mkdir()
    for folder, write in ((here / "mine", False), (here / "new", True)):
        with pytest.raises(RuntimeError):
            fail_in(folder, write)
    assert (here / "mine").is_dir()
    assert (here / "new" / "config.yaml").exists()


def test_a_folder_left_by_a_run_that_wrote_nothing_is_free(here):
    (here / "x").mkdir()
    (here / "x" / ".lock").touch()
    with claimed(RunConfig(output_dir=here / "x"), resuming=False) as home:
        assert home == here / "x"
    assert home.is_dir()


def make(here: Path, kind: str) -> None:
    run = here / "x"
    run.mkdir()
    if kind == "foreign":
        for name in ("notes.txt", "photo.png", "a", "b"):
            (run / name).touch()
        return
    (run / "config.yaml").write_text(dump_yaml(RunConfig()))
    if kind == "torn":
        (run / "config.yaml").write_text("seed: 1\nlearner: [0.9\n")
    if kind == "bytes":
        (run / "config.yaml").write_bytes(os.urandom(200))
    if kind == "empty":
        (run / "config.yaml").write_text("")
    if kind == "a list":
        (run / "config.yaml").write_text("- 1\n- 2\n")
    if kind in ("half", "a file"):
        (run / "checkpoints").mkdir()
    if kind == "half":
        (run / "checkpoints" / "step-000001").mkdir()
    if kind == "a file":
        (run / "checkpoints" / "step-000001").write_text("")


POISON = {
    "foreign": (["train", "output_dir=x"], "is not empty: a, b, notes.txt and 1 more. Write a new"),
    "run": (["train", "output_dir=x"], "already has a run. Write --resume latest"),
    "torn": (["train", "--resume", "latest", "output_dir=x"], "not valid YAML"),
    "bytes": (["evaluate", "x"], "config.yaml"),
    "a list": (["evaluate", "x"], "must be keys with values"),
    "half": (["train", "--resume", "latest", "output_dir=x"], "no complete checkpoint in x/checkpoints"),
    "empty": (["evaluate", "x"], "no complete checkpoint"),
    "a file": (["evaluate", "x"], "no complete checkpoint"),
}


@pytest.mark.parametrize("kind", POISON)
def test_a_folder_that_cannot_be_used_is_one_line(here, kind):
    make(here, kind)
    before = sorted(here.rglob("*"))
    words, complaint = POISON[kind]
    output = CliRunner().invoke(app, words)
    assert output.exit_code == 2, output.output
    assert complaint in output.stderr
    assert output.stderr.count("\n") == 1
    assert [path for path in sorted(here.rglob("*")) if path.name != ".lock"] == before


@pytest.mark.parametrize("given", ["file/run", "/proc/arborl-run", "n" * 300])
def test_where_nothing_can_be_written_is_one_line(here, given):
    (here / "file").touch()
    output = CliRunner().invoke(app, ["train", f"output_dir={given}"])
    assert output.exit_code == 2, output.output
    assert "output_dir: cannot write" in output.stderr
    assert output.stderr.count("\n") == 1


def test_mistakes_that_need_no_model_are_found_without_torch(here):
    code = "import sys; from typer.testing import CliRunner; from arborl.cli.main import app\n"
    code += "for words in {}:\n    assert CliRunner().invoke(app, ['train', *words]).exit_code == 2, words\n"
    code += "print(sorted({{'torch', 'transformers', 'matplotlib'}} & set(sys.modules)))"
    wrong = [
        ["env=frozen_lak"], ["agent=chatt"], ["rewards=[envv]"], ["agent=tool", "tools=[calculater]"], ["engine=locl"],
        ["rollout.group_filter=varid"], ["model=seedlin"], ["model.device=toaster"], ["sampling.max_context=100000"],
        ["data.path=missing.json", "rewards=[exact]"], ["env.args.sise=4"], ["env.args.size=1"], ["lr=1"],
        ["algorithm=ppo", "learner.critic=none"], ["algorithm=grpoo"], ["output_dir=/proc/x"], ["--resume", "latest"],
    ]  # fmt: skip
    ran = subprocess.run([sys.executable, "-c", code.format(wrong)], capture_output=True, text=True)
    assert ran.stdout.strip() == "[]", ran.stderr


def test_checkpoints_go_to_another_folder_and_the_run_has_a_link_to_it(here):
    (here / "out" / "a").mkdir(parents=True)
    for _ in range(2):  # a run that begins again, before its first checkpoint, finds its link
        link_checkpoints(Path("out/a"), Path("disk"))
    assert (here / "out" / "a" / "checkpoints").resolve() == here / "disk" / "a"
    (here / "disk" / "b").mkdir()
    (here / "disk" / "b" / "step-000001").mkdir()
    (here / "out" / "b").mkdir()
    with pytest.raises(ConfigError, match=r"trainer.checkpoint_dir: .* is not empty"):
        link_checkpoints(here / "out" / "b", here / "disk")
    (here / "file").touch()
    with pytest.raises(ConfigError, match=r"trainer.checkpoint_dir: cannot write .*null for the run folder"):
        link_checkpoints(here / "out" / "b", here / "file")


def test_a_run_with_checkpoints_elsewhere_is_resumed_and_evaluated(here):
    small = [*LAKE, "evaluation.tasks=0", "output_dir=out"]
    done = invoke("train", *small, "trainer.steps=1", "trainer.checkpoint_dir=disk")
    assert done.exit_code == 0, done.output
    assert [path.name for path in (here / "disk" / "out").glob("step-*")] == ["step-000001"]
    done = invoke("train", "--resume", "latest", "output_dir=out", "trainer.steps=2")
    assert done.exit_code == 0, done.output
    assert (here / "disk" / "out" / "step-000002").is_dir()
    refused = invoke("train", "--resume", "latest", "output_dir=out", "trainer.steps=3", "trainer.checkpoint_dir=other")
    assert (refused.exit_code, "its other checkpoints are there" in refused.stderr) == (2, True)
