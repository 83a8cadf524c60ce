"""The example programs run from the command line and say what they measured."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from forked import forked

ROOT = Path(__file__).parents[2]
LONG = ("technical_support_agent.py", "custom_domain_agent.py", "sales_assistant.py")
"""As `customer_service_bot.py`, which is always run."""
EXAMPLES = [
    pytest.param(path.name, marks=[pytest.mark.slow] if path.name in LONG else [])
    for path in sorted((ROOT / "examples").glob("*.py"))
]


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_runs_and_tells_before_and_after(name, tmp_path):
    words = [str(ROOT / "examples" / name), "--episodes", "2", "--out", str(tmp_path / "run")]
    code, output = forked(*words, cwd=tmp_path, env={"COLUMNS": "120"})
    assert code == 0, output
    for when in ("before", "after"):
        assert re.search(rf"^{when}: .*reward \d\.\d+", output, re.M), output
    assert (tmp_path / "run" / "report.html").is_file()
    assert {path.name for path in tmp_path.iterdir()} <= {"run", "checkpoints"}


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_is_short_enough_to_be_read_and_says_which_model_to_take(name):
    text = (ROOT / "examples" / name).read_text()
    assert text.count("\n") < 80
    assert "--model Qwen/" in text
