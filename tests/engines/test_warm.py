"""A run's engine is told how tokens will be drawn before anything is asked of it."""

from __future__ import annotations

import arborl
from arborl.engines.local import LocalEngine
from arborl.types import Sampling

HEARD: list[str | Sampling] = []


class Noting(LocalEngine):
    """Remembers what it was told, in order."""

    def __init__(self, model):
        super().__init__(model, max_requests=8)

    def warm_up(self, sampling: Sampling) -> None:
        super().warm_up(sampling)
        HEARD.append(sampling)

    async def generate(self, prompt, sampling, *, session):
        HEARD.append("asked")
        return await super().generate(prompt, sampling, session=session)


def test_a_run_warms_its_engine_once_before_the_first_evaluation(tmp_path):
    HEARD.clear()
    arborl.run(
        engine=Noting, steps=1, output_dir=tmp_path / "run",
        **{"model.device": "cpu", "threads": 1, "env.args.size": 3, "env.args.max_steps": 2, "evaluation.tasks": 1,
           "rollout.tasks_per_step": 1, "rollout.group_size": 2, "sampling.top_p": 0.9, "track.gifs": 0,
           "track.tensorboard": False},
    )  # fmt: skip
    first, *rest = HEARD
    assert isinstance(first, Sampling)
    assert first.truncates
    assert set(rest) == {"asked"}
