"""Presets, overrides, and settings that would have no effect."""

from __future__ import annotations

import pytest
from omegaconf import OmegaConf

from arborl.config.algorithm_config import PRESETS, AlgorithmConfig
from arborl.config.config_base import dump_yaml, validate
from arborl.config.run_config import RunConfig
from arborl.errors import ConfigError


def test_a_bare_name_is_a_preset_and_what_is_written_beside_it_wins():
    config = validate(RunConfig, {"algorithm": "dapo"}).algorithm
    assert (config.clip_low, config.clip_high, config.aggregation, config.std) == (0.2, 0.28, "token", "group")
    assert AlgorithmConfig(name="dapo", clip_high=0.5, std="none").clip_high == 0.5
    assert AlgorithmConfig(name="dapo", std="none").std == "none"


def test_a_loss_brings_its_own_defaults_and_takes_away_what_it_does_not_read():
    config = AlgorithmConfig(name="dapo", loss="gspo")
    assert (config.clip_low, config.clip_high, config.aggregation) == (3e-4, 4e-4, "token")
    assert AlgorithmConfig(loss="cispo").clip_high == 4.0
    assert AlgorithmConfig(name="dapo", loss="dpo").aggregation == "episode"  # dpo has none; the preset's is dropped
    assert AlgorithmConfig(name="gigpo").gamma == 0.95
    assert AlgorithmConfig(name="gigpo", gamma=1.0).gamma == 1.0


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_a_resolved_configuration_reads_back_the_same(name):
    more = {} if name == "trpo" else {"by_source": {"web": "dapo"}}
    more |= {"args": {"teacher": "seedling"}} if name == "distill" else {}
    config = validate(RunConfig, {"algorithm": {"name": name, **more}})
    again = validate(RunConfig, OmegaConf.to_container(OmegaConf.create(dump_yaml(config))))
    assert again == config


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        (
            {"gamma": 0.9},
            "algorithm: gamma=0.9 is not read with advantage=grpo and loss=ppo. Leave it out, or write advantage=gae, "
            "gigpo, starpo, step_reinforce or turn_discounted.",
        ),
        ({"name": "dpo", "clip_high": 0.3}, "clip_high=0.3 is not read with loss=dpo. Leave it out, or write loss=ppo"),
        ({"name": "dpo", "std": "group"}, "std=group is not read with loss=dpo. Leave it out, or write advantage=grpo"),
        ({"name": "dpo", "advantage": "gae"}, "advantage=gae is not read with loss=dpo."),
        ({"name": "dpo", "kl": {"coef": 0.1}}, "kl is not read with loss=dpo."),
        ({"args": {"fixed_length": 9}}, "args.fixed_length: is not read with advantage=grpo and loss=ppo. "
         "Leave it out, or write aggregation=fixed."),
        ({"args": {"split_ratio": 0.5}}, "write split=geometric"),
        ({"args": {"sequence": "call"}}, "write loss=gspo, loss=gmpo or importance_weights.level=sequence"),
        ({"args": {"max_kl": 1}}, "args.max_kl: is not read with advantage=grpo and loss=ppo. Leave it out, or "
                                          "write loss=trpo."),
        ({"args": {"value_coef": 1.0}}, "write advantage=gae."),
        ({"args": {"beta": 0.5}}, "write loss=dpo, ipo or kto."),
        ({"name": "reinforce", "skip_zero_variance": False}, "skip_zero_variance=False is not read with"),
        ({"by_source": {"web": {"gamma": 0.9}}}, "algorithm.by_source.web: gamma=0.9 is not read"),
        ({"by_source": {"web": {"by_source": {"x": "grpo"}}}}, "by_source.web has a by_source of its own."),
        ({"by_source": {"web": "trpo"}}, "Write it for every source or for none."),
        ({"importance_weights": "tis", "anchor": "rollout"}, "Leave anchor out."),
        ({"importance_weights": {"low": 0.5}}, "algorithm.importance_weights: low is given without a kind."),
        ({"importance_weights": {"kind": "mis", "low": 3.0}}, "low=3 is not below high=2."),
        ({"importance_weights": {"kind": "icepop", "level": "sequence"}}, "icepop masks single tokens."),
        ({"loss": "a2c"}, "loss=a2c needs a critic, advantage=grpo has none. Write advantage=gae or loss=pg."),
        ({"kl": {"coef": 0.1, "target": 0.5}}, "algorithm.kl: target moves a penalty in the reward. Write"),
        ({"overlong": {"penalty": 1.0}}, "Write max_tokens and a buffer of at most that."),
        ({"overlong": {"max_tokens": 5}}, "Write penalty=1, or leave them out."),
        ({"name": "maxrl", "kl": {"coef": 0.1, "where": "reward"}}, "Write where=loss."),
        ({"loss": "gpso"}, "algorithm.loss: must be one of ppo, gspo"),
        ({"name": ["dapo"]}, "algorithm.name: must be one of"),
        ({"advantage": {"x": 1}}, "algorithm.advantage: must be one of"),
    ],
    ids=str,
)  # fmt: skip
def test_contradictions_and_settings_in_vain_are_errors_that_say_what_to_write(settings, line):
    with pytest.raises(ConfigError) as error:
        validate(RunConfig, {"algorithm": settings})
    assert line in str(error.value)


@pytest.mark.parametrize(
    ("algorithm", "instead"),
    [
        ("grpo", "algorithm.args.baseline=none"),
        ("rloo", "algorithm.advantage=reinforce"),
        ("dpo", "algorithm.loss=sft"),
        ({"name": "reinforce", "by_source": {"web": "gigpo"}}, "algorithm.advantage=reinforce"),
    ],
    ids=str,
)
def test_groups_of_one_are_refused_where_episodes_are_compared(algorithm, instead):
    with pytest.raises(ConfigError) as error:
        validate(RunConfig, {"algorithm": algorithm, "rollout": {"group_size": 1}})
    assert f"Write rollout.group_size=8, or {instead}." in str(error.value)
    for alone in ("reinforce", "ppo", "remax", "sft", "kto", "reinforce_plus_plus", {"args": {"baseline": "none"}}):
        validate(RunConfig, {"algorithm": alone, "rollout": {"group_size": 1}})
