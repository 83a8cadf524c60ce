"""A run warms up its engine with the sampling settings before the first request."""

from __future__ import annotations

import arborl
from arborl.engines.local import LocalEngine
from arborl.types import Sampling

CALLS: list[str | Sampling] = []


class RecordingEngine(LocalEngine):
    """Records warm-ups and requests in order."""

    def __init__(self, model):
        super().__init__(model, max_requests=8)

    def warm_up(self, sampling: Sampling) -> None:
        super().warm_up(sampling)
        CALLS.append(sampling)

    async def generate(self, prompt, sampling, *, session):
        CALLS.append("request")
        return await super().generate(prompt, sampling, session=session)


def test_a_run_warms_its_engine_once_before_the_first_evaluation(tmp_path):
    CALLS.clear()
    arborl.run(
        engine=RecordingEngine, steps=1, output_dir=tmp_path / "run",
        **{"model.device": "cpu", "threads": 1, "env.args.size": 3, "env.args.max_steps": 2, "evaluation.tasks": 1,
           "rollout.tasks_per_step": 1, "rollout.group_size": 2, "sampling.top_p": 0.9, "track.gifs": 0,
           "track.tensorboard": False},
    )  # fmt: skip
    first, *rest = CALLS
    assert isinstance(first, Sampling)
    assert first.truncates
    assert set(rest) == {"request"}
