"""Convert every file of a folder of another system, and run the check of docs/migrate.md on each converted file.

    python benchmarks/convert_folders.py verl verl/examples --pattern '*.sh' --check
    python benchmarks/convert_folders.py roll ROLL/examples --pattern '*.yaml' --check
    python benchmarks/convert_folders.py agentfly AgentFly/examples --pattern '*.sh' --check

The check is `arborl train FILE model=seedling trainer.steps=1 --stub`, run in one process for all files, in a temporary
folder. Every key of their files must be in the report; a key that is not there is an error of its own.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import logging
import tempfile
import warnings
from collections import Counter
from pathlib import Path

from arborl.config.load_config import load
from arborl.convert import SYSTEMS, convert
from arborl.convert.conversion_report import as_yaml
from arborl.errors import ArborError
from arborl.training_run import train


def converted(system: str, file: Path, out: Path) -> tuple[str, str]:
    """`converted`, `refused` or `incomplete` (keys without an outcome), and the reason."""
    try:
        draft = convert(system, [file])
    except ArborError as error:
        return "refused", str(error).splitlines()[0]
    if missing := [key for key in draft.source if key not in draft.accounted()]:
        return "incomplete", ", ".join(missing)
    out.write_text(as_yaml(draft.tree()), encoding="utf-8")
    return "converted", ""


def checked(file: Path, overrides: list[str]) -> tuple[str, str]:
    """`runs` or `fails`, and the error."""
    said = io.StringIO()
    try:
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            train(load(file, ["model=seedling", "trainer.steps=1", *overrides], unset="stub"), stub=True)
    except Exception as error:  # any failure of any file is a row of the table
        return "fails", f"{type(error).__name__}: {error}".splitlines()[0]
    return "runs", ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("system", choices=tuple(SYSTEMS))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--pattern", default="*.sh")
    parser.add_argument("--check", action="store_true", help="run the check on each converted file")
    parser.add_argument("--set", nargs="*", default=[], help="overrides of the check, such as model.dtype=float32")
    parser.add_argument("--json", action="store_true", help="one JSON object per file")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    outcomes: Counter[str] = Counter()
    folder = args.folder.resolve()
    files = sorted(folder.rglob(args.pattern))
    with tempfile.TemporaryDirectory() as scratch, contextlib.chdir(scratch):
        for number, file in enumerate(files):
            out = Path(f"{number}.yaml").resolve()
            outcome = converted(args.system, file, out)
            if outcome[0] == "converted" and args.check:
                outcome = checked(out, args.set)
            name = str(file.relative_to(folder))
            outcomes[outcome[0]] += 1
            row = {"file": name, "outcome": outcome[0], "reason": outcome[1]}
            print(json.dumps(row) if args.json else f"{outcome[0]:10} {name}  {outcome[1][:160]}", flush=True)
    print(f"{len(files)} files: {dict(outcomes)}")


if __name__ == "__main__":
    main()
