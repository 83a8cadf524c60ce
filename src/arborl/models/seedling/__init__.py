"""The embedded model: a small Llama with its own tokenizer and chat template, in `weights/`.

It speaks every format Arbor uses and plays badly, so reinforcement learning has something to do. `make.py` made it:
`python -m arborl.seedling.make --out weights`; the numbers of that run are in `weights/record.json`.
"""

from pathlib import Path

WEIGHTS = Path(__file__).parent / "weights"
