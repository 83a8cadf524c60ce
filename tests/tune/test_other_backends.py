"""Ray Tune and sweeps of Weights & Biases see the same plan and objective."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from arborl.errors import ConfigError
from arborl.tune import StudyPlan, TrialReport, read_space, search
from arborl.tune.backends import find_backend
from arborl.tune.backends.wandb_sweep import WandbBackend, sweep_of

SPACE = read_space({"x": "uniform:-10:10", "n": "int:1:3", "r": "log:1e-4:1", "c": ["a", "b"]})


async def objective(params: dict[str, Any], report: TrialReport) -> float:
    if params.get("c") == "b":
        raise ValueError("no b")
    report(1, 0.5)
    return -float((params.get("x", 9.0) - 2) ** 2)


class FakeWandb:
    """A server that draws the first of everything, then the last."""

    Error = RuntimeError

    def __init__(self, known: bool = True):
        self.known = known
        self.sweeps: list[dict[str, Any]] = []
        self.logged: list[dict[str, Any]] = []

    def login(self, prompt: bool) -> bool:
        assert not prompt
        return self.known

    def sweep(self, sweep: dict[str, Any], project: str) -> str:
        self.sweeps.append(sweep)
        return "s1"

    def agent(self, sweep_id: str, function: Callable[[], None], project: str, count: int) -> None:
        assert sweep_id == "s1"
        for self.turn in range(count):
            function()

    @contextmanager
    def init(self):
        drawn = {}
        for name, how in self.sweeps[0]["parameters"].items():
            choices = how.get("values") or [how["min"], how["max"]]
            drawn[name] = choices[0 if self.turn == 0 else -1]
        yield SimpleNamespace(config=drawn, log=self.logged.append)


def test_a_sweep_is_the_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WANDB_MODE", raising=False)
    server = FakeWandb()
    plan = StudyPlan(SPACE, 3, tmp_path / "study", default={"x": 9.0})
    found = asyncio.run(search(plan, objective, WandbBackend(server)))
    assert server.sweeps[0]["metric"] == {"name": "value", "goal": "maximize"}
    assert server.sweeps[0]["parameters"] == {
        "x": {"distribution": "uniform", "min": -10.0, "max": 10.0},
        "n": {"distribution": "int_uniform", "min": 1, "max": 3},
        "r": {"distribution": "log_uniform_values", "min": 1e-4, "max": 1.0},
        "c": {"values": ["a", "b"]},
    }
    assert [trial.state for trial in found.trials] == ["done", "done", "failed"]
    assert found.trials[0].default
    assert found.trials[2].reason == "ValueError: no b"
    assert {"value": -144.0} in server.logged
    assert "early_terminate" not in sweep_of(StudyPlan(SPACE, 3, tmp_path, pruning=False))


def test_sweeps_need_a_logged_in_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WANDB_MODE", raising=False)
    with pytest.raises(ConfigError, match=r"no user is logged in\. Write `wandb login`"):
        WandbBackend(FakeWandb(known=False))
    monkeypatch.setenv("WANDB_MODE", "offline")
    with pytest.raises(ConfigError, match="sweeps need the server, but WANDB_MODE=offline"):
        WandbBackend(FakeWandb())


@pytest.mark.parametrize(
    ("name", "package", "extra"), [("optuna", "optuna", "optuna"), ("ray_tune", "ray", "ray_tune"), ("wandb",) * 3]
)
def test_a_backend_whose_package_is_missing_says_what_to_install(
    name: str, package: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ConfigError) as error:
        find_backend(name)
    assert f"backend={name} needs the package" in str(error.value)
    assert f"pip install 'arborl[{extra}]'" in str(error.value)


@pytest.mark.slow
def test_ray_tries_the_plan(tmp_path: Path) -> None:
    pytest.importorskip("ray.tune")

    async def alone(params: dict[str, Any], report: Any) -> float:  # workers cannot import this file
        if params.get("c") == "b":
            raise ValueError("no b")
        report(1, 0.5)
        return -float((params.get("x", 9.0) - 2) ** 2)

    plan = StudyPlan(SPACE, 5, tmp_path / "study", default={"x": 9.0})
    found = asyncio.run(search(plan, alone, "ray_tune"))
    assert [trial.number for trial in found.trials] == [0, 1, 2, 3, 4]
    assert found.default_reward == -49.0
    for trial in found.trials[1:]:
        assert all(domain.contains(trial.params[name]) for name, domain in SPACE.items())
        assert (trial.state == "failed") == (trial.params["c"] == "b")
    with pytest.raises(ConfigError, match="holds a study of Ray Tune"):
        asyncio.run(search(plan, objective, "ray_tune"))
