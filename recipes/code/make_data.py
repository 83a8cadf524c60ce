"""Write train.json: problems for agents that write code.

python recipes/code/make_data.py [--kind compute] [--count 2000] [--seed 0] [--out recipes/code/train.json]
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from arborl.data.programs import KINDS, code_problems


def main() -> None:
    parser = argparse.ArgumentParser(description="Write problems for agents that write code.")
    parser.add_argument("--kind", choices=list(KINDS), default="compute")
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "train.json")
    given = parser.parse_args()
    rows = code_problems(given.count, given.seed, given.kind)
    given.out.write_text(json.dumps(rows, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
