"""LoRA adapters through peft.

Adapters are modules of the model, so engine and learner share them. The model with its initial adapters is the
reference model, which costs only the memory of a copy of the adapters.
"""

from __future__ import annotations

import copy
import importlib.util
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from arborl.config.run_config import LoraConfig
from arborl.errors import ConfigError
from arborl.models.model_loading import device_of, read_weights

ADAPTER_NAME = "default"
ADAPTER_PREFIX = "base_model.model."
INSTALL = "Install it: pip install 'arborl[peft]'"


def add_lora(model: PreTrainedModel, config: LoraConfig) -> None:
    """Freeze the model and add adapters, in float32 if the model is coarser. Existing adapters are kept."""
    if importlib.util.find_spec("peft") is None:
        raise ConfigError(
            f"model.lora.rank={config.rank} needs the package peft. {INSTALL}, or write model.lora.rank=0."
        )
    import peft

    if has_lora(model):
        _check_same(model, config)
    else:
        target = "all-linear" if config.target == ("all-linear",) else list(config.target)
        peft_config = peft.LoraConfig(
            r=config.rank,
            lora_alpha=config.alpha,  # type: ignore[arg-type]
            lora_dropout=config.dropout,
            target_modules=target,
            fan_in_fan_out=any(isinstance(module, Conv1D) for module in model.modules()),  # GPT-2: transposed weights
            task_type="CAUSAL_LM",
        )
        try:
            model.add_adapter(peft_config, ADAPTER_NAME)
        except ValueError as error:
            named, linear = model.base_model.named_modules(), (nn.Linear, Conv1D)
            kinds = sorted({name.rpartition(".")[2] for name, module in named if isinstance(module, linear)})
            raise ConfigError(
                f"model.lora.target={list(config.target)}: no such layer in {type(model).__name__}. Write all-linear, "
                f"or some of {', '.join(kinds)}."
            ) from error
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_" in name)
        if parameter.requires_grad and parameter.dtype in (torch.bfloat16, torch.float16):
            parameter.data = parameter.data.float()
    model.eval()


def _check_same(model: PreTrainedModel, config: LoraConfig) -> None:
    existing = model.peft_config[ADAPTER_NAME]
    for key, actual in (("rank", existing.r), ("alpha", existing.lora_alpha), ("dropout", existing.lora_dropout)):
        setting = getattr(config, key)
        if key in config.model_fields_set and setting != actual and (config.rank or key != "rank"):
            raise ConfigError(
                f"model.lora.{key}={setting:g}: the adapters of model.name have {actual:g}. Write that, or remove it."
            )


def has_lora(model: PreTrainedModel) -> bool:
    return bool(getattr(model, "peft_config", None))


def _layers(model: PreTrainedModel) -> list[Any]:
    from peft.tuners.tuners_utils import BaseTunerLayer

    return [module for module in model.modules() if isinstance(module, BaseTunerLayer)]


class LoraFactors(NamedTuple):
    """Factors of an adapter, which adds `x @ first.T @ second.T * scale` to its layer's output."""

    first: Tensor
    second: Tensor
    scale: float


def lora_factors(module: nn.Module) -> LoraFactors | None:
    """Factors of a plain adapter on a plain layer: active, not merged, without bias, DoRA or another variant. None
    otherwise."""
    if not hasattr(module, "lora_A"):
        return None
    from peft.tuners.lora.layer import Linear

    if type(module) is not Linear or type(module.base_layer) is not nn.Linear:
        return None
    active = [name for name in module.active_adapters if name in module.lora_A]
    if module.disable_adapters or module.merged or len(active) != 1 or active[0] in module.lora_variant:
        return None
    first, second = module.lora_A[active[0]], module.lora_B[active[0]]
    if second.bias is not None:
        return None
    return LoraFactors(first.weight, second.weight, float(module.scaling[active[0]]))


def adapter_copy(model: PreTrainedModel) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters() if "lora_" in name}


ParameterContext = Callable[[Sequence[nn.Parameter]], AbstractContextManager[Any]]
"""Context in which these parameters can be read and written."""


