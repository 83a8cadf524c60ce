"""Sections: what they accept, how their mistakes read, and how they are written."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from arborl.config.config_base import dump_yaml, section_model, setting_paths, validate
from arborl.config.load_config import load
from arborl.config.other_frameworks import SETTING_OF
from arborl.config.run_config import RunConfig
from arborl.errors import ConfigError


def mistake(data: dict[str, object]) -> str:
    with pytest.raises(ConfigError) as raised:
        validate(RunConfig, data)
    return str(raised.value)


def test_a_section_cannot_be_changed() -> None:
    with pytest.raises(ValidationError):
        RunConfig().seed = 3  # type: ignore[misc]


def test_a_bare_string_is_short_for_a_sections_name_or_path() -> None:
    config = validate(RunConfig, {"env": "frozen_lake", "algorithm": "grpo", "data": "a.json", "rewards": ["exact"]})
    assert config.env.name == "frozen_lake"
    assert config.data.path == Path("a.json")
    assert config.rewards[0].name == "exact"


@pytest.mark.parametrize(
    ("data", "line"),
    [
        ({"lr": 1}, "lr: unknown key. Did you mean 'learner.lr'?"),
        ({"learner": {"lrr": 1}}, "learner.lrr: unknown key. Did you mean 'learner.lr'?"),
        (
            {"learner": {"steps": 1}},
            "learner.steps: unknown key. Did you mean 'trainer.steps' or 'demonstrations.steps'?",
        ),
        ({"traner": {}}, "traner: unknown key. Did you mean 'trainer'?"),
        ({"algorithm": {"kl": {"coeff": 1}}}, "algorithm.kl.coeff: unknown key. Did you mean 'algorithm.kl.coef'?"),
        (
            {"rewards": [{"name": "exact", "weigth": 2}]},
            "rewards.0.weigth: unknown key. Did you mean 'rewards.0.weight'?",
        ),
        (
            {"temperature": 1},
            "temperature: unknown key. Did you mean 'sampling.temperature' or 'evaluation.sampling.temperature'?",
        ),
        (
            {"track": {"zzz": 1}},
            "track.zzz: unknown key. Known here: tensorboard, episodes, terms, top_logprobs, gifs, render_every, "
            "timeline, trackers.",
        ),
        ({"trainer": {"steps": "many"}}, "trainer.steps: must be a whole number >= 1, given 'many'."),
        ({"trainer": {"steps": 0}}, "trainer.steps: must be a whole number >= 1, given 0."),
        ({"data": {"evaluation_share": 2}}, "data.evaluation_share: must be a number > 0 and < 1, given 2."),
        ({"learner": {"betas": [0.9, "x"]}}, "learner.betas.1: must be a number, given 'x'."),
        ({"learner": {"betas": [0.9, 0.9, 0.9]}}, "learner.betas: must have 2 items, given [0.9, 0.9, 0.9]."),
        ({"deterministic": "maybe"}, "deterministic: must be true or false, given 'maybe'."),
        (
            {"model": {"dtype": "float3"}},
            "model.dtype: must be one of auto, float32, bfloat16, float16, float64; given 'float3'. "
            "Did you mean 'float32'?",
        ),
        ({"learner": {"betas": "0.9"}}, "learner.betas: must be a list, given '0.9'. Write betas=[0.9]."),
        ({"tools": 5}, "tools: must be a list, given 5."),
        (
            {"sampling": {"stop": ["a", ""]}},
            "sampling.stop: an empty stop string ends every completion at once. Leave it out.",
        ),
        (
            {"sampling": {"temperature": float("inf")}},
            "sampling.temperature: Input should be a finite number, given inf.",
        ),
        ({"rewards": [{"weight": 2}]}, "rewards.0.name: is missing."),
        ({"learner": 5}, "learner: must be a section of keys and values, given 5."),
        ({"env": None}, "env: must be a section of keys and values, given null."),
        (
            {"algorithm": {"name": "sapo", "args": {"tau_positiv": 1}}},
            "algorithm.args.tau_positiv: unknown key. Did you mean 'algorithm.args.tau_positive'?",
        ),
        (
            {"algorithm": {"name": "sapo", "args": {"tau_positive": 0}}},
            "algorithm.args.tau_positive: must be a number > 0, given 0.",
        ),
        (
            {"algorithm": {"args": {"tau_positive": 2}}},
            "algorithm.args.tau_positive: is not read with advantage=grpo and loss=ppo. Leave it out, or write "
            "loss=sapo.",
        ),
        ({"tau_positive": 2}, "tau_positive: unknown key. Did you mean 'algorithm.args.tau_positive'?"),
        (
            {"evaluation": {"sampling": {"top_p": 2}}},
            "evaluation.sampling.top_p: must be a number > 0 and <= 1, given 2.",
        ),
        (
            {"data": {"sources": {"a": {"env": "rooms", "rollout": {"max_turn": 1}}}}},
            "data.sources.a.rollout.max_turn: unknown key. Did you mean 'data.sources.a.rollout.max_turns'?",
        ),
        ({"rollout": {"envs": {}}}, "rollout.envs: unknown key. Write data.sources.NAME.env, with a ratio."),
        ({"max_steps": 9}, "max_steps: unknown key. Write trainer.steps."),
        ({"trainer": {"save_steps": 9}}, "trainer.save_steps: unknown key. Write trainer.save_every."),
    ],
)
def test_a_mistake_is_one_line_with_its_path_and_what_to_write(data: dict[str, object], line: str) -> None:
    assert mistake(data) == line


def test_several_mistakes_are_a_line_each() -> None:
    lines = mistake({"lr": 1, "seed": -1}).splitlines()
    assert [line.split(":")[0] for line in lines] == ["seed", "lr"]


@pytest.mark.parametrize(
    ("data", "keys", "instead"),
    [
        ({"rollout": {"group_size": 1}}, "rollout.group_size=1 with algorithm.args.baseline=mean", "group_size=8"),
        (
            {"engine": {"kv_tokens": 100}, "sampling": {"max_context": 512}},
            "engine.kv_tokens=100 with sampling.max_context=512",
            "engine.kv_tokens=512 or more, or 0",
        ),
    ],
)
def test_settings_that_contradict_each_other_say_what_to_write(
    data: dict[str, object], keys: str, instead: str
) -> None:
    line = mistake(data)
    assert line.startswith(keys)
    assert f"Write {instead}" in line or f"Write rollout.{instead}" in line


def test_one_stop_text_need_not_be_a_list() -> None:
    assert validate(RunConfig, {"sampling": {"stop": "</answer>"}}).sampling.stop == ("</answer>",)
    sources = {"data": {"sources": {"a": {"path": "a.json", "rewards": ["exact"], "sampling": {"stop": "x"}}}}}
    assert validate(RunConfig, sources).data.sources["a"].sampling == {"stop": ("x",)}


def test_a_long_value_is_cut_short_in_the_message() -> None:
    assert len(mistake({"learner": {"lr": "x" * 5000}})) < 200


@pytest.mark.parametrize(
    ("data", "env"),
    [
        ({"data": "a.json"}, "question"),
        ({"data": {"path": "a.json"}, "env": {"args": {"x": 1}}}, "question"),
        ({"data": "a.json", "env": "frozen_lake"}, "frozen_lake"),
        ({"data": {"question": "q"}}, "frozen_lake"),
    ],
)
def test_rows_from_a_file_are_questions_unless_an_environment_is_named(data: dict[str, object], env: str) -> None:
    assert validate(RunConfig, {**data, "rewards": ["exact"]}).env.name == env


def test_every_key_of_the_tree_has_a_default_or_is_a_section() -> None:
    for path in setting_paths(RunConfig):
        found: object = RunConfig()
        for key in path.split("."):
            found = found if isinstance(found, dict) else getattr(found, key)  # arguments depend on the part
    assert section_model(RunConfig, "learner") is not None
    assert section_model(RunConfig, "rewards") is None


# ------------------------------------------------------------------------------------------------ as a file

HARD = [
    "${seed}", r"\${x}", r"\\${x", "$", "1e-3", "null", "yes", "0x1f", "1:30", "", " a ", "2024-01-01", "{a: 1}", "~",
    "é",
]  # fmt: skip
"""Texts that a file may make something else of; every example has them all."""
text = st.text(st.characters(codec="utf-8", exclude_categories=["Cs", "Cc"]), max_size=12) | st.sampled_from(HARD)
plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**9), 10**9)
    | st.floats(allow_nan=False, width=32)
    | text.filter(
        lambda value: value != "???"  # OmegaConf's mark for a value that is still to come
    ),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.from_regex(r"[a-z_]{1,8}", fullmatch=True), inner),
    max_leaves=6,
)


@settings(max_examples=12, deadline=None)  # a load takes about 0.1 s, so each has many values
@given(
    name=st.from_regex(r"[a-z0-9][a-z0-9 _.-]{0,12}", fullmatch=True),
    seed=st.integers(0, 2**31),
    lr=st.floats(1e-9, 1.0),
    betas=st.tuples(st.floats(0, 1), st.floats(0, 1)),
    args=st.dictionaries(st.from_regex(r"[a-z_]{1,8}", fullmatch=True), plain, min_size=6, max_size=16),
    weight=st.floats(-10, 10),
)
def test_what_is_written_is_read_back_equal(
    tmp_path_factory: pytest.TempPathFactory,
    name: str,
    seed: int,
    lr: float,
    betas: tuple[float, float],
    args: dict[str, object],
    weight: float,
) -> None:
    config = RunConfig.model_validate(
        {
            "name": name,
            "seed": seed,
            "output_dir": "runs/here",
            "learner": {"lr": lr, "betas": betas},
            "env": {"name": "frozen_lake", "args": {**args, "hard": HARD}},
            "rewards": [{"name": "exact", "weight": weight}],
        }
    )
    file = tmp_path_factory.mktemp("written") / "config.yaml"
    file.write_text(dump_yaml(config), encoding="utf-8")
    assert load(file) == config


def test_an_object_cannot_be_written_and_the_message_says_where() -> None:
    config = validate(RunConfig, {"env": {"name": "frozen_lake", "args": {"rule": [object()]}}})
    with pytest.raises(ConfigError, match=r"env\.args\.rule\.0: an object of type object cannot be written"):
        dump_yaml(config)


def test_names_of_other_frameworks_are_no_settings_and_what_to_write_exists() -> None:
    known = set(setting_paths(RunConfig))
    for name, text in SETTING_OF.items():
        assert not {path for path in (name, f"trainer.{name}", f"learner.{name}") if path in known}
        written = set(re.findall(r"\b[a-z_]+(?:\.[a-z_]+)+", text)) or {text.partition("=")[0]}
        assert written <= known, (name, text)
