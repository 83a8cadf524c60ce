"""The work of `step.py`, the same for both sides: models, prompts, rewards, the lake."""

from __future__ import annotations

import math
import resource
import shutil
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers as hf
from bodies import SHAPES, endless, forbid, give_adapters, load, settle, weights_of
from texts import ChatText, RandomIds, Texts

from arborl.envs.env import Observation, Step
from arborl.envs.games.frozen_lake import FrozenLake
from arborl.models.model_files import resolve
from arborl.training_run.build import TOKENIZER_FILES
from arborl.types import Message, Task, ToolSpec

FIVE_MILLION = {
    "vocab_size": 1024, "hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 6, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 40, "max_position_embeddings": 4096, "tie_word_embeddings": True,
}  # fmt: skip
RATE = 1e-6
"""So small that the policy, and with it the work, stays as it is."""
MOVE = ToolSpec(
    "move",
    "Say something to the lake.",
    {"type": "object", "properties": {"text": {"type": "string", "description": "What to say."}}, "required": ["text"]},
)
"""What the model is told of the lake, on both sides."""


@dataclass(frozen=True)
class Case:
    """`prompts` x `group` episodes of `turns`, each of which samples `sampled` tokens."""

    name: str
    device: str
    prompts: int
    group: int
    prompt: int
    """Tokens of the first prompt."""
    sampled: int
    tried: tuple[int, ...]
    """Sequences a micro-batch that TRL may choose from."""
    turns: int = 1
    context: int = 0
    """The longest conversation; 0 where the first prompt and reply are all."""

    @property
    def episodes(self) -> int:
        return self.prompts * self.group


CASES = [
    Case("single", "cpu", 4, 8, 64, 64, tried=(32, 8)),
    Case("multi-turn", "cpu", 4, 8, 221, 15, tried=(32, 8), turns=4, context=512),
    Case("multi-turn", "cuda", 16, 8, 221, 64, tried=(128, 64, 32), turns=4, context=1024),
    Case("W1", "cuda", 32, 8, 512, 128, tried=(256, 128, 64, 32)),
    Case("W2", "cuda", 8, 8, 2048, 256, tried=(64, 32, 16, 8)),
]


@dataclass
class Timing:
    """One step: seconds, of which sampling took some; tokens sampled; tokens run through the model to do so."""

    seconds: float
    rollout: float
    sampled: int
    read: int


@dataclass(frozen=True)
class Body:
    """Whose step is measured."""

    name: str
    """`5m`, for a CPU, or one of `bodies.load`."""
    lora: int = 0
    """Rank of adapters at all linear layers; 0 trains all weights."""
    outliers: bool = True
    """Given to random weights."""

    @property
    def is_real(self) -> bool:
        """Whether it comes with trained weights and a tokenizer."""
        return self.name != "5m" and self.name not in SHAPES

    def weights(self, case: Case) -> str:
        """`real`, `random+outliers` or `random`. The 5 million weights of a lake's case are the embedded model's."""
        if self.name == "5m":
            return "real" if case.turns > 1 else "random"
        return weights_of(self.name, self.outliers)

    def texts(self, vocabulary: int) -> Texts:
        """Prompts for it."""
        return ChatText(resolve(self.name)) if self.is_real else RandomIds(vocabulary)

    def tokenizer_folder(self, folder: Path) -> Path:
        """The tokenizer of a lake's conversations, of both sides: a real model's own, else the embedded model's. The
        template is the embedded model's, which has tools, as SmolLM2's has not.

        Args:
            folder: where to put a real model's tokenizer beside that template.
        """
        seedling = resolve("seedling")
        if not self.is_real:
            return seedling
        for source in (resolve(self.name), seedling):
            for file in source.iterdir():
                is_template = file.suffix == ".jinja"
                if is_template if source == seedling else file.name in TOKENIZER_FILES:
                    shutil.copy(file, folder)
        return folder

    def make(self, case: Case) -> hf.PreTrainedModel:
        """The same weights at every call. No token ends a reply, and where replies become messages, all that is sampled
        is text: replies have the lengths that are asked for."""
        if self.name == "5m":
            torch.manual_seed(0)
            words = {"vocab_size": 2048} if case.turns > 1 else {}
            model: hf.PreTrainedModel = hf.LlamaForCausalLM(hf.LlamaConfig(**(FIVE_MILLION | words), rms_norm_eps=1e-6))
            endless(model)
            if case.turns > 1:
                sow(model)
        else:
            tiny = self.name == "tiny"
            device, dtype = ("cpu", torch.bfloat16) if tiny else (case.device, None)
            model = load(self.name, device, dtype, self.outliers)
        if case.turns > 1:
            forbid(model, not_text(model.config.vocab_size, resolve(self.name if self.is_real else "seedling")))
        settle()
        return model

    def adapted(self, case: Case) -> hf.PreTrainedModel:
        """With its adapters, as ours has them."""
        model = self.make(case)
        return give_adapters(model, self.lora) if self.lora else model


