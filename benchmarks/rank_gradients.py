"""Difference between the gradients of a learner with two ranks and with one, by strategy: one JSON line for each.

    python benchmarks/rank_gradients.py            # all strategies; DeepSpeed's if it is installed
    python benchmarks/rank_gradients.py fsdp2      # one strategy

Float32 on a CPU, a Llama of two layers, five groups of unequal size with branches. `plain`: a clipped loss with a
reference model. `critic`: a value head on the policy's trunk. `separate`: a separate critic model. `lora`: adapters and
a sequence-level loss. The difference is the largest absolute difference divided by the largest absolute gradient, for
policy and critic separately. Both learners load a checkpoint of three updates, because a critic starts with a head of
zeros, which passes no gradient to other layers.
"""

from __future__ import annotations

import json
import platform
import sys
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

for folder in ("tests", "tests/learner"):
    sys.path.insert(0, str(Path(__file__).parent.parent / folder))

STRATEGIES = {
    "ddp": ("ddp", {}), "fsdp2": ("fsdp2", {}), "tensor": ("tensor", {}), "zero-1": ("zero1", {}),
    "zero-2": ("zero2", {}), "zero-3": ("zero3", {}),
}  # fmt: skip
KINDS = {"plain": ("clip", 0, "auto"), "critic": ("value", 0, "shared"), "separate": ("value", 0, "separate"),
         "lora": ("sequence", 4, "auto")}  # fmt: skip


def difference(name: str, kind: str) -> float:
    """Relative difference of the gradients of one batch."""
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
        gradients = []
        for learner in (group, single):
            learner.load(Path(folder))
            scored_terms = learner.score_terms(forest.trees, terms, algorithm.needs)
            learner.backward(forest.trees, scored_terms, algorithm)
            gradients.append(learner.gradients())
    distributed, reference = gradients
    assert distributed.keys() == reference.keys()
    return max(
        max(float((distributed[key] - reference[key]).abs().max()) for key in part)
        / max(float(reference[key].abs().max()) for key in part)
        for part in ([key for key in reference if key.startswith(prefix)] for prefix in ("model.", "critic."))
        if part
    )


def main() -> None:
    import torch

    for name in sys.argv[1:] or STRATEGIES:
        if STRATEGIES[name][0].startswith("zero") and find_spec("deepspeed") is None:
            print(json.dumps({"strategy": name, "not run": "needs pip install 'arborl[deepspeed]'"}), flush=True)
            continue
        differences = {kind: float(f"{difference(name, kind):.1e}") for kind in KINDS}
        versions = {"torch": torch.__version__, "python": platform.python_version()}
        print(json.dumps({"strategy": name, "ranks": 2, **differences, **versions}), flush=True)


if __name__ == "__main__":
    main()
