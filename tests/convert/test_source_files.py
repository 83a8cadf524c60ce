"""YAML with defaults and references is read as its system would, without its system and without the environment."""

from __future__ import annotations

import re

import pytest

from arborl.convert.reading.source_files import collect
from arborl.errors import ConfigError

ANY = re.compile(".*")
GROWTH = [f"x{n}: &x{n} [{', '.join([f'*x{n - 1}'] * 9)}]\n" for n in range(1, 9)]
BOMB = "x0: &x0 [1,2,3,4,5,6,7,8,9]\n" + "".join(GROWTH)


@pytest.fixture
def folder(tmp_path):
    def write(**files):
        for name, text in files.items():
            path = tmp_path / (name.replace("__", "/") + ".yaml")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return tmp_path

    return write


def test_a_group_of_another_folder_is_merged_below_the_file_and_references_see_the_result(folder):
    root = folder(
        shared__games="most: 128\ngame:\n  Lake: {kind: lake, tokens: '${most}', list: ['${most}', a]}\n",
        runs__one="defaults: [../shared/games@_here_]\nhydra: {run: {}}\nmost: 64\nplay: {Lake: '${game.Lake}'}\n",
    )
    found = collect([root / "runs" / "one.yaml"])
    assert found.keys["play.Lake.kind"] == "lake"
    assert (found.keys["play.Lake.tokens"], found.keys["play.Lake.list"]) == (64, [64, "a"])
    assert not any(key.startswith(("hydra", "defaults")) for key in found.keys)
    assert {"game", "most"} <= found.referred


def test_defaults_may_name_a_package_options_and_the_place_of_the_file_itself(folder):
    root = folder(
        opt__adam="lr: 1\nkind: adam\n",
        base="size: 1\nopt: {lr: 3}\n",
        one="defaults: [_self_, base, opt: adam, opt@critic: adam]\nsize: 2\n",
    )
    found = collect([root / "one.yaml"]).keys
    assert (found["size"], found["opt.lr"], found["critic.kind"]) == (1, 1, "adam")


def test_what_a_later_file_or_override_changes_reaches_all_that_refers_to_it(folder):
    root = folder(one="most: 1\na: {b: '${most}'}\n", two="most: 2\n")
    (root / "more.txt").write_text("most=3 a.c=4\n")
    assert collect([root / "one.yaml", root / "two.yaml"]).keys["a.b"] == 2
    found = collect([root / "one.yaml", root / "two.yaml", root / "more.txt"], plain_keys=True)
    assert (found.keys["a.b"], found.keys["a.c"]) == (3, 4)


def test_the_environment_is_never_read_and_its_variables_stay(folder, monkeypatch):
    monkeypatch.setenv("SECRET_HOME", "do not show")
    root = folder(one="a: ${oc.env:SECRET_HOME}/x\nb: ${oc.env:N,8}\nc: ${oc.env:T,text}\nd: ${a}\ne: ${env:OLD}\n")
    found = collect([root / "one.yaml"])
    assert found.keys == {
        "a": "${oc.env:SECRET_HOME}/x", "b": 8, "c": "text", "d": "${oc.env:SECRET_HOME}/x", "e": "${oc.env:OLD}",
    }  # fmt: skip
    assert found.environment == {"a": "SECRET_HOME", "d": "SECRET_HOME", "e": "OLD"}


def test_a_reference_that_leads_nowhere_is_kept_as_written(folder):
    root = folder(one="a: ${missing.x}\nb: 5e-7\nc: ${oc.nothing:1}\nd: {1: x}\ne: {f: '${e}'}\n")
    assert collect([root / "one.yaml"]).keys == {
        "a": "${missing.x}", "b": 5e-7, "c": "${oc.nothing:1}", "d.1": "x", "e.f": "${e}",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("a: [", "not valid YAML"),
        ("- a\n", "must be keys with values"),
        ("", "is empty"),
        ("defaults: [nowhere/x]\na: 1\n", "its defaults name 'nowhere/x', and there is no such file"),
        (BOMB, "more than"),
    ],
)  # fmt: skip
def test_read_errors_are_one_line_with_the_file(folder, text, says):
    root = folder(one=text)
    with pytest.raises(ConfigError, match=says) as error:
        collect([root / "one.yaml"])
    assert len(str(error.value).splitlines()) == 1


def test_a_file_of_the_systems_own_defaults_may_be_elsewhere_where_that_is_known(folder):
    root = folder(one="defaults: [ppo_trainer, _self_]\na: 1\n")
    found = collect([root / "one.yaml"], absent=ANY)
    assert found.keys == {"a": 1}
    assert found.absent == [(str(root / "one.yaml"), "ppo_trainer")]


def test_what_lies_beside_a_file_counts_although_something_else_is_absent(folder):
    root = folder(one="defaults: [ppo_trainer, mine, _self_, other]\na: 1\n", mine="a: 2\nb: 3\n")
    found = collect([root / "one.yaml"], absent=ANY)
    assert found.keys == {"a": 1, "b": 3}
    assert {name for _, name in found.absent} == {"ppo_trainer", "other"}


def test_a_script_takes_keys_away_from_the_configuration_it_names_defaults_and_references_included(folder):
    root = folder(conf__base="a: {b: '${n}', c: {d: 1, e: 2}}\nn: 4\n", conf__big="defaults: [base, ppo_trainer]\n")
    (root / "run.sh").write_text("python t.py --config-path conf --config-name big n=5 ~a.c +x.y=1")
    assert collect([root / "run.sh"], absent=ANY).keys == {"a.b": 5, "n": 5, "x.y": 1}


def test_a_file_beside_that_grows_without_end_is_refused_before_it_is_built(folder):
    root = folder(one="defaults: [bomb]\na: 1\n", bomb=BOMB)
    with pytest.raises(ConfigError, match="more than"):
        collect([root / "one.yaml"])
