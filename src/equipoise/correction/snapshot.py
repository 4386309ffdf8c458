"""An old copy of the model's tensors, and running the model with it without a trace."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain

import numpy as np
import torch
from torch import Tensor, nn

from equipoise.errors import UserError
from equipoise.storage.packed_modules import PackedLayer, set_data
from equipoise.topology.selection import unwrap


class Random:
    """The state of torch's global random number generators, to draw the same dropout masks twice."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._cpu = torch.get_rng_state()
        self._cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None

    def state(self) -> tuple[Tensor, Tensor | None]:
        return self._cpu, self._cuda

    @classmethod
    def of(cls, cpu: Tensor, cuda: Tensor | None, device: torch.device) -> Random:
        new = object.__new__(cls)
        new._device, new._cpu, new._cuda = device, cpu.cpu(), None if cuda is None else cuda.cpu()
        return new

    def restore(self) -> None:
        torch.set_rng_state(self._cpu)
        if self._cuda is not None:
            torch.cuda.set_rng_state(self._cuda, self._device)


class Snapshot:
    """All parameters and buffers of a model as they once were.

    `at` exchanges the storage of the live tensors for the old one, so the same module (compiled or not, whatever its
    class) computes at θ̃. Buffers are exchanged too: the pass updates the old copy's running statistics, never the
    live ones.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = unwrap(model)
        self.tensors: dict[str, Tensor] = {}

    def __bool__(self) -> bool:
        return bool(self.tensors)

    @property
    def bytes(self) -> int:
        """What a snapshot takes."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self._live().values())

    def _live(self) -> dict[str, Tensor]:
        # looked up each time: `model.to(device)` replaces buffers
        return dict(chain(self._model.named_parameters(), self._model.named_buffers()))

    @torch.no_grad()
    def take(self) -> None:
        """Keep the tensors of now, in the memory of the last snapshot where there is one."""
        for name, tensor in self._live().items():
            old = self.tensors.get(name)
            if old is None or old.shape != tensor.shape or old.device != tensor.device or old.dtype != tensor.dtype:
                self.tensors[name] = tensor.detach().clone()
            else:
                old.copy_(tensor)

    @contextmanager
    def at(self) -> Iterator[None]:
        """Run the model with its old tensors; its own come back afterwards, untouched."""
        live = self._live()
        own = {name: tensor.data for name, tensor in live.items()}
        try:
            _exchange(live, self.tensors)
            yield
        finally:
            _exchange(live, own)

    def load(self, tensors: dict[str, Tensor]) -> None:
        live = self._live()
        if tensors and (differing := set(tensors) ^ set(live)):
            raise UserError(f'the snapshot is of another model: "{min(differing)}" is in one of them only')
        sparse = self._packed()
        for name, value in tensors.items():
            if value.shape != live[name].shape and name not in sparse:
                was, now = tuple(value.shape), tuple(live[name].shape)
                raise UserError(f'the snapshot is of another model: "{name}" has shape {was}, here {now}')
        # in the layout of the live tensors, which compiled passes rely on
        self.tensors = {
            name: torch.empty_like(live[name]).copy_(value).detach()
            if value.shape == live[name].shape
            else value.to(live[name], copy=True)
            for name, value in tensors.items()
        }

    def _packed(self) -> set[str]:
        """The tensors whose length is the number of active weights, which may differ from then to now."""
        layers = [name for name, module in self._model.named_modules() if isinstance(module, PackedLayer)]
        return {f"{layer}.{leaf}" for layer in layers for leaf in ("values", "index")}


def _exchange(live: dict[str, Tensor], values: dict[str, Tensor]) -> None:
    for name, tensor in live.items():
        set_data(tensor, values[name])
    # autocast would go on with the low-precision copies it made of the other weights
    torch.clear_autocast_cache()


@contextmanager
def without_trace(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Whatever runs inside leaves buffers (running statistics) and random number streams as they were.

    Python's and numpy's streams too: a user's augmentation may draw from them.
    """
    torch_random, python_random, numpy_random = Random(device), random.getstate(), np.random.get_state()  # noqa: NPY002
    buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)
        torch_random.restore()
        random.setstate(python_random)
        np.random.set_state(numpy_random)  # noqa: NPY002
