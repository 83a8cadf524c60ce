"""`MultiTurnAgent`: an agent as an object, and its memory of earlier conversations.

Training and use call the same method, `generate_response`; an override changes both. The loss is over the tokens that
the model samples in it, whatever is done with the text before and after.
"""

from __future__ import annotations

import asyncio
import copy
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextvars import ContextVar
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from arborl.agents.agent_interface import Model
from arborl.agents.context.managed_conversation import ContextPolicy, ManagedConversation
from arborl.chat import Renderer
from arborl.chat.messages import read_messages
from arborl.checkpoint import check_model
from arborl.conversational.config import AgentConfig, check_counts
from arborl.envs.env import Env
from arborl.errors import ConfigError
from arborl.models.model_files import resolve
from arborl.rewards.text.text_measures import without_thinking
from arborl.rollout.recorder import EpisodeLimits, Recorder
from arborl.seeds import derive
from arborl.types import Episode, Message, Metrics, Sampling, Task, ToolSpec

if TYPE_CHECKING:
    from arborl.engines import Engine

THINK_PROMPT = "Think first, between <think> and </think>; then answer. Only the answer is read."
MAX_CONVERSATIONS = 64
"""Conversations in use whose compressed history is kept for their next turn."""


# ------------------------------------------------------------------------------------------------ models


class ModelConversation:
    """One conversation with a model."""

    def __init__(self, model: Model, policy: ContextPolicy | None):
        self.model, self.policy = model, policy
        self.messages: tuple[Message, ...] = ()
        self.talk: ManagedConversation | None = None

    def is_continued_by(self, messages: Sequence[Message]) -> bool:
        """Whether the messages start with this conversation."""
        return tuple(messages[: len(self.messages)]) == self.messages

    async def reply(self, messages: Sequence[Message]) -> Message:
        if self.policy is None:
            return await self.model.chat(messages)
        if self.talk is None or not self.is_continued_by(messages):
            opening = next((i for i, message in enumerate(messages) if message.role == "assistant"), len(messages))
            self.messages = tuple(messages[:opening])
            self.talk = ManagedConversation(self.model, self.messages, self.policy)
        for message in messages[len(self.messages) :]:
            if message.role == "assistant":
                self.talk.add(message)
            else:
                self.talk.observe([message])
        self.messages = tuple(messages)
        return await self.talk.sample()

    def close(self) -> None:
        """Record the metrics of compression."""
        if self.talk is not None:
            self.talk.__exit__(None, None, None)


EPISODE_CONVERSATION: ContextVar[ModelConversation | None] = ContextVar("episode_conversation", default=None)
"""The conversation of the running training episode."""


class ScriptedModel:
    """A model with fixed replies: the first one to the first user message, and so on, in a cycle."""

    def __init__(self, replies: Sequence[str]):
        self.replies = tuple(replies)

    async def chat(
        self,
        messages: Sequence[Message | Mapping[str, Any]],
        tools: Sequence[ToolSpec] = (),
        *,
        stop: str | Sequence[str] = (),
    ) -> Message:
        turn = sum(message.role == "assistant" for message in read_messages(messages, "messages"))
        return Message("assistant", self.replies[turn % len(self.replies)])

    def count(self, metrics: Metrics) -> None:
        return None


class LoadedPolicy:
    """A loaded model that answers any number of conversations at once."""

    def __init__(
        self,
        engine: Engine,
        renderer: Renderer,
        sampling: Sampling,
        max_context: int,
        seed: int,
        policy: ContextPolicy | None,
    ):
        self.engine, self.renderer, self.sampling, self.policy = engine, renderer, sampling, policy
        self.limits, self.seed = EpisodeLimits(max_context=max_context), seed
        self._numbers = count()
        self._conversations: list[ModelConversation] = []

    @classmethod
    def load(cls, config: AgentConfig) -> LoadedPolicy:
        from arborl.engines.local import LocalEngine
        from arborl.models.model_loading import load_model

        folder = check_model(resolve(config.model_name, "AgentConfig, model_name"))
        renderer, context = Renderer.from_folder(folder, chat_template=config.chat_template), config.context_length
        model = load_model(folder, config.dtype, config.device_map)
        engine = LocalEngine(model, context, decode=renderer.tokenizer.decode, tokenizer=renderer.tokenizer)
        drawn: dict[str, Any] = {"stop_texts": config.stop, "top_k": config.top_k, "top_p": config.top_p}
        sampling = Sampling(config.max_new_tokens, config.temperature, stop=renderer.stop, **drawn)
        return cls(engine, renderer, sampling, context, config.seed, config.compression_policy)

    async def reply(self, messages: Sequence[Message]) -> Message:
        known = [one for one in self._conversations if one.is_continued_by(messages)]
        longest = max(known, key=lambda one: len(one.messages), default=None)
        conversation = longest or ModelConversation(self._recorder(), self.policy)
        # Meanwhile no other call continues this conversation.
        self._conversations = [other for other in self._conversations if other is not conversation]
        try:
            return await conversation.reply(messages)
        finally:
            if self.policy is not None:
                self._conversations = [*self._conversations, conversation][-MAX_CONVERSATIONS:]

    def _recorder(self) -> Recorder:
        number = next(self._numbers)
        name, seed = f"conversation-{number}", derive(self.seed, "conversation", number)
        return Recorder(self.engine, self.renderer, self.sampling, self.limits, Episode(name, Task(name), seed=seed))


