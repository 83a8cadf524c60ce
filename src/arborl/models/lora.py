"""Low-rank adapters through peft: the policy's own layers with a small correction each, and only that is trained.

Adapters are put into the model's modules, so engine and learner go on sharing them, and the model with the adapters it
had at the start is the policy as it was then: a reference that costs the memory of the adapters alone.
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
from arborl.models.load import device_of, read_weights

ADAPTER = "default"
PREFIX = "base_model.model."
HOW = "Install it: pip install 'arborl[peft]'"


def add_lora(model: PreTrainedModel, config: LoraConfig) -> None:
    """Freeze the model and give it adapters, in float32 where the model is coarser. One that has some keeps them."""
    if importlib.util.find_spec("peft") is None:
        raise ConfigError(f"model.lora.rank={config.rank} needs the package peft. {HOW}, or write model.lora.rank=0.")
    import peft

    if has_lora(model):
        _check_same(model, config)
    else:
        target = "all-linear" if config.target == ("all-linear",) else list(config.target)
        asked = peft.LoraConfig(
            r=config.rank,
            lora_alpha=config.alpha,  # type: ignore[arg-type]
            lora_dropout=config.dropout,
            target_modules=target,
            fan_in_fan_out=any(
                isinstance(module, Conv1D) for module in model.modules()
            ),  # GPT-2's, which are transposed
            task_type="CAUSAL_LM",
        )
        try:
            model.add_adapter(asked, ADAPTER)
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
    """Adapters that are there already have their shape: what is asked for must be that, or not be asked for."""
    own = model.peft_config[ADAPTER]
    for key, there in (("rank", own.r), ("alpha", own.lora_alpha), ("dropout", own.lora_dropout)):
        asked = getattr(config, key)
        if key in config.model_fields_set and asked != there and (config.rank or key != "rank"):
            raise ConfigError(
                f"model.lora.{key}={asked:g}: the adapters of model.name have {there:g}. Write that, or leave it out."
            )


def has_lora(model: PreTrainedModel) -> bool:
    """Whether the model carries adapters."""
    return bool(getattr(model, "peft_config", None))


def _layers(model: PreTrainedModel) -> list[Any]:
    from peft.tuners.tuners_utils import BaseTunerLayer

    return [module for module in model.modules() if isinstance(module, BaseTunerLayer)]


class Factors(NamedTuple):
    """What an adapter adds to its layer's output: `x @ first.T @ second.T * scale`."""

    first: Tensor
    second: Tensor
    scale: float


def factors_of(module: nn.Module) -> Factors | None:
    """An adapter's factors, where it is of the plain form on a plain layer: on, not merged, without a bias, a magnitude
    (DoRA) or another variant. None for anything else, and for a layer that has no adapter."""
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
    return Factors(first.weight, second.weight, float(module.scaling[active[0]]))


def adapter_of(model: PreTrainedModel) -> dict[str, Tensor]:
    """A copy of the adapters as they are now."""
    return {name: p.detach().clone() for name, p in model.named_parameters() if "lora_" in name}


Here = Callable[[Sequence[nn.Parameter]], AbstractContextManager[Any]]
"""Inside, these parameters can be read and written."""


@contextmanager
def with_adapter(model: PreTrainedModel, adapter: Mapping[str, Tensor], here: Here = nullcontext) -> Iterator[None]:
    """Inside, the model's adapters are these, as `adapter_of` gave them."""
    parameters = {name: p for name, p in model.named_parameters() if name in adapter}
    with here(list(parameters.values())):
        own = adapter_of(model)
        _put(parameters, adapter)
    try:
        yield
    except BaseException:
        if here is nullcontext:  # else others would have to meet, and they are elsewhere: it is over for all of them
            _put(parameters, own)
        raise
    with here(list(parameters.values())):
        _put(parameters, own)


@torch.no_grad()
def _put(parameters: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> None:
    """In place: whoever shards a model knows its parameters by their memory."""
    for name, value in values.items():
        parameters[name].copy_(value)


@contextmanager
def dropout_on(model: PreTrainedModel, seed: int) -> Iterator[None]:
    """Inside, the adapters' dropout drops, by the seed; elsewhere (sampling, scoring, the reference) it does not."""
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


def name_in_file(name: str) -> str:
    """What peft's files call a parameter of an adapter."""
    return f"{PREFIX}{name.replace(f'.{ADAPTER}', '')}"


def adapter_file(model: PreTrainedModel) -> dict[str, Tensor]:
    """The adapters under the names that peft's files have for them; not copies."""
    return {f"{PREFIX}{name}": value for name, value in model.get_adapter_state_dict(ADAPTER).items()}


def save_adapter(model: PreTrainedModel, folder: Path, tensors: dict[str, Tensor]) -> None:
    """The adapters alone, as `adapter_file` names them. Transformers, where peft is, loads such a folder and finds the
    base by the path it names."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    if model.can_generate():
        model.generation_config.save_pretrained(folder)
    model.peft_config[ADAPTER].save_pretrained(folder)
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})


def load_adapter(model: PreTrainedModel, folder: Path) -> None:
    """Take adapters that `save_adapter` wrote."""
    from peft import set_peft_model_state_dict
    from safetensors.torch import load_file

    saved: dict[str, Tensor] = load_file(folder / "adapter_model.safetensors")
    plain = {name.removeprefix(PREFIX): value for name, value in saved.items()}
    found: Any = set_peft_model_state_dict(model, plain, adapter_name=ADAPTER)
    if found.unexpected_keys:
        raise ConfigError(f"{folder} holds adapters of another shape: {found.unexpected_keys[0]} has no place here.")


def export_merged(model: PreTrainedModel, folder: Path) -> None:
    """Write an ordinary model: each adapter added to the weights it corrects, so that peft is not needed to run it."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    whole = copy.deepcopy(model)
    layers = {name: module for name, module in whole.named_modules() if isinstance(module, BaseTunerLayer)}
    for module in layers.values():
        module.merge()  # type: ignore[operator]
    for name, module in layers.items():
        parent, _, child = name.rpartition(".")
        if parent not in layers:  # experts have an adapter around an adapter, one for each of their weights
            setattr(whole.get_submodule(parent), child, module.get_base_layer())
    del whole.peft_config
    whole._hf_peft_config_loaded = False
    # Adapters read from a folder leave the names of their file behind, and transformers would write the weights under
    # them: a folder that nobody can read.
    if any("lora_" in str(one) for one in getattr(whole, "_weight_conversions", None) or ()):
        whole._weight_conversions = None
    whole.save_pretrained(folder)


def load_4bit(folder: Path, dtype: str, device: str) -> PreTrainedModel:
    """The model with its linear layers in 4 bits (QLoRA's base), ready for adapters."""
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
    how = {"dtype": getattr(torch, dtype), "quantization_config": quantization, "device_map": {"": place}}
    return read_weights(folder, **how).eval()
