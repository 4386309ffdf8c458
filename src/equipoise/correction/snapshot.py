"""Old weights of a model, and passes that leave no trace in the live one."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain

import numpy as np
import torch
from torch import Tensor, nn

from equipoise.errors import UserError
from equipoise.modules import preserved_values
from equipoise.storage.packed_modules import PackedLayer, set_data
from equipoise.topology.selection import unwrap


class RandomState:
    """The state of torch's global random number generators, to draw the same dropout masks twice."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._cpu = torch.get_rng_state()
        self._cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None

    def state(self) -> tuple[Tensor, Tensor | None]:
        return self._cpu, self._cuda

    @classmethod
    def of(cls, cpu: Tensor, cuda: Tensor | None, device: torch.device) -> RandomState:
        """Make it from a saved state.

        Raises:
            UserError: The state is not one of this generator.
        """
        try:
            torch.Generator().set_state(cpu.cpu())
        except (RuntimeError, TypeError) as error:
            raise UserError(f"the state of the random number generator is damaged: {error}") from None
        new = object.__new__(cls)
        new._device, new._cpu, new._cuda = device, cpu.cpu(), None if cuda is None else cuda.cpu()
        return new

    def is_current(self) -> bool:
        """Whether the generators are in this state."""
        now = RandomState(self._device)
        same_cuda = self._cuda is None or now._cuda is None or torch.equal(self._cuda, now._cuda)
        return torch.equal(self._cpu, now._cpu) and same_cuda

    def restore(self) -> None:
        """Set the generators to this state."""
        torch.set_rng_state(self._cpu)
        if self._cuda is not None:
            torch.cuda.set_rng_state(self._cuda, self._device)


class Snapshot:
    """A copy of all parameters and buffers of a model; empty until `take` is called.

    `at` swaps the storages of the live tensors and of the copy, so the same module, compiled or not, computes at
    θ̃. Buffers are swapped too: a pass at the snapshot updates the running statistics of the copy, not the live ones.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = unwrap(model)
        self.tensors: dict[str, Tensor] = {}

    def __bool__(self) -> bool:
        return bool(self.tensors)

    @property
    def bytes(self) -> int:
        """The size of a snapshot, whether one was taken or not."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self._live().values())

    def _live(self) -> dict[str, Tensor]:
        # Not cached: `model.to(device)` replaces buffers.
        return dict(chain(self._model.named_parameters(), self._model.named_buffers()))

    @torch.no_grad()
    def take(self) -> None:
        """Copy the live tensors, into the memory of the previous copy if it fits."""
        for name, tensor in self._live().items():
            old = self.tensors.get(name)
            if old is None or old.shape != tensor.shape or old.device != tensor.device or old.dtype != tensor.dtype:
                self.tensors[name] = tensor.detach().clone()
            else:
                old.copy_(tensor)

    @contextmanager
    def at(self) -> Iterator[None]:
        """Run the model with the tensors of the snapshot; restore the live tensors afterwards."""
        live = self._live()
        if added := set(live) - set(self.tensors):
            raise UserError(f'"{min(added)}" was added to the model after the snapshot; attach a new correction')
        own = {name: tensor.data for name, tensor in live.items()}
        try:
            _swap(live, self.tensors)
            yield
        finally:
            _swap(live, own)

    def load(self, tensors: dict[str, Tensor]) -> None:
        """Take tensors by name, such as those of a checkpoint.

        Raises:
            UserError: Names or shapes are not those of the model.
        """
        live = self._live()
        if tensors and (differing := set(tensors) ^ set(live)):
            raise UserError(f'the snapshot belongs to another model: only one of them has "{min(differing)}"')
        packed = self._packed()
        for name, value in tensors.items():
            if value.shape != live[name].shape and name not in packed:
                shapes = f"{tuple(value.shape)} in the snapshot and {tuple(live[name].shape)} in the model"
                raise UserError(f'the snapshot belongs to another model: "{name}" has shape {shapes}')
        # Compiled passes rely on the memory layout of the live tensors.
        self.tensors = {
            name: torch.empty_like(live[name]).copy_(value).detach()
            if value.shape == live[name].shape
            else value.to(live[name], copy=True)
            for name, value in tensors.items()
        }

    def _packed(self) -> set[str]:
        """Return the names of the tensors whose length is the number of active weights, which may change."""
        layers = [name for name, module in self._model.named_modules() if isinstance(module, PackedLayer)]
        return {f"{layer}.{leaf}" for layer in layers for leaf in ("values", "index")}


def _swap(live: dict[str, Tensor], values: dict[str, Tensor]) -> None:
    for name, tensor in live.items():
        set_data(tensor, values[name])
    torch.clear_autocast_cache()  # it holds low-precision copies of the other weights


@contextmanager
def without_trace(model: nn.Module, device: torch.device, bn_trace: bool = False) -> Iterator[None]:
    """Restore the buffers of the model and the global random number generators after the block.

    The generators of Python and numpy are restored too: a user's augmentation may draw from them. With `bn_trace` the
    buffers keep what the block did to them, as in the published code of AGENT.
    """
    torch_random, python_random = RandomState(device), random.getstate()
    numpy_random = np.random.get_state()  # noqa: NPY002
    try:
        with preserved_values(() if bn_trace else model.buffers()):
            yield
    finally:
        torch_random.restore()
        random.setstate(python_random)
        np.random.set_state(numpy_random)  # noqa: NPY002
