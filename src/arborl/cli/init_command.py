"""`arborl init`: a commented configuration, or a part with its test. In the templates `NAME` stands for the part's name
and `CLASS` for its class name."""

from __future__ import annotations

import keyword
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from arborl.cli.command_arguments import argument
from arborl.errors import ConfigError, did_you_mean, disk_errors


def init(
    kind: Annotated[str, argument("[env|tool|reward|agent]", "Kind of part.")] = "",
    name: Annotated[str, argument("[NAME]", "Name of the part.")] = "",
    path: Annotated[Path | None, typer.Option(help="File of the configuration.", show_default="config.yaml")] = None,
    preset: Annotated[str, typer.Option(help="lake, questions, tools, sft, or an algorithm.", metavar="NAME")] = "lake",
    force: Annotated[bool, typer.Option("--force", help="Overwrite existing files.")] = False,
) -> None:
    """Write a configuration, or a new part. A part is an environment, a tool, a reward or an agent, with a test."""
    if kind:
        files, hint = part_files(kind, name, path)
    else:
        path = path or Path("config.yaml")
        files, hint = {path: configuration_text(path, preset)}, f"Check it: arborl train {path} --print"
    existing = [str(file) for file in files if file.exists()]
    if existing and not force:
        raise ConfigError(f"{', '.join(existing)}: exists already. Write another name, or --force to overwrite.")
    for file, text in files.items():
        with disk_errors(file):
            file.write_text(text, encoding="utf-8")
        typer.echo(f"wrote {file}")
    typer.echo(hint)


def configuration_text(path: Path, preset: str) -> str:
    """The text of a configuration file; the preset of an algorithm is the lake with that algorithm."""
    from arborl.config.algorithm_config import PRESETS as ALGORITHMS

    online = [name for name in ALGORITHMS if name not in ("dpo", "ipo", "kto", "sft", "distill")]
    if path.suffix != ".yaml":
        raise ConfigError(f"--path {path}: must end in .yaml. Write {path.with_suffix('.yaml')}.")
    if not path.parent.is_dir():
        raise ConfigError(f"--path {path}: there is no folder {str(path.parent)!r}. Create it, or write another.")
    if preset not in PRESETS and preset not in online:
        known = [*PRESETS, *online]
        raise ConfigError(f"--preset {preset}: unknown.{did_you_mean(preset, known)} Known: {', '.join(known)}.")
    text = PRESETS.get(preset, PRESETS["lake"]).replace("FILE", str(path))
    return text.replace("ALGORITHM", preset if preset in online else "grpo")


def part_files(kind: str, name: str, path: Path | None) -> tuple[Mapping[Path, str], str]:
    """The files of a part and its test, and how to run the test."""
    if kind not in PARTS:
        raise ConfigError(f"{kind!r}: unknown kind of part.{did_you_mean(kind, PARTS)} Known: {', '.join(PARTS)}.")
    if not name:
        raise ConfigError(f"the name is missing. Write arborl init {kind} NAME.")
    if not name.isidentifier() or keyword.iskeyword(name) or name == "arborl":
        raise ConfigError(f"{name!r}: not a module name. Write letters, digits and _, as in my_{kind}.")
    if path is not None:
        raise ConfigError("--path is for a configuration. A part is written to NAME.py in the current folder.")
    title = "".join(word[:1].upper() + word[1:] for word in name.split("_")) or name
    code, test = (text.replace("NAME", name).replace("CLASS", title) for text in PARTS[kind])
    return {Path(f"{name}.py"): code, Path(f"test_{name}.py"): test}, f"Test it: python -m pytest test_{name}.py"


# ------------------------------------------------------------------------------------------------ templates

HEAD = "# Train with `arborl train FILE`; `arborl train FILE --print` prints every key; docs/configuration.md.\n"
COMMON = """sampling:
  max_tokens: 64           # sampled tokens of a reply
  max_context: 1024        # prompt and reply together
rollout:
  tasks_per_step: 16       # groups per step
  group_size: 8            # episodes of each task, compared with each other
algorithm: ALGORITHM            # docs/algorithms.md
learner:
  lr: null                 # null: by the model's size; or a number such as 1e-6
trainer:
  steps: 30
  save_every: 10           # steps between checkpoints
evaluation:
  tasks: 100               # held-out tasks, evaluated before and after
"""
LAKE = """model: seedling            # or smollm2, a folder, a Hugging Face id
env:
  name: frozen_lake        # `arborl env list` lists all; your own: package.module:Class
  args: {size: 4}
"""
QUESTIONS = """model: seedling            # small; use a larger model for your own questions
data:
  path: train.json         # rows such as {"question": "What is 2 + 3?", "answer": "5"}; 10 % are held out
rewards: [exact]           # compares the reply with the field `answer`; your own: package.module:function
"""
TOOLS = """model: seedling
data:
  path: arithmetic.json    # made by `arborl data make arithmetic --out .`; or your own rows
agent:
  name: tool               # calls tools until it answers; docs/agents.md
  args: {max_tool_rounds: 2}
tools: [calculator]        # your own: package.module:function, with @arborl.tool; docs/tools.md
rewards: [equal]           # 1 if the reply is the number in the field `answer`
"""
IMITATION = """model: seedling
data:
  path: transcripts.jsonl  # rows such as {"messages": [{"role": "user", "content": "…"}, …]}; docs/offline.md
algorithm: sft             # imitate demonstrations; dpo and kto train on pairs and labels
learner:
  lr: null                 # null: by the model's size; or a number such as 1e-5
trainer:
  epochs: 1
"""
PRESETS: dict[str, str] = {
    "lake": HEAD + LAKE + COMMON,
    "questions": HEAD + QUESTIONS + COMMON,
    "tools": HEAD + TOOLS + COMMON,
    "sft": HEAD + IMITATION,
}

