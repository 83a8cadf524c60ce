"""Write train.json: arithmetic word problems as rows of question and answer.

python recipes/calculator/make_data.py [--count 2000] [--level 1] [--seed 0] [--out recipes/calculator/train.json]
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from arborl.data.arithmetic import problems


def main() -> None:
    parser = argparse.ArgumentParser(description="Write arithmetic word problems.")
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--level", type=int, default=1, help="1: one operation, 2: two, 3: division and percent too")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "train.json")
    given = parser.parse_args()
    rows = problems(given.count, given.seed, given.level)
    given.out.write_text(json.dumps(rows, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
