"""Keys and passwords are never written down."""

from __future__ import annotations

import pytest

from arborl.config.config_base import dump_yaml
from arborl.config.load_config import from_kwargs, load
from arborl.config.secrets import SecretRedactor, is_secret, mask_secrets
from arborl.errors import ConfigError
from arborl.training_run.resume import changes


@pytest.mark.parametrize(
    "key",
    ["api_key", "apiKey", "X-API-Key", "HF_TOKEN", "token", "Authorization", "db_password", "AWS_SECRET_ACCESS_KEY"],
)
def test_a_key_that_is_called_like_a_secret_is_one(key):
    assert is_secret(key)


@pytest.mark.parametrize(
    "key", ["max_tokens", "tokenizer", "stop_token", "eos_token", "api_key_env", "key", "micro_batch_tokens"]
)
def test_other_keys_are_none(key):
    assert not is_secret(key)


def test_secrets_are_masked_wherever_they_stand_and_nothing_else_is():
    tree = {
        "env": {"args": {"api_key": "sk-123456", "n": 3, "token": None, "password": ""}},
        "tools": [{"headers": {"Authorization": "Bearer abc"}}],
        "uri": "http://me:s3cret@host/x",
        "max_tokens": 64,
    }
    assert mask_secrets(tree) == {
        "env": {"args": {"api_key": "***", "n": 3, "token": None, "password": ""}},
        "tools": [{"headers": {"Authorization": "***"}}],
        "uri": "http://me:***@host/x",
        "max_tokens": 64,
    }


def test_a_file_that_was_masked_says_what_it_lacks_and_takes_it_again(tmp_path, monkeypatch):
    file = tmp_path / "config.yaml"
    config = from_kwargs(env={"name": "frozen_lake", "args": {"api_key": "sk-123456"}})
    file.write_text(dump_yaml(config))
    assert "sk-123456" not in file.read_text()
    with pytest.raises(ConfigError, match=r"env\.args\.api_key: is \*\*\*, .* env\.args\.api_key=VALUE"):
        load(file)
    assert load(file, ["env.args.api_key=sk-123456"]) == config
    monkeypatch.setenv("MY_KEY", "sk-123456")
    assert load(file, ["env.args.api_key=${oc.env:MY_KEY}"]) == config


def test_a_resumed_run_does_not_tell_that_a_secret_changed():
    one, other = (from_kwargs(env={"name": "x", "args": {"api_key": key, "n": key}}) for key in ("a", "b"))
    assert [change.key for change in changes(one, other)] == ["env.args.n"]


def test_texts_lose_the_secrets_of_configuration_and_environment(monkeypatch):
    monkeypatch.setenv("SOME_API_KEY", "from-outside")
    redact = SecretRedactor({"api_key": "sk-123456", "longer_token": "sk-1234567", "password": "abc"})
    output = redact("sk-1234567 sk-123456 from-outside abc redis://u:pw@h")
    assert output == "*** *** *** abc redis://u:***@h"  # too short a one would hide words
