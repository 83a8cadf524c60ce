"""Search spaces: what is read, and what each mistake is answered with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from arborl.config.load_config import format_override, parse_value
from arborl.errors import ConfigError
from arborl.tune.space import (
    KEYS,
    SPACES,
    ChoiceDomain,
    RangeDomain,
    get_search_space,
    read_param,
    read_space,
    read_space_file,
)


def test_parameters_are_read_as_a_command_line_writes_them() -> None:
    assert read_param("learner.lr=log:1e-5:1e-2") == ("learner.lr", RangeDomain(1e-5, 1e-2, log=True))
    assert read_param("a=uniform:-1:2") == ("a", RangeDomain(-1.0, 2.0))
    assert read_param("a=int:1:8") == ("a", RangeDomain(1, 8, whole=True))
    assert read_param("a=4,8,16") == ("a", ChoiceDomain((4, 8, 16)))
    assert read_param("algorithm=grpo,my.module:loss") == ("algorithm", ChoiceDomain(("grpo", "my.module:loss")))
    assert read_param("a=true,false,null") == ("a", ChoiceDomain((True, False, None)))
    assert read_param('a="x,y",z') == ("a", ChoiceDomain(("x,y", "z")))


def test_a_file_has_short_and_long_forms(tmp_path: Path) -> None:
    file = tmp_path / "space.yaml"
    file.write_text("learner.lr: {type: loguniform, low: 1e-7, high: 1e-4}\na: [1, 2]\nb: uniform:0:1\n")
    assert read_space_file(file) == {
        "learner.lr": RangeDomain(1e-7, 1e-4, log=True),
        "a": ChoiceDomain((1, 2)),
        "b": RangeDomain(0.0, 1.0),
    }


def test_what_is_written_is_read_back() -> None:
    space = read_space({"a": "log:1e-5:1", "b": "int:1:3", "c": "uniform:0:1", "d": [1, "x", None, True]})
    assert read_space({name: domain.as_dict() for name, domain in space.items()}) == space


def test_a_value_lies_within_or_not() -> None:
    assert RangeDomain(0.5, 1.0).contains(1)
    assert not RangeDomain(0.5, 1.0).contains(2.0)
    assert not RangeDomain(0.5, 1.0).contains(None)
    assert not RangeDomain(1, 8, whole=True).contains(2.5)
    assert not RangeDomain(0, 8, whole=True).contains(True)
    assert ChoiceDomain((1, None)).contains(None)
    assert not ChoiceDomain((1, 2)).contains(True)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"type": "uniform", "low": 2, "high": 1}, "x: low=2 must be below high=1. Write low=1, high=2."),
        ({"type": "uniform", "low": 1, "high": 1}, "x: low=1 must be below high=1. Write low=1, high=2."),
        ({"type": "loguniform", "low": 0, "high": 1}, "x: low=0 of a loguniform must be above 0"),
        ({"type": "loguniform", "low": 0, "high": 1}, "Write low=0.001, or the type uniform."),
        ({"type": "loguniform", "low": -1, "high": -0.5}, "low=-1 of a loguniform must be above 0"),
        ({"type": "int", "low": 1.5, "high": 3}, "x: low=1.5 of an int must be a whole number. Write low=2."),
        ({"type": "uniform", "low": "a", "high": 3}, "x: low='a' must be a number"),
        ({"type": "uniform", "low": float("nan"), "high": 3}, "x: low=nan must be a number"),
        ({"type": "uniform", "low": 1, "high": float("inf")}, "x: high=inf must be a number"),
        ({"type": "uniform", "low": True, "high": 3}, "x: low=True must be a number"),
        ({"type": "uniform", "low": 1}, "x: high is missing. A uniform has low and high."),
        ({"type": "uniform", "lo": 1, "high": 2}, "x: 'lo' is unknown. Did you mean 'low'?"),
        ({"type": "categorical", "choices": []}, "x: choices is empty. Write choices=[4, 8, 16]"),
        ({"type": "categorical", "choices": 4}, "x: choices must be a list, given 4. Write choices=[4, …]."),
        ({"type": "categorical", "choices": [4, 4]}, "x: the choice 4 is there twice"),
        ({"type": "categorical", "choices": [[1], [2]]}, "x: the choice [1] must be a number, text"),
        ({"type": "loguniforn", "low": 1, "high": 2}, "x: type 'loguniforn' is unknown. Did you mean 'loguniform'?"),
        ({"low": 1, "high": 2}, "Write a type: one of uniform, loguniform, int, categorical"),
        (3, "x: given 3. Write a type"),
        ("lgo:1:2", "x: 'lgo' is no kind of range. Did you mean 'log'?"),
    ],
)
def test_a_mistake_names_the_parameter_the_value_and_what_to_write(given: Any, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        read_space({"x": given})
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("learner.lr", "--param learner.lr: has no values. Write learner.lr=log:LOW:HIGH, or =A,B,C."),
        ("=4,8", "Write NAME=log:LOW:HIGH"),
        ("x=4", "x: 4 is a single value."),
        ("x=", "x: choices is empty"),
        ("x=log:a:b", "x: low='a' must be a number"),
    ],
)
def test_a_mistake_on_the_command_line_says_what_to_write(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        read_param(text)
    assert message in str(error.value)


def test_an_empty_space_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"the search space is empty\. Write --param"):
        read_space({})


@pytest.mark.parametrize("name", SPACES)
def test_every_named_space_is_one_and_its_words_are_known(name: str) -> None:
    assert set(read_space(get_search_space(name))) <= set(KEYS)


def test_a_named_search_space_is_a_copy() -> None:
    mine = get_search_space("grpo")
    mine["num_generations"]["choices"].append(64)
    assert 64 not in get_search_space("grpo")["num_generations"]["choices"]
    with pytest.raises(ConfigError, match=r"no search space is called 'gpro'\. Did you mean 'grpo'\?"):
        get_search_space("gpro")


odd = st.text(alphabet="a\\\"'$ {}[],:=~\n", max_size=8)


@given(st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False, allow_infinity=False), odd))
def test_a_setting_that_is_written_is_read_back_exactly(value: Any) -> None:
    found = parse_value(format_override("a.b", value).partition("=")[2])
    assert found == value
    assert type(found) is type(value)
