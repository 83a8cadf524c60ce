"""Wrong input of every command is reported in a line with exit code 2, and nothing is written."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from arborl.cli.main import app

EXTRAS = {"tune": "optuna", "serve": "fastapi", "chat": "fastapi"}
"""Packages that a command needs."""
LR = "tune --param learner.lr=log:1e-5:1e-2"
BAD: dict[str, str] = {
    "data make arithmatic": "Did you mean 'arithmetic'?",
    "data make arithmetic levl=2": "arithmetic.levl: unknown argument. Did you mean 'level'?",
    "data make code kind=essay": "kind='essay'",
    "data make transcripts kind=countdwn": "Did you mean 'countdown'?",
    "data make": "Missing argument",
    "data inspect none.json": "none.json: no such file",
    "data mix": "Missing argument",
    "data mix env=frozen_lake": "no rows to mix",
    "data prepare novelqa --input x.json": "with --books FOLDER",
    "data prepare longbench-v2 --input none.json": "none.json: no such file",
    "data prepare longbench-v2": "Missing option '--input'",
    "evaluate seedling seed": "A setting is written seed=VALUE",
    "evaluate seedling seedling": "seedling: named twice",
    "evaluate seedling --output x.txt": "Write one of .json, .jsonl, .csv, .html.",
    "evaluate seedling --output no/x.json": "there is no folder 'no'",
    "evaluate seedling --message Hi --env sokoban": "--env and --episodes select held-out tasks",
    "evaluate seedling --base-url http://x": "Write --model openai:NAME.",
    "evaluate seedling --input none.json": "none.json",
    "evaluate seedling --message Hi --message=": "prompt 2, question: empty",
    "evaluate openai:x --base-url http://127.0.0.1:9": "no server there",
    "rollout --stub --env frozen_lak": "Did you mean 'frozen_lake'?",
    "rollout --stub --task 99": "--task 99: there are 16 tasks, 0 to 15.",
    "rollout --stub --enw x": "unknown option. Did you mean '--env'?",
    "serve": "no model to serve",
    "serve seedling --host 0.0.0.0": "Write --api-key KEY",
    "serve no/such/folder": "no model is called",
    "serve seedling --follow nowhere": "no config.yaml",
    "serve seedling --api-key-file nowhere": "cannot be read",
    "serve seedling --checkpoint other": "other",
    "chat": "no model. Write",
    "chat seedling --agent other": "the run has chat",
    "chat seedling --field document_content": "NAME=FILE",
    "init envv x": "Did you mean 'env'?",
    "init env": "Write arborl init env NAME.",
    "init env my-env": "not a module name",
    "init env x --path y": "--path is for a configuration",
    "init --preset lakes": "Did you mean 'lake'?",
    "init --path run.txt": "Write run.yaml.",
    "init --path no/run.yaml": "there is no folder 'no'",
    "tune": "the search space is empty. Write --param NAME=log:LOW:HIGH",
    "tune --param learner.lrr=log:1e-5:1": "learner.lrr: unknown key. Did you mean 'learner.lr'?",
    "tune --param learner.lr=log:1e-2:1e-5": "learner.lr: low=0.01 must be below high=1e-05.",
    "tune --param learner.lr=log:0:1": "learner.lr: low=0 of a loguniform must be above 0",
    "tune --param learner.lr=": "learner.lr: choices is empty",
    f"{LR} --trials 0": "trials=0 must be a whole number >= 1",
    f"{LR} --jobs 0": "jobs=0 must be a whole number >= 1",
    f"{LR} --metric eval/sucess": "metric=eval/sucess: the run does not measure it. Did you mean",
    f"{LR} --backend optua": "no backend is called 'optua'. Did you mean 'optuna'?",
    f"{LR} --direction up": "direction='up' must be maximize or minimize.",
    "tune --space gpro": "--space gpro: no such file or search space. Did you mean 'grpo'?",
    f"{LR} --budget step": "--budget step: must be one of episodes, free.",
    f"{LR} --trails 3": "--trails: unknown option. Did you mean '--trials'?",
    f"{LR} trainer.stepz=3": "trainer.stepz: unknown key. Did you mean 'trainer.steps'?",
    f"{LR} output_dir=x": "output_dir=x: all trials would write there.",
    f"{LR} env=frozen_lakes": "Did you mean 'frozen_lake'?",
    f"{LR} model=seedlin": "seedlin",
}


@pytest.mark.parametrize(("line", "message"), BAD.items(), ids=BAD)
def test_wrong_input_is_an_error_without_a_traceback_and_writes_nothing(line: str, message: str, here: Path) -> None:
    words = line.split()
    pytest.importorskip(EXTRAS.get(words[0], "typer"))
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 2, done.output
    assert message in " ".join(done.output.split())
    assert "Traceback" not in done.output
    assert list(here.iterdir()) == []
