"""What a GPU need not hold all the time, in the host's memory: the optimiser's numbers, gradients, the reference.

For a step the masters and moments come to the device a part at a time, are updated there by the same AdamW, and go
back. So the result is that of a run that keeps them on the device, to the last bit; it costs two trips over the bus.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from arborl.learner.forecast import AT_ONCE
from arborl.learner.host_copy import host_tensor

COUNT = "step"
"""What AdamW holds of a parameter besides moments of its size."""

Pairs = Sequence[tuple[nn.Parameter, nn.Parameter]]
"""Parameters, each with its master: a float32 copy, or itself."""


class Away:
    """Keeps the optimiser's numbers in the host's memory.

    Args:
        device: where they come for a step.
        gradients: whether the gradients of masters are kept in the host's memory too.
    """

    def __init__(self, device: torch.device, gradients: bool):
        self.device, self.gradients = device, gradients
        self.masters: dict[nn.Parameter, Tensor] = {}
        """The numbers of masters that are copies."""
        self.resting: dict[nn.Parameter, Tensor] = {}
        """What those masters are between steps: where their gradients are on the device, so must they be, and are then
        a tensor that takes no memory."""
        self.moments: dict[nn.Parameter, dict[str, Tensor]] = {}

    def master_of(self, parameter: nn.Parameter) -> nn.Parameter:
        """A float32 copy of a parameter."""
        kept = self._keep(parameter.detach().float())
        resting = kept if self.gradients else torch.empty(1, device=self.device).expand(parameter.shape)
        master = nn.Parameter(resting)
        self.masters[master], self.resting[master] = kept, resting
        return master

    def value(self, master: nn.Parameter) -> Tensor:
        """The numbers of a master."""
        return self.masters.get(master, master.detach())

    @torch.no_grad()
    def step(self, adam: torch.optim.Optimizer, pairs: Pairs) -> None:
        """One step of all masters that have a gradient; the parameters become their masters, rounded."""
        gradients = {master: master.grad for _, master in pairs}
        for _, master in pairs:
            master.grad = None  # AdamW passes over what has no gradient
        for some in _parts([pair for pair in pairs if gradients[pair[1]] is not None]):
            for _, master in some:
                self._bring(adam, master, gradients.pop(master))
            adam.step()
            for parameter, master in some:
                self._put_back(adam, parameter, master)
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()  # from here on the host may read its copies

    def restore(self, adam: torch.optim.Optimizer, saved: dict[int, dict[str, Tensor]]) -> None:
        """Take moments as the optimiser's `state_dict` numbers them; none of them comes to the device."""
        flat = [master for group in adam.param_groups for master in group["params"]]
        for number, state in saved.items():
            own = self.moments[flat[number]] = {k: self._keep(v) for k, v in state.items() if k != COUNT}
            adam.state[flat[number]] = own | {COUNT: state[COUNT].to(self.device)}

    def _bring(self, adam: torch.optim.Optimizer, master: nn.Parameter, gradient: Tensor | None) -> None:
        assert gradient is not None
        if master in self.masters:
            master.data = self._fetch(self.masters[master])
        master.grad = gradient.to(self.device)
        for name, value in self.moments.get(master, {}).items():
            adam.state[master][name] = self._fetch(value)

    def _put_back(self, adam: torch.optim.Optimizer, parameter: nn.Parameter, master: nn.Parameter) -> None:
        master.grad = None
        state, own = adam.state[master], self.moments.setdefault(master, {})
        for name, value in state.items():
            if name != COUNT:
                own[name] = state[name] = self._keep(value, own.get(name))
        if master in self.masters:
            parameter.copy_(master.detach())
            self._keep(master.detach(), self.masters[master])
            master.data = self.resting[master]

    def _fetch(self, kept: Tensor) -> Tensor:
        return kept.to(self.device, copy=True, non_blocking=True)

    def _keep(self, value: Tensor, place: Tensor | None = None) -> Tensor:
        place = host_tensor(value, self.device.type == "cuda") if place is None else place
        return place.copy_(value, non_blocking=True)


def _parts(pairs: Pairs) -> Iterator[Pairs]:
    """Some at a time, whose masters together are not larger than `AT_ONCE`, or one that is."""
    some: list[tuple[nn.Parameter, nn.Parameter]] = []
    for pair in pairs:
        if some and sum(master.numel() for _, master in some) + pair[1].numel() > AT_ONCE:
            yield some
            some = []
        some.append(pair)
    if some:
        yield some


class Guest:
    """A frozen model whose weights are in the host's memory, and on the device while it is asked.

    Their memory on the device is given back and taken again under them: whoever holds a parameter, or several joined
    into one, or compiled code that reads them, holds the same tensors each time.
    """

    def __init__(self, model: PreTrainedModel):
        self.model = model
        self.kept: dict[int, Tensor] = {}
        """The bytes of each storage."""
        self._leave()

    @contextmanager
    def here(self) -> Iterator[None]:
        """Inside, the weights are on the device, and may be changed."""
        for number, storage in self._storages().items():
            storage.resize_(self.kept[number].nbytes)
            _bytes_of(storage).copy_(self.kept[number])
        try:
            yield
        finally:
            self._leave()

    def _leave(self) -> None:
        before, self.kept = self.kept, {}
        for number, storage in self._storages().items():
            data = _bytes_of(storage)
            place = before.get(number)
            if place is None or place.nbytes != data.nbytes:
                place = host_tensor(data, data.is_cuda)
            self.kept[number] = place.copy_(data)
            storage.resize_(0)

    def _storages(self) -> dict[int, torch.UntypedStorage]:
        return {p.untyped_storage()._cdata: p.untyped_storage() for p in self.model.parameters()}


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)  # type: ignore[call-overload,no-any-return]
