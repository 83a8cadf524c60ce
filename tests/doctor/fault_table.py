"""Writes docs/results/doctor.md from what the doctor finds of each fault here: `python tests/doctor/fault_table.py`."""

from __future__ import annotations

import os
import platform
import re
import sys
import tempfile
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "results" / "doctor.md"
ROW = re.compile(r"^\| (?P<what>[^|]+) \| [^|]+ \| `(?P<finding>[^`]+)` \| (?P<outcome>found|missed) \|$", re.MULTILINE)
HEAD = """# What the doctor finds

```
python tests/doctor/fault_table.py
```

Each fault is made, and the doctor asked. *doctor --model* is a fault of a model's folder or a configuration, found
before a run; *a run* is a small run with the fault, from its first step to its folder; *its files* is a fault written
into the folder of a run that is well. The same table is run by `tests/doctor/test_faults.py`, which also asks of runs
that are well (FrozenLake, PPO, episodes played ahead, Sokoban, a shop, and a folder written by hand): nothing may be
found there. What each finding means is in [doctor.md](../doctor.md).

Once, 2026-11-16, it was also asked of 20 runs of other shapes, all of them well: the demo; three steps and one; GSPO,
GiGPO, PPO, RLOO, DAPO; adapters; episodes played ahead; other seeds; groups of 2 and of 32; no evaluation; Sokoban,
rooms, the shop, a calculator, three sources in one run, StateLM; and of 105 moments of 14 of them, as if each were
still going on (the files up to a step). Nothing was found. A step size of 3 with GSPO was: `lr_too_high`.

"""


def listed(text: str) -> list[tuple[str, str, str]]:
    """Fault, finding and outcome of each row of the page."""
    return [(row["what"], row["finding"], row["outcome"]) for row in ROW.finditer(text)]


def main() -> None:
    from faults import FAULTS

    lines = ["| fault | looked at | finding | |", "|---|---|---|---|"]
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