def not_text(vocabulary: int, folder: Path) -> list[int]:
    """Tokens of the tokenizer in `folder` that control something, and those it does not have."""
    tokenizer = hf.AutoTokenizer.from_pretrained(folder)
    return [*tokenizer.added_tokens_decoder, *range(len(tokenizer), vocabulary)]


def peak_gib(device: str) -> float:
    """The most memory this process has held: of the GPU, or of the host where there is none."""
    if device == "cuda" and torch.cuda.is_available():
        return round(torch.cuda.max_memory_allocated() / 2**30, 2)
    return round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 2)


@torch.no_grad()
def sow(model: hf.PreTrainedModel) -> None:
    """Put the embedded model's weights into a larger one, whose other parts add nothing: it plays alike."""
    seedling = hf.AutoModelForCausalLM.from_pretrained(resolve("seedling"), dtype=torch.float32)
    narrower = math.sqrt(seedling.config.hidden_size / model.config.hidden_size)  # norms divide by the mean, of more
    small = dict(seedling.named_parameters())
    for name, weight in model.named_parameters():
        if any(part in name for part in ("embed_tokens", "o_proj", "down_proj")):
            weight.zero_()
        if name in small:
            corner = tuple(slice(size) for size in small[name].shape)
            weight[corner] = small[name] * (narrower if "norm" in name else 1.0)


def reward_of(ids: Sequence[int]) -> float:
    return float(sum(ids) % 997)


def prompts_of(case: Case, texts: Texts, step: int) -> list[list[int]]:
    chance = np.random.default_rng(step)
    return [texts.prompt(case.prompt, chance) for _ in range(case.prompts)]


def lake_seeds(case: Case, step: int) -> list[int]:
    return [1000 * step + number for number in range(case.prompts)]


class Lake(FrozenLake):
    """A lake as a tool, of always as many turns: who falls in or arrives before the last begins again."""

    blocking = False

    def __init__(self, turns: int):
        super().__init__()
        self.turns = turns

    async def reset(self, task: Task, seed: int) -> Observation:
        self.task, self.seed, self.turn = task, seed, 0
        return await super().reset(task, seed)

    async def step(self, action: Message) -> Step:
        step = await super().step(action)
        self.turn += 1
        observation = step.observation
        if step.over:
            observation = await super().reset(self.task, self.seed)
        answer = Message("tool", observation.messages[-1].content, name=MOVE.name)
        return Step(Observation((answer,)), step.reward, truncated=self.turn >= self.turns)


def now(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """The result of a coroutine that never waits."""
    try:
        coroutine.send(None)
    except StopIteration as over:
        return over.value
    raise RuntimeError("it waited for something")


def fastest(timings: list[Timing]) -> Timing:
    """Of one side's steps; the first warms up and does not count."""
    return min(timings[1:], key=lambda timing: timing.seconds)


def synchronize(model: Any) -> None:
    if model.device.type == "cuda":
        torch.cuda.synchronize()
