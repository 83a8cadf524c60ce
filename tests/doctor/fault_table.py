"""Writes docs/results/doctor.md, the findings for each fault: `python tests/doctor/fault_table.py`."""

from __future__ import annotations

import os
import platform
import re
import sys
import tempfile
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "results" / "doctor.md"
ROW = re.compile(r"^\| (?P<what>[^|]+) \| [^|]+ \| `(?P<finding>[^`]+)` \| (?P<outcome>found|missed) \|$", re.MULTILINE)
HEAD = """# Fault injection: what the doctor detects

```
python tests/doctor/fault_table.py
```

The script injects each fault and runs the doctor. *doctor --model* is a fault of a model folder or a configuration,
found before a run; *run* is a small run with the fault; *run files* is a fault written into the folder of a healthy
run. `tests/doctor/test_faults.py` runs the same table, and also healthy runs (FrozenLake, PPO, asynchronous training,
Sokoban, a shop, a generated folder), in which nothing may be found. [doctor.md](../doctor.md) explains the findings.

On 2026-11-16 the doctor was also run on 20 other healthy runs: the demo; three steps and one; GSPO, GiGPO, PPO, RLOO,
DAPO; adapters; asynchronous training; other seeds; groups of 2 and of 32; no evaluation; Sokoban, rooms, the shop, a
calculator, three sources in one run, StateLM; and on 105 intermediate states of 14 of them (the files up to a step).
Nothing was found. A learning rate of 3 with GSPO was found: `lr_too_high`.

"""


def listed(text: str) -> list[tuple[str, str, str]]:
    """Fault, finding and outcome of each row of the page."""
    return [(row["what"], row["finding"], row["outcome"]) for row in ROW.finditer(text)]


def main() -> None:
    from faults import FAULTS

    lines = ["| fault | checked | finding | result |", "|---|---|---|---|"]
    missed = 0
    for fault in FAULTS:
        with tempfile.TemporaryDirectory() as place:
            found = {one.name for one in fault.find(Path(place)) if one.state != "ok"}
        outcome = "found" if fault.finding in found else "missed"
        missed += outcome == "missed"
        lines.append(f"| {fault.what} | {fault.how} | `{fault.finding}` | {outcome} |")
        sys.stderr.write(f"{outcome}: {fault.what}\n")
    where = f"Python {platform.python_version()}, {platform.machine()}, {os.cpu_count()} cores"
    total = f"**{len(FAULTS) - missed} of {len(FAULTS)} found** ({where}).\n\n"
    PAGE.write_text(HEAD + total + "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
