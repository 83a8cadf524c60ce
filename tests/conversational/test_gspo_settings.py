"""GSPO's own settings hold however a run is begun."""

from __future__ import annotations

import pytest

from arborl import AgentConfig, GSPOConfig
from arborl.errors import ConfigError


def test_beta_is_the_penalty_whichever_door_the_settings_come_through():
    assert GSPOConfig(beta=0.1).run_settings(AgentConfig())["algorithm"]["kl"] == {"coef": 0.1}
    assert "kl" not in GSPOConfig().run_settings(AgentConfig())["algorithm"]


def test_one_setting_by_two_names_is_refused():
    with pytest.raises(ConfigError, match="beta and kl_penalty"):
        GSPOConfig(beta=0.1, kl_penalty=0.1).run_settings(AgentConfig())