@contextmanager
def with_adapter(
    model: PreTrainedModel, adapter: Mapping[str, Tensor], access: ParameterContext = nullcontext
) -> Iterator[None]:
    """Context in which the model has these adapters, made by `adapter_copy`."""
    parameters = {name: p for name, p in model.named_parameters() if name in adapter}
    with access(list(parameters.values())):
        original = adapter_copy(model)
        _assign(parameters, adapter)
    try:
        yield
    except BaseException:
        if access is nullcontext:  # otherwise other ranks would have to take part
            _assign(parameters, original)
        raise
    with access(list(parameters.values())):
        _assign(parameters, original)


@torch.no_grad()
def _assign(parameters: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> None:
    """Copy in place: sharding identifies parameters by their memory."""
    for name, value in values.items():
        parameters[name].copy_(value)


@contextmanager
def dropout_on(model: PreTrainedModel, seed: int) -> Iterator[None]:
    """Context with active LoRA dropout by this seed. Sampling, scoring and the reference model have none."""
    found = [m for layer in _layers(model) for m in layer.lora_dropout.values()] if has_lora(model) else []
    drops = [module for module in found if isinstance(module, nn.Dropout)]
    if not drops:
        yield
        return
    with torch.random.fork_rng([model.device] if model.device.type == "cuda" else []):
        torch.manual_seed(seed)
        for module in drops:
            module.train()
        try:
            yield
        finally:
            for module in drops:
                module.eval()


def adapter_tensor_name(name: str) -> str:
    return f"{ADAPTER_PREFIX}{name.replace(f'.{ADAPTER_NAME}', '')}"


def adapter_tensors(model: PreTrainedModel) -> dict[str, Tensor]:
    return {f"{ADAPTER_PREFIX}{name}": value for name, value in model.get_adapter_state_dict(ADAPTER_NAME).items()}


def save_adapter(model: PreTrainedModel, folder: Path, tensors: dict[str, Tensor]) -> None:
    """Write adapters named by `adapter_tensors`. Transformers with peft loads such a folder and finds the base model by
    its path."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    if model.can_generate():
        model.generation_config.save_pretrained(folder)
    model.peft_config[ADAPTER_NAME].save_pretrained(folder)
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})


def export_merged(model: PreTrainedModel, folder: Path) -> None:
    """Write the model with its adapters merged, so that it runs without peft."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    merged = copy.deepcopy(model)
    layers = {name: module for name, module in merged.named_modules() if isinstance(module, BaseTunerLayer)}
    for module in layers.values():
        module.merge()  # type: ignore[operator]
    for name, module in layers.items():
        parent, _, child = name.rpartition(".")
        if parent not in layers:  # experts have nested adapters, one for each of their weights
            setattr(merged.get_submodule(parent), child, module.get_base_layer())
    del merged.peft_config
    merged._hf_peft_config_loaded = False
    # Adapters read from a folder leave name conversions behind; transformers would write unreadable weights by them.
    if any("lora_" in str(one) for one in getattr(merged, "_weight_conversions", None) or ()):
        merged._weight_conversions = None
    merged.save_pretrained(folder)


def load_4bit(folder: Path, dtype: str, device: str) -> PreTrainedModel:
    """The model with its linear layers in 4 bits, as the base of QLoRA."""
    place = device_of(device)
    if importlib.util.find_spec("bitsandbytes") is None:
        raise ConfigError(
            "model.quantize=4bit needs the package bitsandbytes. Install it: pip install bitsandbytes, or write "
            "model.quantize=none."
        )
    if place.type != "cuda":
        raise ConfigError(f"model.quantize=4bit needs a GPU, and model.device is {place}. Write model.quantize=none.")
    from transformers import BitsAndBytesConfig

    quantization = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=getattr(torch, dtype),
    )  # fmt: skip
    options = {"dtype": getattr(torch, dtype), "quantization_config": quantization, "device_map": {"": place}}
    return read_weights(folder, **options).eval()
