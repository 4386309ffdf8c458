"""Layers in packed storage that have no sparse kernel: their own forward runs with the dense weight."""

from __future__ import annotations

from typing import Any, cast

from torch import Tensor, nn

from equipoise.kernels.geometry import ConvShape
from equipoise.storage.packed_modules import PackedLayer, keep_frozen


class PackedOther(PackedLayer):
    """A layer of any type, such as a transposed convolution or a convolution that overrides its forward.

    Args:
        layer: The layer, whose own parameters are `weight`, perhaps `bias`, and others, see `keep_others`.
        reason: Why the sparse kernels cannot compute it.
        mask: As in `PackedLayer`.
        final: As in `PackedLayer`.
        memory: As in `PackedLayer`.
    """

    def __init__(
        self, layer: nn.Module, reason: str, mask: Tensor, final: int | None = None, memory: Tensor | None = None
    ) -> None:
        weight = cast(Tensor, layer.weight)
        shape = ConvShape(weight.shape[0], weight[0].numel())
        super().__init__(shape, weight, cast("Tensor | None", getattr(layer, "bias", None)), mask, final, memory)
        keep_frozen(self, layer)
        self.reason = reason
        self._hidden = (_copy(layer, {}),)  # in a tuple: it is no submodule

    @property
    def dense_in_blocks(self) -> bool:
        return True

    def dense_alone(self, images: int = 0) -> bool:
        return True

    def how(self) -> str:
        return f"dense: {self.reason}"

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        others = {name: p for name, p in self._parameters.items() if name != "values"}
        parameters = {**others, "weight": self.dense_weight()}
        layer = _copy(self._hidden[0], parameters).train(self.training)  # threads may call the layer at the same time
        return layer.forward(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        """Attributes of the original layer, such as `output_padding`."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if "_hidden" not in vars(self):
                raise
            return getattr(self._hidden[0], name)


def _copy(layer: nn.Module, parameters: dict[str, Tensor | None]) -> nn.Module:
    """A copy of a layer with other parameters; attributes and buffers are the same objects."""
    copy = layer.__new__(type(layer))
    vars(copy).update(vars(layer) | {"_parameters": parameters})
    return copy
