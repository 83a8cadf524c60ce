"""What the docs say works."""

from __future__ import annotations

import json
import os
import re
import shlex
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from cases import slow_cases
from typer.testing import CliRunner

import arborl
from arborl.cli.main import app
from arborl.config.config_base import validate
from arborl.config.run_config import RunConfig
from arborl.convert import convert

ROOT = Path(__file__).parents[2]
PAGES = ["README.md", *(str(p.relative_to(ROOT)) for p in sorted((ROOT / "docs").glob("*.md")))]
RESULTS = [str(p.relative_to(ROOT)) for p in sorted((ROOT / "docs" / "results").glob("*.md"))]


def blocks(page: str, language: str) -> list[str]:
    found = re.findall(r"```(\w*)\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)
    return [text for name, text in found if name == language]


LONG = {
    f"docs/{name}.md"
    for name in ("rollout", "rewards", "environments", "learner", "tools", "trainer", "tracking", "trl")
}
"""Pages whose examples take longest."""
WITH_CODE = [name for name in PAGES if blocks(name, "python")]


@pytest.mark.parametrize(
    "name",
    [*(page for page in WITH_CODE if page not in LONG), *slow_cases(*(page for page in WITH_CODE if page in LONG))],
)
def test_python_examples_run(name, tmp_path, monkeypatch):
    """All blocks of a page in one namespace, as a reader would paste them; training runs as a stub."""
    monkeypatch.chdir(tmp_path)
    rows = [{"question": f"What is {a} + 2?", "answer": a + 2} for a in range(20)]
    (tmp_path / "train.json").write_text(json.dumps(rows))
    honest = arborl.run
    monkeypatch.setattr(arborl, "run", lambda **given: honest(**given | {"stub": True}))
    monkeypatch.setattr("webbrowser.open", lambda address: True)
    code = "\n".join(blocks(name, "python"))
    exec(code, {"__name__": "example"})
    if "arborl.run(" in code:
        assert list((tmp_path / "runs").glob("*/summary.json"))


@pytest.mark.parametrize(
    "line",
    [
        line
        for block in blocks("README.md", "")
        for line in block.replace("\\\n", " ").splitlines()
        if "arborl train" in line
    ],
)
def test_commands_of_the_readme_are_understood(line, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "FILE.yaml").write_text("trainer: {steps: 3}\n")
    (tmp_path / "PROGRAM.py").touch()
    (tmp_path / "recipes").symlink_to(ROOT / "recipes")
    done = CliRunner().invoke(app, [*shlex.split(line, comments=True)[1:], "--print"])
    assert done.exit_code == 0, done.output
    assert "seed:" in done.output


@pytest.mark.slow
def test_the_first_commands_of_the_readme_work_when_pasted_into_an_empty_folder(tmp_path):
    (block,) = blocks("README.md", "sh")
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-e"], input=block, cwd=tmp_path, env={**os.environ, "PATH": path}, text=True, capture_output=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "runs/lake minus seedling, greedy: success" in done.stdout
    assert json.loads((tmp_path / "runs" / "lake" / "summary.json").read_text())["steps"] == 8
    assert (tmp_path / "my-model" / "model.safetensors").is_file()


@pytest.fixture
def my_package(tmp_path, monkeypatch):
    """The package that examples import tools from, and the key that one of them is opened with."""
    monkeypatch.setenv("TOOL_KEY", "secret")
    (tmp_path / "packages" / "my_package").mkdir(parents=True)
    tools = "from arborl import tool\n\n@tool\ndef weather(town: str) -> str:\n    'The weather.'\n    return town"
    (tmp_path / "packages" / "my_package" / "tools.py").write_text(tools)
    monkeypatch.syspath_prepend(tmp_path / "packages")
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] == "my_package"]:
        del sys.modules[name]


@pytest.mark.parametrize("name", [name for name in PAGES if blocks(name, "yaml")])
@pytest.mark.usefixtures("my_package")
def test_yaml_examples_are_configurations(name, tmp_path):
    for number, text in enumerate(blocks(name, "yaml")):
        (tmp_path / f"{number}.yaml").write_text(text)
        assert CliRunner().invoke(app, ["train", str(tmp_path / f"{number}.yaml"), "--print"]).exit_code == 0, text