ENV = '''"""CLASS: an environment. Check it: `arborl env check NAME:CLASS`. Train: `arborl train env=NAME:CLASS`."""

from __future__ import annotations

import arborl
from arborl import Message, Observation, Step, Task


class CLASS(arborl.Env):
    """Guess a number from 1 to 9."""

    blocking = False  # reset and step never block; leave this out if they do

    async def reset(self, task: Task, seed: int) -> Observation:
        """Start an episode. All attempts at one task must start in the same state."""
        self.secret, self.tries, self.won = task.seed % 9 + 1, 0, False
        return Observation((Message("user", "Guess a number from 1 to 9."),))

    async def step(self, action: Message) -> Step:
        """Apply the agent's message. An invalid action is answered too, never an exception."""
        self.tries += 1
        guess = action.content.strip()
        self.won = guess == str(self.secret)
        if not guess.isdigit():
            answer = "That is not a number. Guess a number from 1 to 9."
        else:
            answer = "Right." if self.won else "Higher." if int(guess) < self.secret else "Lower."
        return Step(
            Observation((Message("user", answer),)),
            reward=float(self.won),
            terminated=self.won,
            truncated=not self.won and self.tries >= 5,
            info={"valid": float(guess.isdigit())},
        )

    def metrics(self) -> dict[str, float]:
        """Metrics of the episode; the success rate is the mean of `success`."""
        return {"success": float(self.won), "tries": float(self.tries)}

    def actions(self) -> list[str]:
        """Valid actions, for `--stub` and random players."""
        return [str(number) for number in range(1, 10)]

    def oracle(self) -> str:
        """The action of a perfect player."""
        return str(self.secret)
'''
ENV_TEST = '''"""CLASS satisfies the contract of an environment."""

from NAME import CLASS

from arborl import Task
from arborl.envs.checker import assert_env


def test_it_satisfies_the_contract():
    assert_env(CLASS, Task("try", seed=3))
'''
TOOL = '''"""NAME: a tool. Use it with `arborl train … agent=tool tools=[NAME:NAME]`."""

from __future__ import annotations

import arborl


@arborl.tool
def NAME(text: str) -> int:
    """Count the words of a text.

    Args:
        text: the text.
    """
    return len(text.split())  # an exception becomes the tool result that the model reads
'''
TOOL_TEST = '''"""The tool's result, and its description for the model."""

from NAME import NAME


def test_it_returns_the_number_of_words():
    assert NAME("three short words") == 3


def test_its_arguments_are_described():
    assert list(NAME.spec.parameters["properties"]) == ["text"]
'''
REWARD = '''"""NAME: a reward. Use it with `arborl train … rewards=[NAME:NAME]`."""

from __future__ import annotations

import arborl


@arborl.reward
def NAME(episode, answer: str) -> float:  # task fields are passed by name
    """1 if the last message contains the answer."""
    return float(str(answer) in episode.answer)
'''
REWARD_TEST = '''"""Rewards of a right and of a wrong answer."""

import asyncio

from NAME import NAME

from arborl import Episode, Message, Task
from arborl.types import Turn


def episode_with(text: str) -> Episode:
    return Episode("e", Task("t", fields={"answer": "42"}), turns=[Turn(Message("assistant", text))])


def test_the_right_answer_has_reward_one():
    assert asyncio.run(NAME(episode_with("It is 42."))) == 1.0


def test_a_wrong_answer_has_reward_zero():
    assert asyncio.run(NAME(episode_with("It is 7."))) == 0.0
'''
AGENT = '''"""NAME: an agent. Train it with `arborl train … agent=NAME:NAME`."""

from __future__ import annotations

from arborl import Message


async def NAME(task, env, model) -> None:
    """Any async program that calls the model. Prompts and sampled tokens are recorded."""
    observation = await env.reset(task, task.seed)
    messages = [Message("system", "Think, then answer."), *observation.messages]
    while True:
        reply = await model.chat(messages)  # messages may be added, edited or deleted between calls
        step = await env.step(reply)
        if step.over:
            return
        messages += [reply, *step.observation.messages]
'''
AGENT_TEST = '''"""The agent plays an episode to its end."""

import asyncio

from NAME import NAME

from arborl import Message, Observation, Step, Task


class TwoSteps:
    """Ends after the second reply."""

    num_steps = 0

    async def reset(self, task, seed):
        return Observation((Message("user", "Go on."),))

    async def step(self, action):
        self.num_steps += 1
        return Step(Observation((Message("user", "Again."),)), terminated=self.num_steps == 2)


class EchoModel:
    """A model that repeats the last message and records its prompts."""

    def __init__(self):
        self.prompts = []

    async def chat(self, messages, tools=(), *, stop=()):
        self.prompts.append(list(messages))
        return Message("assistant", messages[-1].content)


def test_it_plays_to_the_end_and_keeps_the_history():
    env, model = TwoSteps(), EchoModel()
    asyncio.run(NAME(Task("t"), env, model))
    assert env.num_steps == 2
    assert [message.content for message in model.prompts[1]][-2:] == ["Go on.", "Again."]
'''
PARTS: dict[str, tuple[str, str]] = {
    "env": (ENV, ENV_TEST),
    "tool": (TOOL, TOOL_TEST),
    "reward": (REWARD, REWARD_TEST),
    "agent": (AGENT, AGENT_TEST),
}
"""By kind: code and test."""