# ------------------------------------------------------------------------------------------------ the agent


class MultiTurnAgent:
    """An agent for conversations of many turns.

    Args:
        config: model, prompt and sampling.
        memory: memory of earlier conversations; None for none.

    Example:
        agent = MultiTurnAgent(AgentConfig(model_name="seedling"))
        await agent.initialize()
        await agent.generate_response([{"role": "user", "content": "Hello!"}])
    """

    def __init__(self, config: AgentConfig | None = None, memory: ConversationMemory | None = None):
        if config is not None and not isinstance(config, AgentConfig):
            raise ConfigError(f"MultiTurnAgent, config={config!r}: must be an AgentConfig. Write AgentConfig(…).")
        self.config, self.memory = config or AgentConfig(), memory
        self.run_folder: Path | None = None
        """Folder of the run that trained the agent, with curves, episodes and report; None before training."""
        self.summary: Mapping[str, Any] = {}
        """Evaluation of that run before and after training."""
        self._policy: LoadedPolicy | None = None

    async def initialize(self) -> None:
        """Load the model. Otherwise the first reply loads it."""
        if not self.config.use_stub_model and self._policy is None:
            self._policy = await asyncio.to_thread(LoadedPolicy.load, self.config)

    async def close(self) -> None:
        """Free the model's memory after running replies. The next reply loads it again."""
        self._policy = None

    async def generate_response(self, conversation_history: Sequence[Mapping[str, Any] | Message]) -> str:
        """The reply to a conversation: messages in OpenAI's format, the user's last.

        Override it and call `super()` to change the prompt or the reply.
        """
        history = list(read_messages(conversation_history, "conversation_history"))
        prompt, episode = self._prompt(history), EPISODE_CONVERSATION.get()
        if episode is not None:
            return self._reply_text(await episode.reply(prompt))
        reply = self._reply_text(await self._reply(prompt))
        if self.memory is not None:
            await self.memory.remember([*history, Message("assistant", reply)], self._complete)
        return reply

    async def _reply(self, messages: Sequence[Message]) -> Message:
        if self.config.use_stub_model:
            return await ScriptedModel(self.config.stub_responses).chat(messages)
        await self.initialize()
        assert self._policy is not None
        return await self._policy.reply(messages)

    async def _complete(self, request: str) -> str:
        """The model's reply to a request that is not part of a conversation."""
        return (await self._reply([Message("user", request)])).content

    def _prompt(self, history: list[Message]) -> list[Message]:
        """The conversation with one system message: system prompt, request to think, memory."""
        prompt = self.config.system_prompt
        system = [prompt] if prompt else [message.content for message in history if message.role == "system"]
        system += [THINK_PROMPT] if self.config.enable_reasoning else []
        system += [text] if self.memory is not None and (text := self.memory.recall(history)) else []
        messages = [message for message in history if message.role != "system"]
        return [Message("system", "\n\n".join(system)), *messages] if system else messages

    def _reply_text(self, message: Message) -> str:
        return without_thinking(message.content) if self.config.enable_reasoning else message.content

    async def run(self, task: Task, env: Env, model: Model) -> None:
        """Play one training episode. See `arborl.agents.Agent`."""
        observation = await env.reset(task, task.seed)
        history = [_as_dict(message) for message in observation.messages]
        conversation = ModelConversation(model, self.config.compression_policy)
        token = EPISODE_CONVERSATION.set(conversation)
        try:
            while True:
                reply = await self.generate_response(list(history))
                if not isinstance(reply, str):
                    raise TypeError(f"generate_response returned a {type(reply).__name__}; return a str")
                step = await env.step(Message("assistant", reply))
                if step.over:
                    return
                history += [{"role": "assistant", "content": reply}, *map(_as_dict, step.observation.messages)]
        finally:
            EPISODE_CONVERSATION.reset(token)
            conversation.close()

    def with_config(self, config: AgentConfig) -> Self:
        """A copy of this agent with other settings."""
        agent = copy.copy(self)
        agent.config, agent._policy = config, None
        return agent

    def with_weights(
        self, model_name: str, system_prompt: str | None, run_folder: Path, summary: Mapping[str, Any]
    ) -> Self:
        """A copy of this agent with trained weights."""
        changes: dict[str, Any] = {"system_prompt": system_prompt}
        if not self.config.use_stub_model:
            changes |= {"model_name": model_name, "max_context": self.config.context_length}
        agent = self.with_config(self.config.replace(**changes))
        agent.run_folder, agent.summary = run_folder, summary
        return agent


