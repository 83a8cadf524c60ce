"""On a GPU: sharded over a world of one, a learner is the plain one."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "learner"))
from learner_fakes import Fake, batch_of, random_groups
from worlds import alone, body, world

from arborl.config.run_config import LearnerConfig

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("offload", ["none", "optimizer", "all"])
@pytest.mark.parametrize("lora", [0, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fsdp2_on_a_world_of_one_equals_the_plain_learner(dtype, lora, offload, tmp_path):
    fine = dtype == torch.float32
    config = LearnerConfig(lr=1e-3, decay="none", micro_batch_tokens=64, recompute=True)
    algorithm = Fake("value", reference=True)
    forest, terms = batch_of(random_groups(7, groups=5), algorithm)
    single = alone(body(lora, dtype).cuda(), algorithm.needs, config)
    away = config.model_copy(update={"offload": offload})
    with world("fsdp2", 1, body(lora, dtype).cuda(), algorithm.needs, away) as group:
        ours, theirs = (one.score_terms(forest.trees, terms, algorithm.needs) for one in (group, single))
        assert abs(ours.reference - theirs.reference).max() < (1e-4 if fine else 0.1)
        for one in (group, single):
            one.backward(forest.trees, theirs, algorithm)
        found, expected = group.gradients(), single.gradients()
        scale = max(float(value.abs().max()) for value in expected.values())
        for name, value in expected.items():
            gap = float((found[name].to(value) - value).abs().max())
            assert gap < (1e-4 if fine else 0.1) * scale, name
        before = {name: value.clone() for name, value in single.weights().items()}
        for one in (group, single):
            for _ in range(2):
                assert one.update(forest.trees, theirs, algorithm)["learner/skipped"] == 0.0
        moved = [
            torch.cat([(value - before[name]).float().flatten() for name, value in one.weights().items()])
            for one in (group, single)
        ]
        assert float(torch.cosine_similarity(*moved, dim=0)) > (0.999 if fine else 0.9)
        group.save(tmp_path)
        weights = {name: value.clone() for name, value in group.weights().items()}
        group.update(forest.trees, theirs, algorithm)
        group.load(tmp_path)
        for name, value in group.weights().items():
            torch.testing.assert_close(value, weights[name], rtol=0, atol=0)
