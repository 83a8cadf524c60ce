"""A process of the cluster that samples: `LocalEngine` with a copy of the weights, asked by `engine.py`."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from numpy.typing import NDArray

from arborl.cluster.host import Host
from arborl.errors import EngineError
from arborl.types import Completion, Metrics, Sampling

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from arborl.cluster.arrays import Arrays

log = logging.getLogger(__name__)

Answer = tuple[Completion | None, str, Metrics]
"""What was sampled; or what was wrong with the request; and the engine's counts since the last answer."""


@dataclass(frozen=True, slots=True)
class Blueprint:
    """All that it takes to make the learner's model again, but for its weights."""

    kind: type
    """Of the model, as transformers has it."""
    config: Any
    dtypes: Mapping[str, torch.dtype]
    """Of each parameter."""
    float32_head: bool
    adapters: Any
    """peft's settings of the adapters, where there are some."""
    threads: int
    """Of torch."""
    deterministic: bool

    @classmethod
    def of(cls, model: PreTrainedModel, head: str, threads: int, deterministic: bool) -> Blueprint:
        from arborl.models.lora import ADAPTER_NAME, has_lora

        dtypes = {name: parameter.dtype for name, parameter in model.named_parameters()}
        adapters = model.peft_config[ADAPTER_NAME] if has_lora(model) else None
        return cls(type(model), model.config, dtypes, head == "float32", adapters, threads, deterministic)

    def build(self, device: str) -> PreTrainedModel:
        """The model, with random weights until it is given some: execution paths are checked on them."""
        import torch

        from arborl.models.lora import ADAPTER_NAME
        from arborl.models.model_loading import empty_model

        torch.set_num_threads(self.threads)
        torch.use_deterministic_algorithms(self.deterministic)
        model = empty_model(self.kind, self.config)
        if self.adapters is not None:
            model.add_adapter(self.adapters, ADAPTER_NAME)
        chance = torch.Generator().manual_seed(0)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(False)
            mean, spread = (0.0, 0.02) if parameter.ndim > 1 else (1.0, 0.1)
            parameter.normal_(mean, spread, generator=chance)
            parameter.data = parameter.data.to(self.dtypes[name])
        if self.float32_head:
            from arborl.models.output_heads import float32_head

            float32_head(model)
        return model.to(device).eval()


@dataclass(frozen=True, slots=True)
class EnginePlan:
    """What all engines of a run are made by."""

    blueprint: Blueprint
    settings: Mapping[str, Any]
    """Arguments of `LocalEngine`."""
    tokenizer: Mapping[str, bytes]
    """The tokenizer's files by name, for stop texts."""
    sampling: Sampling
    """How the run draws tokens; what that needs is made before the first request."""


class EngineHost(Host):
    """Samples.

    Args:
        paths, allow_unsafe: as of `Host`.
        plan: what all engines of the run are made by.
        gpu: whether it was given one.
    """

    def __init__(
        self,
        paths: Sequence[str],
        allow_unsafe: bool,
        plan: EnginePlan,
        gpu: bool,
    ):
        super().__init__(paths, allow_unsafe)
        import torch

        from arborl.engines.local import LocalEngine

        if gpu and not torch.cuda.is_available():
            raise EngineError("it was given a GPU that torch does not find there")
        self.version: int | None = None
        model = plan.blueprint.build("cuda" if gpu else "cpu")
        self.engine = LocalEngine(model, decode=_decoder(plan.tokenizer), **plan.settings)
        self.engine.warm_up(plan.sampling)

    async def load(self, version: int, *parts: Arrays) -> int:
        """Take weights; those of several parts, one after the other."""
        from arborl.cluster.arrays import as_tensors

        for arrays in parts:
            await self.engine.load(as_tensors(arrays), version)
        self.version = version
        return version

    async def generate(self, prompt: NDArray[Any], sampling: Sampling, session: str) -> Answer:
        if self.version is None:
            return None, "it has no weights yet", {}
        try:
            said = await self.engine.generate(prompt.tolist(), sampling, session=session)
        except EngineError as error:
            return None, str(error), self.engine.metrics()
        return said, "", self.engine.metrics()


def _decoder(files: Mapping[str, bytes]) -> Any:
    """Tokens to text, by the files of the driver's tokenizer; none where it has none."""
    from arborl.chat.tokenizer import FileTokenizer

    if not files:
        return None
    with TemporaryDirectory(prefix="arborl-tokenizer-") as folder:
        for name, content in files.items():
            (Path(folder) / name).write_bytes(content)
        tokenizer = FileTokenizer(folder)
        tokenizer.decode([0])
    return tokenizer.decode
