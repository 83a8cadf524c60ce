"""A study of a parabola, as a process of its own: `toy_study.py FOLDER TRIALS SECONDS [JOBS]`."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from arborl.tune import StudyPlan, Trial, TrialReport, read_space, search


async def main(folder: str, trials: str, seconds: str, jobs: str = "1") -> None:
    async def objective(params: dict[str, float], report: TrialReport) -> float:
        sys.stdout.write(f"begins {report.trial}\n")
        sys.stdout.flush()
        await asyncio.sleep(float(seconds))
        return -((params.get("x", 9.0) - 2) ** 2)

    def tell(trial: Trial) -> None:
        sys.stdout.write(f"ended {trial.number} {trial.state}\n")
        sys.stdout.flush()

    plan = StudyPlan(read_space({"x": "uniform:-10:10"}), int(trials), Path(folder), jobs=int(jobs), default={"x": 9.0})
    await search(plan, objective, tell=tell)


asyncio.run(main(*sys.argv[1:]))