@pytest.mark.parametrize("line", [line for block in blocks("docs/tools.md", "sh") for line in block.splitlines()])
@pytest.mark.usefixtures("my_package")
def test_commands_of_the_tools_page_are_understood(line, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text(blocks("docs/tools.md", "yaml")[0])
    done = CliRunner().invoke(app, [*shlex.split(line)[1:], "--print"])
    assert done.exit_code == 0, done.output


START = "docs/getting-started.md"


@pytest.mark.parametrize("line", [line for block in blocks(START, "sh") for line in block.splitlines()])
def test_commands_of_the_first_page_are_understood(line, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert CliRunner().invoke(app, ["init", "--path", "run.yaml", "--preset", "tools"]).exit_code == 0
    words = shlex.split(line, comments=True) if not line.endswith("\\") else []
    if words[:1] != ["arborl"]:
        return  # curl and kill
    given = [*words[1:], "--print"] if words[1] == "train" and "--print" not in words else [*words[1:], "--help"]
    done = CliRunner().invoke(app, [word for word in given if word not in ("&", "--stub")])
    assert done.exit_code == 0, done.output


@pytest.mark.slow
def test_the_way_of_the_first_page_from_an_empty_folder(tmp_path):
    """Its commands as they stand, one after the other; only the port is another."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    script = "\n".join(["set -em", *blocks(START, "sh")]).replace("8000", str(port))
    found = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    done = subprocess.run(["bash", "-c", script], cwd=tmp_path, env=found, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "<answer>42</answer>" in done.stdout
    assert '"object":"chat.completion"' in done.stdout
    assert (tmp_path / "my-model" / "model.safetensors").exists()


@pytest.mark.slow
@pytest.mark.parametrize("notebook", sorted((ROOT / "docs" / "tutorials").glob("*.ipynb")), ids=lambda path: path.stem)
def test_a_notebook_runs(notebook, tmp_path, monkeypatch):
    """Its code cells in one namespace, from the first to the last, as they stand."""
    monkeypatch.chdir(tmp_path)
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    assert code
    exec("\n".join(code), {"__name__": "notebook"})


MIGRATE = "docs/migrate.md"
ROLL = """defaults: [_self_]
exp_name: lake
pretrain: some/model
sequence_length: 2048
rollout_batch_size: 8
actor_train: {model_args: {}}
train_env_manager: {num_env_groups: 4, group_size: 2, tags: [Lake]}
val_env_manager: {num_env_groups: 4, group_size: 1, tags: [Lake]}
custom_envs: {Lake: {env_type: frozen_lake, max_steps: 10, max_tokens_per_step: 64}}
"""
VERL = (
    "python3 -m verl.trainer.main_ppo data.train_files=rows.parquet actor_rollout_ref.model.path=some/model "
    "algorithm.adv_estimator=grpo actor_rollout_ref.rollout.n=4 "
)
FLY = "agent.agent_type=hf agent.tools=[calculator] agent.reward_name=math_equal_reward data.train_files=rows.json "
TRL = """from datasets import load_dataset
from trl import GRPOConfig, GRPOTrainer
def right(completions, **columns):
    return [0.0 for _ in completions]
rows = load_dataset("json", data_files="train.json", split="train")
GRPOTrainer("some/model", reward_funcs=right, args=GRPOConfig({}), train_dataset=rows).train()
"""
TOOL = "actor_rollout_ref.rollout.multi_turn.tool_config."
MIXED = f"""MODEL_PATH=/models/base
MATH_RATIO=0.6
python3 -m verl.trainer.main_ppo --config-path=config --config-name=mixed_dataset_grpo data.train_files=rows.parquet \\
  actor_rollout_ref.model.path=$MODEL_PATH +data.mixed_dataset.dataset_ratios.math=$MATH_RATIO \\
  +data.mixed_dataset.dataset_ratios.nq=0.4 +data.mixed_dataset.agent_mapping.math=code_execution_agent \\
  +data.mixed_dataset.agent_mapping.nq=tool_agent {TOOL}server_url=http://h:30003 """
LOOPS = "agent_loops: {code_execution_agent: {_target_: verl.experimental.agent_loop.CodeExecutionAgentLoop}}"
BASES = {"verl": ("run.sh", VERL), "agentfly": ("run.txt", FLY), "mixed": ("run.sh", MIXED), "trl": ("run.py", TRL)}
"""What the rows of the page's tables are added to."""
FILES = {
    "agent_val_frozen_lake.yaml": ROLL,
    "run_agentic_pipeline.sh": "python start_agentic_pipeline.py --config_path . --config_name agent_val_frozen_lake\n",
    "run_grpo.sh": VERL,
    "overrides.txt": "actor_rollout_ref.rollout.n=8",
    "run_statelm.sh": VERL + "actor_rollout_ref.rollout.agent.default_agent_loop=statelm_tool_agent",
    "run_mixed_training.sh": MIXED,
    "config/mixed_dataset_grpo.yaml": LOOPS,
    "setup_cluster.sh": "MASTER_IP=10.0.0.1\nWORKER_NODES=(10.0.0.2)\n",
    "train_example.sh": f"python3 -m verl.trainer.main_ppo {FLY}",
    "train.py": TRL.format("max_steps=1"),
    "command.sh": "accelerate launch --num_processes 2 train.py\n",
    "script.py": "from stateset_agents import MultiTurnAgent\n",
}
"""The files that the page's commands read."""


def migration_rows() -> list[tuple[str, str, str]]:
    """System, their keys and our settings, of the tables whose head names a system and `here`."""
    found, system = [], ""
    for line in (ROOT / MIGRATE).read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        if not line.startswith("|"):
            system = ""
        elif len(cells) == 2 and cells[1] == "here":
            system = cells[0].lower().replace(" training", "")
        elif system and "`" in line:
            found += [(system, *(" ".join(re.findall("`([^`]*)`", cell)) for cell in cells))]
    return found


@pytest.fixture
def their_files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)


@pytest.mark.parametrize(("system", "theirs", "ours"), migration_rows())
@pytest.mark.usefixtures("their_files")
def test_tables_of_the_migration_page_are_what_convert_does(system, theirs, ours):
    if system == "roll":
        Path("more.txt").write_text(theirs)
        draft = convert("roll", [Path("agent_val_frozen_lake.yaml"), Path("more.txt")])
    else:
        name, text = BASES[system]
        Path(name).write_text(text.format(theirs.replace(" ", ", ")) if system == "trl" else text + theirs)
        draft = convert({"mixed": "verl"}.get(system, system), [Path(name)])
    found = validate(RunConfig, draft.tree())
    expected = [setting.partition("=") for setting in shlex.split(ours)]
    assert expected
    for path, _, value in expected:
        node = found.model_dump(mode="json")
        for part in path.split("."):
            node = node[int(part)] if isinstance(node, list) else node[part]
        assert node == yaml.safe_load(value), path
    keys = {key.partition("=")[0].lstrip("+") for key in theirs.split()} if system != "trl" else ()
    assert all(any(one.endswith(key) for one in draft.accounted()) for key in keys)


@pytest.mark.usefixtures("their_files")
def test_commands_of_the_migration_page_run_in_their_order():
    lines = [line for block in blocks(MIGRATE, "") for line in block.splitlines()]
    assert all(line.startswith("arborl ") for line in lines)
    for line in lines:
        done = CliRunner().invoke(app, shlex.split(line, comments=True)[1:])
        assert done.exit_code == 0, (line, done.output)


NAMED_TEST = re.compile(r"\b((?:tests/[\w/]+/)?test_\w+\.py)\b|::(test_\w+)(…?)")
"""A file of tests, or a test in the file that is named before it; `…` stands for the rest of a name."""


@pytest.mark.parametrize("name", [*PAGES, *RESULTS])
def test_tests_that_a_page_names_exist(name):
    text = (ROOT / name).read_text().replace("test_maze.py", "")  # which `arborl init env maze` writes
    for line in text.splitlines():
        content = ""
        for file, test, rest in NAMED_TEST.findall(line):
            if file:
                found = list((ROOT / "tests").rglob(file.rpartition("/")[2]))
                assert found, file
                assert "/" not in file or ROOT / file in found, file
                content = found[0].read_text()
            elif content:
                assert f"def {test}" in content if rest else f"def {test}(" in content, test


@pytest.mark.parametrize("name", [*PAGES, *RESULTS])
def test_links_lead_to_files(name):
    for target in re.findall(r"\]\((?!http)([^)#]+)\)", (ROOT / name).read_text()):
        assert ((ROOT / name).parent / target).exists(), target