def _as_dict(message: Message) -> dict[str, str]:
    return {"role": message.role, "content": message.content}


# ------------------------------------------------------------------------------------------------ memory

RoleAndText = tuple[str, str]
Complete = Callable[[str], Awaitable[str]]
"""Returns the model's reply to a request."""
RECALL_HEADER = "What you remember of earlier conversations:"
SUMMARY_PROMPT = (
    "Summarize these earlier conversations in a few sentences. Keep names, numbers, wishes and what was agreed.\n\n{}"
)


class ConversationMemory:
    """Memory of earlier conversations: the latest ones in full, older ones as a summary that the model writes.

    The memory is part of the system message. A continued conversation replaces its earlier state, and the current one
    is not repeated. If more than `summarization_threshold` messages are stored in full, the older half is summarized.

    In training the memory is constant, so that all attempts at a task start alike.

    Args:
        max_turns: messages that are stored in full at most.
        summarization_threshold: number of messages above which older ones are summarized.

    Example:
        agent = MultiTurnAgent(config, memory=ConversationMemory(max_turns=100, summarization_threshold=50))
    """

    def __init__(self, max_turns: int = 100, summarization_threshold: int = 50):
        check_counts("ConversationMemory", max_turns=max_turns, summarization_threshold=summarization_threshold)
        if summarization_threshold > max_turns:
            raise ConfigError(
                f"ConversationMemory, summarization_threshold={summarization_threshold}: must be at most "
                f"max_turns={max_turns}. Write {max_turns}."
            )
        self.max_turns, self.summarization_threshold = max_turns, summarization_threshold
        self.summary = ""
        self.conversations: list[tuple[RoleAndText, ...]] = []
        """Conversations in full, the oldest first, without system messages."""

    def __len__(self) -> int:
        """Messages that are stored in full."""
        return sum(map(len, self.conversations))

    def recall(self, current: Sequence[Message] = ()) -> str:
        """The memory as text, without the current conversation."""
        pairs = _pairs(current)
        others = [one for one in self.conversations if pairs[: len(one)] != one]
        parts = ([self.summary] if self.summary else []) + ["\n".join(map(": ".join, one)) for one in others]
        return "\n\n".join((RECALL_HEADER, *parts)) if parts else ""

    async def remember(self, conversation: Sequence[Message], complete: Complete) -> None:
        """Store a conversation."""
        pairs = _pairs(conversation)
        self.conversations = [one for one in self.conversations if pairs[: len(one)] != one] + [pairs]
        if len(self) > self.summarization_threshold and len(self.conversations) > 1:
            await self._summarize(complete)
        while len(self) > self.max_turns:
            first = self.conversations[0][1:] if len(self.conversations) == 1 else ()
            self.conversations[:1] = [first] if first else []

    async def _summarize(self, complete: Complete) -> None:
        """Replace the older half by a summary: whole conversations, never the latest one."""
        size, num_old = len(self), 0
        while num_old < len(self.conversations) - 1 and sum(map(len, self.conversations[:num_old])) < size / 2:
            num_old += 1
        old = self.conversations[:num_old]
        texts = ["\n".join(map(": ".join, one)) for one in old]
        summary = await complete(SUMMARY_PROMPT.format("\n\n".join(([self.summary] if self.summary else []) + texts)))
        self.summary = summary.strip() or self.summary
        self.conversations = [one for one in self.conversations if one not in old]

    def save(self, path: str | Path) -> None:
        """Write the memory to a JSON file."""
        names = ("max_turns", "summarization_threshold", "summary", "conversations")
        state = {name: getattr(self, name) for name in names}
        Path(path).write_text(json.dumps(state, ensure_ascii=False, indent=1), encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> ConversationMemory:
        """Read a file of `save`."""
        state = json.loads(Path(path).read_text(encoding="utf-8"))
        memory = cls(state["max_turns"], state["summarization_threshold"])
        memory.summary = state["summary"]
        memory.conversations = [tuple((role, text) for role, text in one) for one in state["conversations"]]
        return memory


def _pairs(messages: Sequence[Message]) -> tuple[RoleAndText, ...]:
    return tuple((message.role, message.content) for message in messages if message.role != "system")
