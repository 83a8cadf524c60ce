"""An agent as an object: it answers, and `train` makes it answer better.

In training and in use the same method answers, `generate_response`; override it, and both change alike. What the model
samples in it is what is trained, token by token, whatever is done to the text before and afterwards.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from arborl.agents.agent_interface import Model
from arborl.agents.context.managed_conversation import ContextPolicy, stateset_context
from arborl.chat import Renderer
from arborl.chat.messages import read_messages
from arborl.checkpoint import check_model
from arborl.conversational.memory import ConversationMemory
from arborl.conversational.settings import Settings
from arborl.conversational.voice import SPEAKING, Scripted, Speaker, Voice
from arborl.envs.env import Env
from arborl.errors import ConfigError
from arborl.models.find import described, resolve
from arborl.rewards.text.text_measures import without_thinking
from arborl.types import Message, Sampling, Task

STUB = "stub://"
REPLIES = ("Hello! How can I help you?", "I understand. Let me see what I can do.", "Is there anything else?")
THINK = "Think first, between <think> and </think>; then answer. Only the answer is read."
MOST = 4096
"""Tokens of a conversation, where nobody says and the model can take more."""

Attention = Literal["auto", "flash_attention_2", "sdpa", "flex_attention", "eager"]


class AgentConfig(Settings):
    """Which model, what it is told, and how it draws its words.

    Example:
        AgentConfig(model_name="seedling", system_prompt="You are helpful.", temperature=0.8, max_new_tokens=64)
    """

    model_name: str = "seedling"
    """`seedling`, `smollm2`, a folder (a checkpoint's `model` too), or a Hugging Face id such as `gpt2`."""
    system_prompt: str | None = Field(None, max_length=10_000)
    """Without one, the environment's."""
    max_new_tokens: int = Field(64, ge=1, le=8192)
    """Of one reply."""
    temperature: float = Field(1.0, ge=0, le=2)
    """0 takes the likeliest token, in use; for training it must be above."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Draw from the fewest tokens that hold this much of the probability; trained on under the same distribution."""
    top_k: int = Field(0, ge=0, le=1000)
    """Draw from the k likeliest tokens; 0 from all."""
    stop: tuple[str, ...] = ()
    """Texts that end a reply once written."""
    max_context: int | None = Field(None, ge=8)
    """Tokens of the conversation and the reply; without it what the model takes, at most 4,096."""
    torch_dtype: Literal["auto", "float32", "bfloat16", "float16", "float64"] = "auto"
    """`auto`: bfloat16 on a GPU, float32 elsewhere."""
    attn_implementation: Attention = "auto"
    """How the learner attends. `flash_attention_2` and `sdpa` are, like `auto`, Arbor's own fused kernels, which take
    whole trees; `eager` spells all out; all give the same result."""
    device_map: str = "auto"
    """`auto` takes the GPU where there is one; else a device: `cpu`, `cuda:1`."""
    chat_template: str | None = None
    """As `model.chat_template`."""
    enable_reasoning: bool = False
    """The model is asked to think between `<think>` and `</think>` first; only what follows is the reply."""
    use_stub_model: bool = False
    """No model is read: `stub_responses` are said, each in its turn."""
    stub_responses: tuple[str, ...] = REPLIES
    enable_context_compression: bool = False
    compression_ratio: float = Field(0.5, gt=0, le=1)
    """The share of the window kept, or that starts a summary (see `arborl.agents.context.managed_conversation`)."""
    compression_strategy: Literal["summary", "truncate", "sliding_window"] = "summary"
    seed: int = Field(0, ge=0)
    """Of replies in use; training has its own."""

    @model_validator(mode="after")
    def _fits_together(self) -> AgentConfig:
        if self.model_name.startswith(STUB) and not self.use_stub_model:
            raise ValueError(f"model_name={self.model_name} is no model. Write use_stub_model=True too.")
        if self.use_stub_model and not (self.stub_responses and all(self.stub_responses)):
            raise ValueError("stub_responses: give at least one, and none that is empty.")
        if not self.enable_context_compression and {"compression_ratio", "compression_strategy"} & self.said:
            raise ValueError("compression_ratio and compression_strategy: write enable_context_compression=True too.")
        return self

    @property
    def policy(self) -> ContextPolicy | None:
        """What is done about a conversation that outgrows its window."""
        if not self.enable_context_compression:
            return None
        told = stateset_context(True, self.compression_ratio, self.compression_strategy)
        return ContextPolicy(kind=told.pop("policy"), **told)

    @property
    def window(self) -> int:
        """Tokens of the conversation and the reply."""
        if self.max_context is not None:
            return self.max_context
        about = {} if self.use_stub_model else described(resolve(self.model_name, "AgentConfig, model_name"))
        takes = about.get("max_position_embeddings") or about.get("n_positions") or MOST
        return min(int(takes), MOST)

    @property
    def dtype(self) -> str:
        """What `torch_dtype` stands for here."""
        if self.torch_dtype != "auto":
            return self.torch_dtype
        from arborl.models.load import dtype_of

        return dtype_of("auto", self.device_map)


def speaker_of(config: AgentConfig) -> Speaker:
    """The model of these settings, read and ready to talk."""
    from arborl.engines.local import LocalEngine
    from arborl.models.load import load_model

    folder = check_model(resolve(config.model_name, "AgentConfig, model_name"))
    renderer = Renderer.from_folder(folder, chat_template=config.chat_template)
    engine = LocalEngine(
        load_model(folder, config.dtype, config.device_map), config.window, decode=renderer.tokenizer.decode
    )
    sampling = Sampling(
        config.max_new_tokens,
        config.temperature,
        stop=renderer.stop,
        stop_texts=config.stop,
        top_k=config.top_k,
        top_p=config.top_p,
    )
    return Speaker(engine, renderer, sampling, config.window, config.seed, config.policy)


class MultiTurnAgent:
    """Talks over many turns.

    Args:
        config: which model, and how it speaks.
        memory: of earlier conversations, if it is to have any.

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
        """Of the run that trained it, with its curves, episodes and report; None before."""
        self.summary: Mapping[str, Any] = {}
        """Of that run: what it measured before and after."""
        self._speaker: Speaker | None = None

    # -------------------------------------------------------------------------------------------- in use

    async def initialize(self) -> None:
        """Read the model. Without this, the first reply does."""
        config = self.config
        if config.use_stub_model or self._speaker is not None:
            return
        self._speaker = await asyncio.to_thread(speaker_of, config)

    async def close(self) -> None:
        """Give the model's memory back, once replies on their way are there. It is read again when it is needed."""
        self._speaker = None

    async def generate_response(self, conversation_history: Sequence[Mapping[str, Any] | Message]) -> str:
        """The reply to a conversation: messages of OpenAI's shape, the user's last.

        Override it, and call it with `super()`, to change what the model is shown or what becomes of its reply.
        """
        history = list(read_messages(conversation_history, "conversation_history"))
        playing = SPEAKING.get()
        shown = self._shown(history)
        if playing is not None:
            return self._reply(await playing.say(shown))
        reply = self._reply(await self._say(shown))
        if self.memory is not None:
            await self.memory.remember([*history, Message("assistant", reply)], self._write)
        return reply

    async def _say(self, messages: Sequence[Message]) -> Message:
        if self.config.use_stub_model:
            return await Scripted(self.config.stub_responses).chat(messages)
        await self.initialize()
        assert self._speaker is not None
        return await self._speaker.say(messages)

    async def _write(self, request: str) -> str:
        """What the model writes when it is asked for something that is no part of a conversation."""
        return (await self._say([Message("user", request)])).content

    def _shown(self, history: list[Message]) -> list[Message]:
        """The conversation as the model sees it: what it is told, what it remembers, what was said."""
        own = self.config.system_prompt
        told = [own] if own else [message.content for message in history if message.role == "system"]
        told += [THINK] if self.config.enable_reasoning else []
        told += [recalled] if self.memory is not None and (recalled := self.memory.recall(history)) else []
        said = [message for message in history if message.role != "system"]
        return [Message("system", "\n\n".join(told)), *said] if told else said

    def _reply(self, message: Message) -> str:
        return without_thinking(message.content) if self.config.enable_reasoning else message.content

    # -------------------------------------------------------------------------------------------- in training

    async def run(self, task: Task, env: Env, model: Model) -> None:
        """Play one episode; the trainer calls it. See `arborl.agents.Agent`."""
        observation = await env.reset(task, task.seed)
        history = [_as_dict(message) for message in observation.messages]
        voice = Voice(model, self.config.policy)
        speaking = SPEAKING.set(voice)
        try:
            while True:
                reply = await self.generate_response(list(history))
                if not isinstance(reply, str):
                    raise TypeError(f"generate_response gave a {type(reply).__name__}; give a text")
                step = await env.step(Message("assistant", reply))
                if step.over:
                    return
                history += [{"role": "assistant", "content": reply}, *map(_as_dict, step.observation.messages)]
        finally:
            SPEAKING.reset(speaking)
            voice.close()

    def with_config(self, config: AgentConfig) -> Self:
        """This agent with other settings. The one it is made from stays as it is."""
        made = copy.copy(self)
        made.config, made._speaker = config, None
        return made

    def trained(self, model_name: str, system_prompt: str | None, run_folder: Path, summary: Mapping[str, Any]) -> Self:
        """This agent with other weights."""
        told = {name: getattr(self.config, name) for name in self.config.said}
        own = {} if self.config.use_stub_model else {"model_name": model_name, "max_context": self.config.window}
        made = self.with_config(AgentConfig(**told | own | {"system_prompt": system_prompt}))
        made.run_folder, made.summary = run_folder, summary
        return made


def _as_dict(message: Message) -> dict[str, str]:
    return {"role": message.role, "content": message.content}
