"""What `arborl init` writes: commented files to begin with, each part with a test beside it. `NAME` stands for the
part's name, `CLASS` for that of its class."""

from __future__ import annotations

HEAD = "# Start with `arborl train FILE`; `arborl train FILE --print` shows every key; docs/configuration.md.\n"
COMMON = """sampling:
  max_tokens: 64           # sampled tokens a reply
  max_context: 1024        # prompt and reply together
rollout:
  tasks_per_step: 16       # groups a step
  group_size: 8            # attempts at each task, which are compared with each other
algorithm: ALGORITHM            # docs/algorithms.md
learner:
  lr: null                 # by the model's size; a number such as 1e-6 decides it
trainer:
  steps: 30
  save_every: 10           # checkpoints, to resume from and to serve
evaluation:
  tasks: 100               # held-out tasks, played before and after
"""
LAKE = """model: seedling            # or smollm2, a folder, a Hugging Face id
env:
  name: frozen_lake        # `arborl env list` names the others; your own is package.module:Class
  args: {size: 4}
"""
QUESTIONS = """model: seedling            # knows nine formats and little else: for your own questions take a real one
data:
  path: train.json         # rows such as {"question": "What is 2 + 3?", "answer": "5"}; a tenth is held out
rewards: [exact]           # compares the reply with the column `answer`; your own is package.module:function
"""
TOOLS = """model: seedling
data:
  path: arithmetic.json    # `arborl data make arithmetic --out .` makes it; or rows of your own
agent:
  name: tool               # calls tools until it answers; docs/agents.md
  args: {max_tool_rounds: 2}
tools: [calculator]        # your own is package.module:function, with @arborl.tool; docs/tools.md
rewards: [equal]           # the same number as the column `answer`
"""
IMITATE = """model: seedling
data:
  path: transcripts.jsonl  # rows such as {"messages": [{"role": "user", "content": "…"}, …]}; docs/offline.md
algorithm: sft             # learn from what is given; dpo and kto take pairs and labels
learner:
  lr: null                 # by the model's size; a number such as 1e-5 decides it
trainer:
  epochs: 1
"""
PRESETS: dict[str, str] = {
    "lake": HEAD + LAKE + COMMON,
    "questions": HEAD + QUESTIONS + COMMON,
    "tools": HEAD + TOOLS + COMMON,
    "sft": HEAD + IMITATE,
}

ENV = '''"""CLASS: an environment. `arborl env check NAME:CLASS` tries it, `arborl train env=NAME:CLASS` trains."""

from __future__ import annotations

import arborl
from arborl import Message, Observation, Step, Task


class CLASS(arborl.Env):
    """Guess a number from 1 to 9."""

    blocking = False  # reset and step never wait for anything; leave this out where they do

    async def reset(self, task: Task, seed: int) -> Observation:
        """Begin an episode. The start depends on the task alone: all attempts at one task begin alike."""
        self.secret, self.tries, self.won = task.seed % 9 + 1, 0, False
        return Observation((Message("user", "Guess a number from 1 to 9."),))

    async def step(self, action: Message) -> Step:
        """Answer the agent's message. One that is no move is answered too, and never an exception."""
        self.tries += 1
        said = action.content.strip()
        self.won = said == str(self.secret)
        if not said.isdigit():
            answer = "That is no number. Guess a number from 1 to 9."
        else:
            answer = "Right." if self.won else "Higher." if int(said) < self.secret else "Lower."
        return Step(
            Observation((Message("user", answer),)),
            reward=float(self.won),
            terminated=self.won,
            truncated=not self.won and self.tries >= 5,
            info={"valid": float(said.isdigit())},
        )

    def metrics(self) -> dict[str, float]:
        """Numbers of the episode; success rates are made of `success`."""
        return {"success": float(self.won), "tries": float(self.tries)}

    def actions(self) -> list[str]:
        """Valid moves now, for `--stub` and random players."""
        return [str(number) for number in range(1, 10)]

    def oracle(self) -> str:
        """What a perfect player would say now."""
        return str(self.secret)
'''
ENV_TEST = '''"""CLASS keeps what an environment promises."""

from NAME import CLASS

from arborl import Task
from arborl.envs.checker import assert_env


def test_it_keeps_what_an_environment_promises():
    assert_env(CLASS, Task("try", seed=3))
'''
TOOL = '''"""NAME: a tool. Use it with `arborl train … agent=tool tools=[NAME:NAME]`."""

from __future__ import annotations

import arborl


@arborl.tool
def NAME(text: str) -> int:
    """Count the words of a text.

    Args:
        text: what to count in.
    """
    return len(text.split())  # what is raised here, the model reads as the tool's answer
'''
TOOL_TEST = '''"""What the model is told about the tool, and what the tool answers."""

from NAME import NAME


def test_it_answers():
    assert NAME("three short words") == 3


def test_the_model_is_told_its_arguments():
    assert list(NAME.spec.parameters["properties"]) == ["text"]
'''
REWARD = '''"""NAME: a reward. Use it with `arborl train … rewards=[NAME:NAME]`."""

from __future__ import annotations

import arborl


@arborl.reward
def NAME(episode, answer: str) -> float:  # columns of the data arrive by name
    """1 where the last message holds the answer."""
    return float(str(answer) in episode.answer)
'''
REWARD_TEST = '''"""What an episode is worth."""

import asyncio

from NAME import NAME

from arborl import Episode, Message, Task
from arborl.types import Turn


def said(text: str) -> Episode:
    return Episode("e", Task("t", fields={"answer": "42"}), turns=[Turn(Message("assistant", text))])


def test_the_right_answer_is_worth_one():
    assert asyncio.run(NAME(said("It is 42."))) == 1.0


def test_another_is_worth_nothing():
    assert asyncio.run(NAME(said("It is 7."))) == 0.0
'''
AGENT = '''"""NAME: an agent. Train it with `arborl train … agent=NAME:NAME`."""

from __future__ import annotations

from arborl import Message


async def NAME(task, env, model) -> None:
    """Any async program that calls the model. What it asks and what is sampled is recorded, token by token."""
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


class Twice:
    """Says a word, and is over after the second reply."""

    heard = 0

    async def reset(self, task, seed):
        return Observation((Message("user", "Go on."),))

    async def step(self, action):
        self.heard += 1
        return Step(Observation((Message("user", "Again."),)), terminated=self.heard == 2)


class Echo:
    """A model that says the last thing it was told, and remembers what it was asked."""

    def __init__(self):
        self.asked = []

    async def chat(self, messages, tools=(), *, stop=()):
        self.asked.append(list(messages))
        return Message("assistant", messages[-1].content)


def test_it_plays_to_the_end_and_shows_the_model_what_was_said():
    env, model = Twice(), Echo()
    asyncio.run(NAME(Task("t"), env, model))
    assert env.heard == 2
    assert [message.content for message in model.asked[1]][-2:] == ["Go on.", "Again."]
'''
PARTS: dict[str, tuple[str, str]] = {
    "env": (ENV, ENV_TEST),
    "tool": (TOOL, TOOL_TEST),
    "reward": (REWARD, REWARD_TEST),
    "agent": (AGENT, AGENT_TEST),
}
"""By kind: the file, and its test."""
