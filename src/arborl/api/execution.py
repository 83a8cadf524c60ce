"""How the model of a run is executed: for the first lines of a run, `summary.json` and `arborl
doctor`."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def execution_of(model: PreTrainedModel) -> dict[str, str]:
    """Device, precision, and the execution paths of engine and learner."""
    import torch

    from arborl.models.execution_paths import execution_paths
    from arborl.models.model_loading import compute_device

    place = compute_device(model)
    name = str(place.device)
    if place.device.type == "cuda":
        name += f" ({torch.cuda.get_device_name(place.device)})"
    elif place.device.type == "cpu":
        name += f" ({torch.get_num_threads()} threads)"
    return {"device": name, "precision": str(place.dtype).removeprefix("torch."), **execution_paths(model)}
