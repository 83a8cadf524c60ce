"""`quick_hpo`: the search of the conversational API, with a formula as trial."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import arborl
from arborl.errors import ConfigError

pytest.importorskip("optuna")


@dataclass
class Config:
    learning_rate: float = 5e-6
    num_generations: int = 16


class HelpDesk:
    pass


async def trial(
    agent: Any, environment: Any, reward_fn: Any, config: Config, params: dict[str, Any], *, folder: Path, report: Any
) -> float:
    assert (agent.__class__, environment, reward_fn) == (HelpDesk, "environment", "reward")
    known = {"learning_rate", "num_generations", "temperature", "clip_range"}
    if not params.keys() <= known:
        raise ConfigError(f"{(params.keys() - known).pop()}: unknown parameter.")
    report(1, 0.0)
    return float(params.get("num_generations", config.num_generations)) / 16


def hpo(**more: Any) -> arborl.HPOSummary:
    given = {"agent": HelpDesk(), "environment": "environment", "reward_function": "reward", "base_config": Config()}
    return asyncio.run(arborl.quick_hpo(**given | {"run_trial": trial} | more))


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_the_unchanged_configuration_is_the_first_trial() -> None:
    summary = hpo(n_trials=5, backend="optuna", search_space={"num_generations": [4, 8, 32]})
    assert summary.trials[0].params == {"num_generations": 16}
    assert summary.default_reward == 1.0
    assert summary.best_reward in (1.0, 2.0)
    assert summary.best_params["num_generations"] in (16, 32)
    assert summary.folder == Path("studies/HelpDesk")


def test_hpo_config_sets_all_options() -> None:
    config = arborl.HPOConfig(
        search_space={
            "learning_rate": {"type": "loguniform", "low": 1e-7, "high": 1e-4},
            "num_generations": {"type": "categorical", "choices": [4, 8, 16]},
            "temperature": {"type": "uniform", "low": 0.5, "high": 1.2},
            "clip_range": {"type": "uniform", "low": 0.1, "high": 0.3},
        },
        n_trials=3,
        optimization_direction="minimize",
        pruning=True,
    )
    summary = hpo(hpo_config=config, folder="mine")
    assert len(summary.trials) == 3
    assert set(summary.trials[1].params) == set(config.search_space)
    assert summary.best_reward == min(one.value or 9 for one in summary.trials)
    with pytest.raises(ConfigError, match="hpo_config sets n_trials"):
        hpo(hpo_config=config, n_trials=3)


def test_a_study_continues_only_with_the_same_configuration() -> None:
    hpo(n_trials=2, folder="mine")
    assert len(hpo(n_trials=3, folder="mine").trials) == 3
    with pytest.raises(ConfigError, match=r"base_config\.learning_rate: "):
        hpo(n_trials=3, base_config=Config(learning_rate=1e-3), folder="mine")


def test_a_second_study_with_another_configuration_gets_its_own_folder() -> None:
    first = hpo(n_trials=2)
    second = hpo(n_trials=2, base_config=Config(learning_rate=1e-3))
    third = hpo(n_trials=2, search_space={"temperature": "uniform:0:1"})
    assert len(first.trials) == len(second.trials) == len(third.trials) == 2
    names = sorted(folder.name for folder in Path("studies").iterdir())
    assert names == [names[0], f"{names[0]}-2", f"{names[0]}-3"]
    assert len(hpo(n_trials=3, base_config=Config(learning_rate=1e-3)).trials) == 3  # continues the second
    assert len(list(Path("studies").iterdir())) == 3


def test_an_unknown_parameter_fails_every_trial_but_the_first() -> None:
    summary = hpo(n_trials=3, search_space={"tempurature": "uniform:0:1"})
    assert [one.state for one in summary.trials] == ["done", "failed", "failed"]
    assert summary.trials[1].reason == "tempurature: unknown parameter."


def test_errors_are_found_when_the_config_is_made() -> None:
    with pytest.raises(ConfigError, match="n_trials=0 must be a whole number >= 1"):
        arborl.HPOConfig(n_trials=0)
    with pytest.raises(ConfigError, match=r"no search space is called 'gpro'\. Did you mean 'grpo'"):
        arborl.HPOConfig(search_space="gpro")
    with pytest.raises(ConfigError, match="low=1 must be below high=0"):
        arborl.HPOConfig(search_space={"temperature": {"type": "uniform", "low": 1, "high": 0}})
    with pytest.raises(ConfigError, match="no backend is called 'optua'"):
        hpo(n_trials=2, backend="optua")


def test_the_search_spaces_of_the_guide_exist() -> None:
    for name in ("grpo", "full", "customer_service", "technical_support", "sales", "conservative", "aggressive"):
        assert "learning_rate" in arborl.get_search_space(name)
