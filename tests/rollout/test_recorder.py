"""What the recorder keeps is what the engine was given and gave, whatever the tokenizer does to texts."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from arborl.agents.chat import ChatAgent
from arborl.chat import HermesParser, Renderer, Template
from arborl.engines.scripted import ScriptedEngine
from arborl.envs.env import Env, Observation, Step
from arborl.rollout.recorder import Limits
from arborl.rollout.runner import Cast, Rollout
from arborl.rollout.tree import plant
from arborl.types import Group, Message, Sampling, Task

STOP = 0
SHAPE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }};{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


class Adversary:
    """Ten ids for every character; `encode` always takes the first, so encode(decode(x)) is almost never x."""

    vocab_size = 20_000

    def encode(self, text: str) -> list[int]:
        return [STOP if c == ";" else ord(c) * 10 for c in text]

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(";" if i == STOP else chr(i // 10) for i in ids)

    def token_id(self, text: str) -> int | None:
        return STOP if text == ";" else None


class Echo(Env):
    """Three turns of small talk."""

    async def reset(self, task, seed):
        self.turns = 0
        return Observation((Message("user", "hello"),))

    async def step(self, action):
        self.turns += 1
        return Step(Observation((Message("user", f"you said {action.content}"),)), terminated=self.turns == 3)


class Noting(ScriptedEngine):
    """Remembers every prompt it was given."""

    def __init__(self, replies):
        super().__init__(replies)
        self.prompts: list[tuple[int, ...]] = []

    async def generate(self, prompt, sampling, *, session):
        self.prompts.append(tuple(prompt))
        return await super().generate(prompt, sampling, session=session)


def test_an_adversarial_tokenizer_never_changes_a_trained_id():
    tokenizer = Adversary()
    renderer = Renderer(tokenizer, Template(SHAPE, None, ";"), HermesParser(), (STOP,))
    odd = [[ord(c) * 10 + 7 for c in word] + [STOP] for word in ("yes", "no", "maybe")]
    assert all(tokenizer.encode(tokenizer.decode(reply)) != reply for reply in odd)
    engine = Noting(odd)
    cast = Cast(agent=lambda task: ChatAgent(), env=lambda task: Echo())
    rollout = Rollout(engine, renderer, cast, Sampling(16), Limits(max_context=2000), concurrency=4)
    (group,) = asyncio.run(rollout.collect([Task("t")], seed=0, group_size=5))

    sampled = [token for e in group.episodes for c in e.calls for token in c.completion.tokens]
    forest = plant([group])
    assert forest.terms.token.tolist() == sampled
    assert {tuple(c.completion.tokens) for e in group.episodes for c in e.calls} <= {tuple(reply) for reply in odd}
    assert sorted(engine.prompts) == sorted(c.prompt for e in group.episodes for c in e.calls)
    for episode in group.episodes:
        assert episode.failure is None
        for call, following in zip(episode.calls, episode.calls[1:], strict=False):
            assert following.prompt[: len(call.prompt) + len(call.completion.tokens)] == (
                *call.prompt,
                *call.completion.tokens,
            )
    # one append-only conversation an episode: no branch was opened for want of matching text
    assert plant([Group(Task("t"), group.episodes[:1])]).raw_tokens == len(episode_row(group.episodes[0]))


def episode_row(episode) -> tuple[int, ...]:
    last = episode.calls[-1]
    return (*last.prompt, *last.completion.tokens)
