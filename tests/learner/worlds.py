"""Learners on several ranks, forked from one process that has imported torch."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import cloudpickle
import learner_fakes
import pytest
import torch
from forked import Forked
from learner_fakes import SAMPLING
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from arborl.algorithms.recipe import AlgorithmNeeds
from arborl.config.run_config import LearnerConfig, LoraConfig
from arborl.learner.core.learner import Learner
from arborl.learner.distributed.learner_group import LearnerGroup
from arborl.learner.distributed.rank_worker import LearnerSpec
from arborl.learner.distributed.rendezvous import Rendezvous
from arborl.learner.distributed.run_store import JoinInfo
from arborl.models.attention import ATTENTION_NAME
from arborl.models.lora import add_lora

cloudpickle.register_pickle_by_value(learner_fakes)


class Copies:
    """Ranks that are such copies; `lies` is what they say of themselves instead of the truth, as JSON."""

    def __init__(self, count: int, info: JoinInfo, lies: str = "{}"):
        words = [str(Path(__file__)), str(count), f"{info.address} {info.secret}"]
        self.all = {rank: Forked([*words, str(rank), lies]) for rank in range(1, count)}

    def lost(self) -> dict[int, str]:
        return {rank: f"ended with {one.poll()}" for rank, one in self.all.items() if one.poll() is not None}

    def stop(self) -> None:
        for one in self.all.values():
            with suppress(Exception):
                one.communicate(timeout=5)


def body(lora: int = 0, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """A small Llama, the same at every call; its adapters, where it has some, are not at zero."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(vocab_size=50, num_hidden_layers=2, max_position_embeddings=256, **sizes)
    model = LlamaForCausalLM(config).to(dtype).eval()
    model.set_attn_implementation(ATTENTION_NAME)
    if lora:
        add_lora(model, LoraConfig(rank=lora))
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.1)
    return model


@contextmanager
def world(
    strategy: str, ranks: int, model: PreTrainedModel, needs: AlgorithmNeeds, config: LearnerConfig, **more: int
) -> Iterator[LearnerGroup]:
    """A learner of that strategy on so many ranks; each has a copy of the model as it is now."""
    if strategy.startswith("zero"):  # not for everyone: where it is installed, transformers imports it in every run
        pytest.importorskip("deepspeed", reason="needs pip install 'arborl[deepspeed]'")
    settings = config.model_copy(update={"strategy": strategy, "ranks": ranks, **more})
    rendezvous_, info = Rendezvous.create(ranks)
    spec = LearnerSpec(settings, SAMPLING, needs, 0, 0, lambda device: model)
    group = LearnerGroup(rendezvous_, spec, model, Copies(ranks, info))
    try:
        yield group
    finally:
        group.close()


def alone(model: PreTrainedModel, needs: AlgorithmNeeds, config: LearnerConfig) -> Learner:
    """The same in this process."""
    return Learner(model, config, SAMPLING, needs)


if __name__ == "__main__":
    import json

    from arborl.learner.distributed import rendezvous
    from arborl.learner.distributed.rank_worker import serve_rank

    truth, lies = rendezvous.rank_versions, json.loads(sys.argv[4])
    rendezvous.rank_versions = lambda address: truth(address) | lies
    torch.set_num_threads(1)
    serve_rank(int(sys.argv[3]), int(sys.argv[1]), JoinInfo(*sys.argv[2].split()))
