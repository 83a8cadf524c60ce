"""Every rank holds some heads and some columns of each layer; all run the same trees, and add up twice a layer.

Queries, keys, values, gate and up are cut by columns, what follows them by rows. Embeddings, norms and the layer that
says tokens are whole in each rank: their gradients come out the same everywhere, and nothing need be summed.
"""

from __future__ import annotations

from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module
from transformers import PreTrainedModel

from arborl.learner.attention_choice import Ways
from arborl.learner.optimizer import Optimizer
from arborl.learner.scorer import Asked, Scorer
from arborl.learner.strategy import Strategy, refuse
from arborl.models.fast_forward import FAST_MODEL_CLASSES
from arborl.models.model_loading import compute_device, set_compute_device

COLUMNS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
ROWS = ("self_attn.o_proj", "mlp.down_proj")


class TensorParallel(Strategy):
    """torch's `parallelize_module`."""

    apart = True
    meets = True
    spreads = False

    def check(self, model: PreTrainedModel) -> None:
        """Its layers must be Llama's, and its heads and columns must come out even."""
        kind, ranks, config = type(model).__name__, self.ranks.count, model.config
        if kind not in FAST_MODEL_CLASSES:
            known = ", ".join(name.removesuffix("ForCausalLM") for name in FAST_MODEL_CLASSES)
            raise refuse("tensor", f"how to cut {kind} is known of {known} alone", "learner.strategy=fsdp2")
        for what in ("num_attention_heads", "num_key_value_heads", "intermediate_size"):
            if (count := getattr(config, what)) % ranks:
                raise refuse("tensor", f"{what}={count} cannot be dealt out to {ranks} ranks", "fewer learner.ranks")
        if getattr(model, "quantization_method", None) is not None:
            raise refuse("tensor", "weights in 4 bits cannot be cut into parts", "learner.strategy=ddp")

    def place(self, scorer: Scorer) -> Asked:
        """Cut the policy, and a critic of its own."""
        critic = scorer.critic
        for model in [scorer.policy] + ([critic.trunk] if critic is not None and critic.trunk is not None else []):
            self._cut(model)
        return Asked(scorer.policy, scorer)

    def place_frozen(self, model: PreTrainedModel) -> Asked:
        """A reference, cut too."""
        self._cut(model)
        return Asked.plain(model)

    def add_up(self, optimizer: Optimizer) -> None:
        """Every rank has seen every tree."""

    def _cut(self, model: PreTrainedModel) -> None:
        place = compute_device(model)
        Ways.settle(model)
        set_compute_device(model, place)
        mesh = init_device_mesh(place.device.type, (self.ranks.count,))
        for layer in model.base_model.layers:
            plan: dict[str, ParallelStyle] = {}
            for name in (*COLUMNS, *ROWS):
                plan |= _plan(name, layer.get_submodule(name), name in COLUMNS)
            parallelize_module(layer, mesh, plan)


def _plan(name: str, module: nn.Module, columns: bool) -> dict[str, ParallelStyle]:
    """How to cut a layer; of an adapter, the factor that has the layer's cut side."""

    def style() -> ParallelStyle:
        return ColwiseParallel() if columns else RowwiseParallel()

    if not hasattr(module, "lora_A"):
        return {name: style()}
    factor = "lora_B" if columns else "lora_A"
    found = {f"{name}.{factor}.{adapter}": style() for adapter in getattr(module, factor)}
    return {f"{name}.base_layer": style(), **found}
