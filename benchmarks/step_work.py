"""The work of `step.py`, equal for Arbor and TRL: models, prompts, rewards, environment."""

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
from benchmark_models import (
    SHAPES,
    add_random_adapters,
    forbid_tokens,
    freeze_garbage_collector,
    load,
    remove_end_tokens,
    weights_kind,
)
from texts import ChatText, RandomIds, Texts

from arborl.envs.env import Observation, Step
from arborl.envs.games.frozen_lake import FrozenLake
from arborl.models.model_files import resolve
from arborl.training_run.build import TOKENIZER_FILES
from arborl.types import Message, Task, ToolSpec

SHAPE_5M = {
    "vocab_size": 1024, "hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 6, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 40, "max_position_embeddings": 4096, "tie_word_embeddings": True,
}  # fmt: skip
LEARNING_RATE = 1e-6
"""So small that the policy, and with it the work of each step, does not change."""
MOVE = ToolSpec(
    "move",
    "Say something to the lake.",
    {"type": "object", "properties": {"text": {"type": "string", "description": "What to say."}}, "required": ["text"]},
)
"""Tool specification of the environment in the prompt of both systems."""


@dataclass(frozen=True)
class Case:
    """`prompts` x `group` episodes of `turns` turns with `sampled` tokens each."""

    name: str
    device: str
    prompts: int
    group: int
    prompt: int
    """Tokens of the first prompt."""
    sampled: int
    tried: tuple[int, ...]
    """Sequences per micro-batch that are tried with TRL."""
    turns: int = 1
    context: int = 0
    """Maximum tokens of a conversation; 0 for single-turn cases."""
    top_p: float = 1.0

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
    """One step: seconds in total and of the rollout; sampled tokens; tokens processed by the model while sampling."""

    seconds: float
    rollout: float
    sampled: int
    read: int


@dataclass(frozen=True)
class ModelSpec:
    """The model of a measurement."""

    name: str
    """`5m` (CPU only), or a name for `benchmark_models.load`."""
    lora: int = 0
    """Rank of adapters on all linear layers; 0 trains all weights."""
    outliers: bool = True
    """Add outliers to random weights."""

    @property
    def is_real(self) -> bool:
        """Whether the model has trained weights and a tokenizer."""
        return self.name != "5m" and self.name not in SHAPES

    def weights(self, case: Case) -> str:
        """`real`, `random+outliers` or `random`. In `multi-turn`, `5m` contains the weights of the embedded model."""
        if self.name == "5m":
            return "real" if case.turns > 1 else "random"
        return weights_kind(self.name, self.outliers)

    def texts(self, vocabulary: int) -> Texts:
        """Generator of prompts for this model."""
        return ChatText(resolve(self.name)) if self.is_real else RandomIds(vocabulary)

    def tokenizer_folder(self, folder: Path) -> Path:
        """Folder with the tokenizer of multi-turn cases: that of a trained model, else the embedded model's. The chat
        template is the embedded model's, because SmolLM2's does not support tools.

        Args:
            folder: destination of the files if the model is a trained one.
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

    def load(self, case: Case) -> hf.PreTrainedModel:
        """Load the model, with the same weights at every call. No token ends a reply, and in multi-turn cases no
        control token can be sampled, so that all replies have the requested length."""
        if self.name == "5m":
            torch.manual_seed(0)
            sizes = {"vocab_size": 2048} if case.turns > 1 else {}
            model: hf.PreTrainedModel = hf.LlamaForCausalLM(hf.LlamaConfig(**(SHAPE_5M | sizes), rms_norm_eps=1e-6))
            remove_end_tokens(model)
            if case.turns > 1:
                copy_seedling_weights(model)
        else:
            tiny = self.name == "tiny"
            device, dtype = ("cpu", torch.bfloat16) if tiny else (case.device, None)
            model = load(self.name, device, dtype, self.outliers)
        if case.turns > 1:
            forbid_tokens(
                model, non_text_token_ids(model.config.vocab_size, resolve(self.name if self.is_real else "seedling"))
            )
        freeze_garbage_collector()
        return model

    def load_with_adapters(self, case: Case) -> hf.PreTrainedModel:
        """Load the model with Arbor's adapters."""
        model = self.load(case)
        return add_random_adapters(model, self.lora) if self.lora else model


def non_text_token_ids(vocabulary: int, folder: Path) -> list[int]:
    """Control tokens of the tokenizer in `folder`, and token ids that it does not have."""
    tokenizer = hf.AutoTokenizer.from_pretrained(folder)
    return [*tokenizer.added_tokens_decoder, *range(len(tokenizer), vocabulary)]


def peak_gib(device: str) -> float:
    """Peak memory of this process: of the GPU, or of the host if there is no GPU."""
    if device == "cuda" and torch.cuda.is_available():
        return round(torch.cuda.max_memory_allocated() / 2**30, 2)
    return round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 2)


@torch.no_grad()
def copy_seedling_weights(model: hf.PreTrainedModel) -> None:
    """Copy the embedded model's weights into a larger model whose other weights have no effect on its outputs."""
    seedling = hf.AutoModelForCausalLM.from_pretrained(resolve("seedling"), dtype=torch.float32)
    norm_scale = math.sqrt(
        seedling.config.hidden_size / model.config.hidden_size
    )  # RMS norms average over more channels
    seedling_weights = dict(seedling.named_parameters())
    for name, weight in model.named_parameters():
        if any(part in name for part in ("embed_tokens", "o_proj", "down_proj")):
            weight.zero_()
        if name in seedling_weights:
            region = tuple(slice(size) for size in seedling_weights[name].shape)
            weight[region] = seedling_weights[name] * (norm_scale if "norm" in name else 1.0)


def id_reward(ids: Sequence[int]) -> float:
    return float(sum(ids) % 997)


def make_prompts(case: Case, texts: Texts, step: int) -> list[list[int]]:
    rng = np.random.default_rng(step)
    return [texts.prompt(case.prompt, rng) for _ in range(case.prompts)]


def lake_seeds(case: Case, step: int) -> list[int]:
    return [1000 * step + number for number in range(case.prompts)]


class FixedLengthLake(FrozenLake):
    """FrozenLake as a tool with a fixed number of turns: an episode that ends earlier restarts on the same map."""

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


def run_synchronously(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Result of a coroutine that never suspends."""
    try:
        coroutine.send(None)
    except StopIteration as over:
        return over.value
    raise RuntimeError("the coroutine suspended")


def fastest(timings: list[Timing]) -> Timing:
    """The fastest step after the warm-up step."""
    return min(timings[1:], key=lambda timing: timing.seconds)


def synchronize(model: Any) -> None:
    if model.device.type == "cuda":
        torch.cuda.synchronize()
