"""Writes the tables of docs/security.md from what the attacks came to here: `python tests/attacks/attack_table.py`.

Levels that this machine does not have keep the column they had.
"""

import platform
import re
import sys
from pathlib import Path

from attack_list import ATTACKS
from attack_runner import HELD, available, fuzz, fuzz_reader, outcomes

PAGE = Path(__file__).parents[2] / "docs" / "security.md"
LEVELS = ("bubblewrap", "namespaces", "rlimits")
ROW = re.compile(r"^\| (?P<area>[^|]+) \| (?P<name>[^|]+) \| (?P<must_not>[^|]+) \| (?P<cells>.+) \|$", re.MULTILINE)
SANDBOXES, FRAMES = 300, 200_000


def between(text: str, name: str) -> str:
    return text.partition(f"<!-- {name} -->\n")[2].partition("<!-- end -->")[0]


def put(text: str, name: str, inside: str) -> str:
    before, mark, rest = text.partition(f"<!-- {name} -->\n")
    return f"{before}{mark}{inside}<!-- end -->{rest.partition('<!-- end -->')[2]}"


def cells(text: str) -> dict[str, dict[str, str]]:
    """What the page says of each attack at each level."""
    found = {}
    _, _, rows = between(text, "attacks").partition("|---")
    for row in ROW.finditer(rows):
        found[row["name"]] = dict(zip(LEVELS, row["cells"].split(" | "), strict=True))
    return found


def table(received: dict[str, dict[str, str]]) -> str:
    lines = [f"| area | attack | must not happen: | {' | '.join(f'`{level}`' for level in LEVELS)} |", "|---" * 6 + "|"]
    for attack in ATTACKS:
        row = [received.get(attack.name, {}).get(level, "not run") for level in LEVELS]
        lines.append(f"| {attack.area} | {attack.name} | {attack.must_not} | {' | '.join(row)} |")
    return "\n".join(lines) + "\n"


def shown(outcome: tuple[str, str]) -> str:
    return "held" if outcome[0] == HELD else "**open**"


def main() -> None:
    text = PAGE.read_text()
    received = cells(text)
    here = available()
    fuzzed = [f"The reader alone, {FRAMES:,} random frames in random pieces: {counted(fuzz_reader(FRAMES))}.\n"]
    for level in here:
        for name, outcome in outcomes(level).items():
            received.setdefault(name, {})[level] = shown(outcome)
            if outcome[0] != HELD:
                sys.stderr.write(f"{level}: {name}: {outcome[1]}\n")
        fuzzed.append(f"{SANDBOXES} hostile guests at `{level}`, two runs each: {counted(fuzz(level, SANDBOXES))}.\n")
    where = f"Last run on Linux {platform.release().partition('-')[0]}, {platform.machine()}: {', '.join(here)}.\n"
    text = put(text, "attacks", f"{where}\n{table(received)}")
    PAGE.write_text(put(text, "fuzzing", "\n".join(fuzzed)))


def counted(counts: dict[str, int]) -> str:
    return ", ".join(f"{count:,} {name}" for name, count in sorted(counts.items()))


if __name__ == "__main__":
    main()
