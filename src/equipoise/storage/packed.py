"""Packed storage: a sparse weight is the vector of its active values."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from equipoise.storage.bitmap import get_bits, pack_bits, set_bits
from equipoise.storage.packed_modules import PackedLayer
from equipoise.storage.sparse_weight import SparseWeight


class PackedWeight(SparseWeight):
    """The weight of a packed layer.

    Between updates all tensors have the size of the active weights, except a bitmap of the weights that have ever been
    active. During an update, scores and gradients have the size of the weight.

    Args:
        name: Name of the weight before packing.
        module: The packed layer.
        final: Number of active weights at the end.
    """

    def __init__(self, name: str, module: PackedLayer, final: int) -> None:
        super().__init__(name, module.values.numel(), final)
        self.module = module
        self.memory = module.memory
        self._explored = pack_bits(module.mask.reshape(-1))

    @property
    def parameter(self) -> nn.Parameter:  # type: ignore[override]
        return self.module.values

    @property
    def active(self) -> int:
        return self.parameter.numel()

    @property
    def size(self) -> int:
        return self.module.shape.weight_numel

    @property
    def index(self) -> Tensor:
        return self.module.index

    @property
    def weight(self) -> Tensor:
        return self._spread(self.parameter.detach())

    @property
    def gradient(self) -> Tensor | None:
        if self.growth is not None:
            return self.growth.reshape(-1)
        return None if self.parameter.grad is None else self._spread(self.parameter.grad)

    def _spread(self, vector: Tensor) -> Tensor:
        return vector.new_zeros(self.size).index_copy_(0, self.index.long(), vector)

    def mask(self) -> Tensor:
        return self.module.mask

    def explored(self) -> int:
        return int(get_bits(self._explored, self.size).sum())

    def lowest(self, score: Tensor, count: int, among: Tensor | None = None, ordered: bool = False) -> Tensor:
        """As in masked storage, but only the active weights are sorted."""
        index = self.index.long()
        finite = score[index].nan_to_num()
        if among is not None:
            finite.masked_fill_(~among[index], torch.inf)
        return index[finite.topk(count, largest=False, sorted=ordered).indices]

    @torch.no_grad()
    def rewire(self, dropped: Tensor, grown: Tensor, states: Iterable[Tensor]) -> None:
        kept = ~torch.isin(self.index, dropped.to(torch.int32))
        self.replace(kept, grown.to(torch.int32), torch.zeros(len(grown)), states)

    def replace(self, kept: Tensor, grown: Tensor, values: Tensor, states: Iterable[Tensor]) -> None:
        """Keep some of the active weights and add new ones.

        Args:
            kept: Boolean vector over the active weights. These keep their values and states.
            grown: Flat indices of the new weights.
            values: Initial values of the new weights; their states start at zero.
            states: Tensors that hold one number for each active weight.
        """
        index, order = torch.cat([self.index[kept], grown]).sort()

        def carried(tensor: Tensor, new: Tensor) -> Tensor:
            return torch.cat([tensor[kept], new.to(tensor.dtype)])[order]

        for tensor in states:
            tensor.data = carried(tensor, torch.zeros(len(grown)))
        self.module.rewire(index, carried(self.parameter.detach(), values))
        set_bits(self._explored, grown)

    # Gradients

    def hide_inactive(self, tensor: Tensor) -> None:
        """Do nothing: inactive weights have no elements."""

    def record_growth(self, record: bool) -> None:
        self.module.open_probe() if record else self.module.close_probe()

    @property
    def growth(self) -> Tensor | None:
        probe = self.module.probe
        return None if probe is None else probe.grad

    @growth.setter
    def growth(self, value: Tensor) -> None:
        assert self.module.probe is not None
        self.module.probe.grad = value

    # Save and load

    def state_dict(self) -> dict[str, Tensor]:
        return {"shape": torch.tensor(self.module.weight_shape), "explored": self._explored}

    def check_state(self, state: dict[str, Tensor]) -> int:
        self._check_bitmaps(state, ("explored",))
        return self.active

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self._explored = state["explored"].clone()
