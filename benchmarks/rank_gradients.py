"""How far the gradients of a learner in two processes are from those of one, by strategy: one JSON line for each.

    python benchmarks/rank_gradients.py            # all strategies; DeepSpeed's where it is installed
    python benchmarks/rank_gradients.py fsdp2      # one of them

Float32 on a CPU, a Llama of two layers, five groups of unequal size with branches. `plain`: a clipped loss with a
reference policy. `critic`: with values of a head on the policy's trunk. `separate`: with a critic of its own. `lora`:
adapters, and a loss of whole sequences. The difference is the largest of all parameters over the largest gradient, of
the policy and of the critic each by itself. Both go on from a checkpoint of three updates: a critic begins with
a head of zeros, whose gradient reaches nothing else.
"""

from __future__ import annotations

import json
import platform
import sys
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

for room in ("tests", "tests/learner"):
    sys.path.insert(0, str(Path(__file__).parent.parent / room))

STRATEGIES = {
    "ddp": ("ddp", {}), "fsdp2": ("fsdp2", {}), "tensor": ("tensor", {}), "zero-1": ("zero1", {}),
    "zero-2": ("zero2", {}), "zero-3": ("zero3", {}),
}  # fmt: skip
KINDS = {"plain": ("clip", 0, "auto"), "critic": ("value", 0, "shared"), "separate": ("value", 0, "separate"),
         "lora": ("sequence", 4, "auto")}  # fmt: skip


def difference(name: str, kind: str) -> float:
    """Of the gradients of one batch."""
    from learner_fakes import Fake, batch_of, random_groups
    from test_strategies import CONFIG
    from worlds import alone, body, world

    strategy, more = STRATEGIES[name]
    loss, lora, critic = KINDS[kind]
    algorithm, config = Fake(loss, reference=True), CONFIG.model_copy(update={"critic": critic, "lr": 1e-3})
    single = alone(body(lora), algorithm.needs, config)
    forest, terms = batch_of(random_groups(7, groups=5), algorithm)
    for _ in range(3):
        single.update(forest.trees, single.score_terms(forest.trees, terms, algorithm.needs), algorithm)
    with TemporaryDirectory() as folder, world(strategy, 2, body(lora), algorithm.needs, config, **more) as group:
        single.save(Path(folder))
        found = []
        for one in (group, single):
            one.load(Path(folder))
            seen = one.score_terms(forest.trees, terms, algorithm.needs)
            one.backward(forest.trees, seen, algorithm)
            found.append(one.gradients())
    ours, theirs = found
    assert ours.keys() == theirs.keys()
    return max(
        max(float((ours[key] - theirs[key]).abs().max()) for key in part)
        / max(float(theirs[key].abs().max()) for key in part)
        for part in ([key for key in theirs if key.startswith(whose)] for whose in ("model.", "critic."))
        if part
    )


def main() -> None:
    import torch

    for name in sys.argv[1:] or STRATEGIES:
        if STRATEGIES[name][0].startswith("zero") and find_spec("deepspeed") is None:
            print(json.dumps({"strategy": name, "not run": "needs pip install 'arborl[deepspeed]'"}), flush=True)
            continue
        gaps = {kind: float(f"{difference(name, kind):.1e}") for kind in KINDS}
        versions = {"torch": torch.__version__, "python": platform.python_version()}
        print(json.dumps({"strategy": name, "ranks": 2, **gaps, **versions}), flush=True)


if __name__ == "__main__":
    main()
