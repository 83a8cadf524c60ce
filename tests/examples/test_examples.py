"""The example programs run from the command line and say what they measured."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted(path.name for path in (ROOT / "examples").glob("*.py"))


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_runs_and_tells_before_and_after(name, tmp_path):
    words = [sys.executable, str(ROOT / "examples" / name), "--episodes", "2", "--out", str(tmp_path / "run")]
    done = subprocess.run(words, capture_output=True, text=True, cwd=tmp_path, env={**os.environ, "COLUMNS": "120"})
    assert done.returncode == 0, done.stderr
    for when in ("before", "after"):
        assert re.search(rf"^{when}: .*reward \d\.\d+", done.stdout, re.M), done.stdout
    assert (tmp_path / "run" / "report.html").is_file()
    assert {path.name for path in tmp_path.iterdir()} <= {"run", "checkpoints"}


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_is_short_enough_to_be_read_and_says_which_model_to_take(name):
    text = (ROOT / "examples" / name).read_text()
    assert text.count("\n") < 80
    assert "--model Qwen/" in text
