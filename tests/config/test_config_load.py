"""Files, overrides and keywords: what composes, and how each failure reads."""

from __future__ import annotations

import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from arborl.config.config_base import dump_yaml
from arborl.config.load_config import from_kwargs, load
from arborl.config.run_config import LearnerConfig, RunConfig
from arborl.errors import ConfigError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A configuration folder with a config group `env` and two files."""
    (tmp_path / "env").mkdir()
    (tmp_path / "env" / "small.yaml").write_text("args: {size: 4}\n")
    (tmp_path / "env" / "big.yaml").write_text("name: frozen_lake\nargs: {size: 8}\n")
    (tmp_path / "base.yaml").write_text("seed: 7\nlearner: {lr: 1e-4}\n")
    (tmp_path / "run.yaml").write_text("defaults:\n  - base\n  - env: small\nlearner: {epochs: 2}\n")
    return tmp_path


def refusal(file: Path | None, *overrides: str) -> str:
    with pytest.raises(ConfigError) as raised:
        load(file, overrides)
    line = str(raised.value)
    assert "\n" not in line
    return line


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


# ------------------------------------------------------------------------------------------------ what works


def test_without_file_and_overrides_it_is_the_demo() -> None:
    assert load() == RunConfig()


def test_a_defaults_list_composes_files_and_the_file_itself_wins(folder: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        config = load(folder / "run.yaml")
    assert (config.seed, config.learner.lr, config.learner.epochs) == (7, 1e-4, 2)
    assert config.env.args == {"size": 4}
    assert load(write(folder / "own.yaml", "defaults: [base]\nseed: 9\n")).seed == 9


def test_an_override_picks_from_a_group_and_later_ones_reach_inside(folder: Path) -> None:
    assert load(folder / "run.yaml", ["env=big"]).env.args == {"size": 8}
    assert load(folder / "run.yaml", ["env=big", "env.args.size=5"]).env.args == {"size": 5}
    assert load(folder / "base.yaml", ["env=big"]).env.args == {"size": 8}
    assert load(folder / "run.yaml", ["~env"]).env.args == {}


def test_an_override_works_whether_or_not_the_file_mentions_the_key(folder: Path) -> None:
    config = load(folder / "run.yaml", ["learner.lr=3e-4", "trainer.steps=5", "+rollout.max_turns=3", "++seed=1"])
    assert (config.learner.lr, config.trainer.steps, config.rollout.max_turns, config.seed) == (3e-4, 5, 3, 1)


def test_a_name_for_a_section_and_a_key_inside_it_go_together_in_any_order() -> None:
    for overrides in (["env=frozen_lake", "env.args.size=6"], ["env.args.size=6", "env=frozen_lake"]):
        env = load(None, overrides).env
        assert (env.name, env.args) == ("frozen_lake", {"size": 6})
    assert load(None, ["algorithm=grpo", "algorithm.std=group"]).algorithm.std == "group"


def test_overrides_reach_into_a_section_that_the_file_names_in_short(tmp_path: Path) -> None:
    file = write(tmp_path / "run.yaml", "env: frozen_lake\nrewards: [exact]\n")
    config = load(file, ["env.args.size=6", "rewards.0.weight=2"])
    assert (config.env.name, config.env.args) == ("frozen_lake", {"size": 6})
    assert (config.rewards[0].name, config.rewards[0].weight) == ("exact", 2.0)


def test_lists_are_given_in_brackets() -> None:
    config = load(None, ["agent=tool", "tools=[calculator, my_pkg.tools:search]", "rewards=[exact]"])
    assert [tool.name for tool in config.tools] == ["calculator", "my_pkg.tools:search"]
    assert [reward.name for reward in config.rewards] == ["exact"]


def test_a_folder_of_data_beside_the_file_is_no_config_group(folder: Path) -> None:
    (folder / "data").mkdir()
    (folder / "data" / "train.json").write_text("[]")
    config = load(folder / "base.yaml", ["data=data/train.json", "rewards=[exact]"])
    assert (config.data.path, config.env.name) == (Path("data/train.json"), "question")


def test_a_file_of_rows_selects_the_question_environment_from_file_overrides_and_kwargs(tmp_path: Path) -> None:
    file = write(tmp_path / "run.yaml", "data: {path: a.json}\nrewards: [exact]\n")
    assert load(file).env.name == "question"
    assert load(None, ["data.path=a.json", "rewards=[exact]"]).env.name == "question"
    assert from_kwargs(data="a.json", rewards=["exact"]).env.name == "question"


def test_references_to_other_keys_are_filled_in(tmp_path: Path) -> None:
    file = write(tmp_path / "run.yaml", "seed: 3\nname: run-${seed}\n")
    assert load(file).name == "run-3"
    assert load(file, ["seed=4"]).name == "run-4"


def test_a_path_may_hold_spaces_and_signs(tmp_path: Path) -> None:
    odd = tmp_path / "my runs #1" / "lr=0.1"
    odd.mkdir(parents=True)
    assert load(write(odd / "run.v2.yaml", "seed: 5\n")).seed == 5


def test_hydras_own_state_is_left_as_it_was(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from hydra import compose, initialize_config_dir
    from hydra.core.global_hydra import GlobalHydra

    monkeypatch.chdir(folder)
    before = sorted(folder.rglob("*"))
    load(folder / "run.yaml")
    assert not GlobalHydra.instance().is_initialized()
    with initialize_config_dir(str(folder), version_base="1.3"):
        load(folder / "run.yaml")
        assert compose("base").seed == 7
    assert sorted(folder.rglob("*")) == before


def test_configuration_loads_without_torch_or_hydra() -> None:
    code = "import sys, arborl.config.load_config; print({'torch', 'hydra', 'transformers'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "set()"


# ------------------------------------------------------------------------------------------------ what does not


def test_a_missing_file_is_named_in_full_with_near_names(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    assert refusal(Path("rnu.yaml")) == f"{folder / 'rnu.yaml'}: no such file. Near it: run.yaml."
    assert "there is no folder" in refusal(folder / "nowhere" / "run.yaml")
    assert "is a folder" in refusal(folder)
    assert "A setting is written seed=VALUE." in refusal(Path("seed"))


def test_broken_yaml_is_named_by_file_line_and_column(folder: Path) -> None:
    bad = write(folder / "bad.yaml", "learner:\n  betas: [0.9\nseed: 3\n")
    assert refusal(bad).startswith(f"{bad}: line 3, column 5: not valid YAML")
    assert refusal(write(folder / "outer.yaml", "defaults: [bad]\n")).startswith(f"{bad}: line 3")
    assert "duplicate key" in refusal(write(folder / "twice.yaml", "seed: 1\nseed: 2\n"))


def test_what_is_not_a_configuration_file_is_refused(folder: Path) -> None:
    assert "must be keys with values" in refusal(write(folder / "list.yaml", "- 1\n- 2\n"))
    assert "Rename it to run.yaml" in refusal(write(folder / "run.yml", "seed: 1\n"))
    (folder / "binary.yaml").write_bytes(b"\xff\xfe\x00\x81")
    assert "binary.yaml" in refusal(folder / "binary.yaml")


def test_a_missing_defaults_entry_is_named(folder: Path) -> None:
    line = refusal(write(folder / "outer.yaml", "defaults: [nope]\n"))
    assert line == f"{folder / 'outer.yaml'}: there is no nope.yaml beside it."
    line = refusal(folder / "run.yaml", "env=bigg")
    assert "there is no env/bigg.yaml beside it. Did you mean 'big'? Known: big, small." in line
    assert "For env itself write env.name=bigg." in line


def test_a_key_for_hydra_is_not_silently_ignored(folder: Path) -> None:
    assert "hydra: unknown key" in refusal(write(folder / "h.yaml", "hydra: {run: {dir: x}}\n"))
    assert "hydra: unknown key" in refusal(None, "hydra.run.dir=x")


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("foo", "'foo' is not a setting. Write foo=VALUE."),
        ("=3", "'=3' is not a setting. Write key=3."),
        ("name=(x)", "cannot read the value of 'name=(x)'. Put it in quotes: 'name=\"(x)\"'."),
        ("learner.betas=0.9,0.95", "'learner.betas=0.9,0.95' holds several values. Write a list, "
         "learner.betas=[0.9,0.95], or one value."),
        ("~seed", "'~seed': seed is not set, so it cannot be removed."),
        ("name=???", "name: has no value yet (???). Write name=VALUE."),
        ("name=${nope}", "name: Interpolation key 'nope' not found. Set that key as well."),
        ("env@there=x", "'env@there=x': no folder 'env' of YAML files is beside the configuration file."),
        ("lr=1", "lr: unknown key. Did you mean 'learner.lr'?"),
    ],
)  # fmt: skip
def test_a_malformed_override_says_what_to_write(override: str, line: str) -> None:
    assert refusal(None, override) == line


def test_a_key_inside_a_plain_value_is_refused_and_replaces_nothing(tmp_path: Path) -> None:
    file = write(tmp_path / "run.yaml", "learner: fast\n")
    assert "learner is 'fast', which has no keys inside" in refusal(file, "learner.lr=1")


def test_an_element_that_a_list_does_not_have_is_refused(tmp_path: Path) -> None:
    file = write(tmp_path / "run.yaml", "rewards: [exact]\n")
    assert "rewards" in refusal(file, "rewards.3.weight=1")


# ------------------------------------------------------------------------------------------------ keywords


def test_keywords_take_short_forms_nested_dicts_dotted_names_and_sections() -> None:
    config = from_kwargs(
        model="seedling",
        data=Path("train.json"),
        agent="tool",
        tools=["calculator"],
        rewards=["exact"],
        algorithm="grpo",
        steps=50,
        env={"args": {"a": 1}},
        learner=LearnerConfig(lr=0.5),
        **{"env.args.b": 2, "learner.epochs": 3},
    )
    assert config.data.path == Path("train.json")
    assert config.trainer.steps == 50
    assert (config.env.name, config.env.args) == ("question", {"a": 1, "b": 2})
    assert (config.learner.lr, config.learner.epochs) == (0.5, 3)


def test_keywords_leave_the_callers_dicts_alone() -> None:
    args = {"size": 4}
    from_kwargs(env={"name": "frozen_lake", "args": args}, **{"env.args.holes": 2})
    assert args == {"size": 4}


@pytest.mark.parametrize(
    ("keywords", "line"),
    [
        ({"lr": 1}, "lr: unknown key. Did you mean 'learner.lr'?"),
        ({"step": 3}, "step: unknown key. Did you mean 'trainer.steps'?"),
        ({"steps": 3, "trainer": {"steps": 4}}, "trainer.steps: given twice, as 3 and 4. Keep one."),
        ({"env": 3, "env.args": {"a": 1}}, "env: given twice, as 3 and with args."),
    ],
)
def test_a_wrong_keyword_says_what_to_write(keywords: dict[str, object], line: str) -> None:
    with pytest.raises(ConfigError) as raised:
        from_kwargs(**keywords)
    assert str(raised.value) == line


def test_another_name_leaves_the_arguments_of_the_first_behind(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("agent: {name: tool, args: {max_tool_rounds: 2}}\n")
    assert load(file, ["agent=chat"]).agent.args == {}
    assert load(file, ["agent=tool"]).agent.args == {"max_tool_rounds": 2}
    assert load(file, ["agent=code", "agent.args.max_tool_rounds=3"]).agent.args == {"max_tool_rounds": 3}
    assert load(file, ["agent.name=chat"]).agent.args == {}


@pytest.mark.parametrize("setting", ["algorithm=ppo", "algorithm.name=ppo"])
def test_another_algorithm_on_top_of_a_runs_own_file_is_that_algorithm(tmp_path, setting):
    file = tmp_path / "config.yaml"
    file.write_text(dump_yaml(load(None, ["algorithm=dr_grpo", "algorithm.entropy_coef=0.25"])))  # every key is in it
    both = load(file, [setting]).algorithm
    assert both == load(None, ["algorithm=ppo", "algorithm.entropy_coef=0.25"]).algorithm
    assert load(file, ["algorithm=dr_grpo"]).algorithm == load(file).algorithm


def test_dotted_keys_of_a_file_are_the_nested_ones(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("learner.lr: 0.5\nenv: sokoban\nenv.args.size: 3\nevaluation:\n  sampling.top_k: 2\n")
    config = load(file, ["learner.epochs=2"])
    assert (config.learner.lr, config.learner.epochs) == (0.5, 2)
    assert (config.env.name, config.env.args) == ("sokoban", {"size": 3})
    assert config.evaluation.sampling == {"top_k": 2}


def test_a_key_given_dotted_and_nested_is_an_error_unless_both_agree(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("learner: {lr: 0.5}\nlearner.lr: 0.25\n")
    with pytest.raises(ConfigError, match=r"learner\.lr: given twice, as 0\.5 and 0\.25\. Keep one\."):
        load(file)
    file.write_text("learner: {lr: 0.5}\nlearner.lr: 0.5\n")
    assert load(file).learner.lr == 0.5


def test_a_dotted_key_that_does_not_exist_is_unknown(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("learner.lrr: 0.5\n")
    with pytest.raises(ConfigError, match=r"learner\.lrr: unknown key\. Did you mean 'learner\.lr'"):
        load(file)


# ------------------------------------------------------------------------------------------------ files that attack

BOMBS = {
    "aliases": (
        "a0: &a0 [x, x, x, x, x, x, x, x, x]\n"
        + "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 12)),
        "more than 100,000 values",
    ),
    "deep list": ("agent: " + "[" * 5000 + "]" * 5000, "line 1: nested more than 64 deep"),
    "deep object": ("".join("  " * i + "a:\n" for i in range(300)), "line 64: nested more than 64 deep"),
    "itself": ("agent: &a\n  args: *a\n", "line 2: *a is inside the node it refers to"),
    "merged with itself": ("agent: &a\n  <<: *a\n", "line 2: *a is inside the node it refers to"),
    "large": ("name: x\n" + "# nothing\n" * 100_000, "more than 262,144 characters"),
    "filled in": (
        "name: ${env.args.b40}\nenv:\n  args:\n    b0: x\n"
        + "".join(f"    b{i}: '${{.b{i - 1}}}${{.b{i - 1}}}'\n" for i in range(1, 41)),
        "too many nested",
    ),
    "digits": ("seed: " + "9" * 20_000, "digits"),
    "half a letter": ('name: "\\ud800"', "line 1: half of a surrogate pair"),
}


@pytest.mark.parametrize("bomb", BOMBS)
@pytest.mark.parametrize("place", ["the file", "a group"])
def test_a_file_that_grows_without_end_is_refused_before_it_does(bomb: str, place: str, tmp_path: Path) -> None:
    text, why = BOMBS[bomb]
    if place == "the file":
        assert why in refusal(write(tmp_path / "run.yaml", text))
    else:
        (tmp_path / "env").mkdir()
        write(tmp_path / "env" / "mine.yaml", text.replace("env.args.b40", ".env.args.b40"))
        assert why in refusal(write(tmp_path / "run.yaml", "defaults: [env: mine]\n"))


def test_aliases_that_stay_small_are_read(tmp_path: Path) -> None:
    text = "env: {name: frozen_lake, args: &size {size: 4}}\nagent: {name: chat, args: *size}\nname: ${env.name}\n"
    config = load(write(tmp_path / "run.yaml", text))
    assert (config.name, config.agent.args) == ("frozen_lake", {"size": 4})


def test_short_forms_of_python_are_those_of_files_and_of_the_command_line(tmp_path):
    file = tmp_path / "short.yaml"
    file.write_text("steps: 7\ntools: calculator\nrewards: exact\nagent: tool\ndata: rows.jsonl\n")
    words = ["steps=7", "tools=calculator", "rewards=exact", "agent=tool", "data=rows.jsonl"]
    python = from_kwargs(
        steps=7, tools="calculator", rewards="exact", agent="tool", data="rows.jsonl", **{"name": "short"}
    )
    assert load(file) == load(None, [*words, "name=short"]) == python
    assert python.trainer.steps == 7
    assert [tool.name for tool in python.tools] == ["calculator"]


def test_steps_of_the_command_line_replace_the_length_in_a_file(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("trainer: {epochs: 3}\ndata: rows.jsonl\nrewards: [exact]\n")
    config = load(file, ["steps=5"])
    assert (config.trainer.steps, config.trainer.epochs) == (5, None)
