"""Values that the optimizer steps in place of the sparse weights: the latent weights of SR-STE, the scores of HYDRA."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from torch import Tensor

from equipoise.storage.masked import MaskedWeight
from equipoise.storage.sparse_weight import SparseWeight


class Latent(ABC):
    """Base of the latent values, which are the `memory` of the sparse weights.

    Args:
        layers: The sparse weights, which are masked: neither algorithm can be packed.
    """

    def __init__(self, layers: Sequence[SparseWeight]) -> None:
        self._layers = [layer for layer in layers if isinstance(layer, MaskedWeight)]

    @abstractmethod
    def lift(self, ratio: Tensor | None, loss_scale: Tensor | None) -> None:
        """Set the parameters to the latent values and `.grad` to their gradients, before an optimizer step.

        Args:
            ratio: Factor by which the recorded gradients exceed `.grad`; `None` if there is none.
            loss_scale: Factor by which `.grad` exceeds the gradient that the optimizer uses; `None` if there is none.
        """

    @abstractmethod
    def project(self) -> None:
        """After an optimizer step, store the latent values, update the masks and mask the parameters."""

    def finish(self) -> None:  # noqa: B027 - SR-STE has latent weights to the end
        """Remove the latent values after the last step that changes them."""


def recorded_gradient(layer: MaskedWeight, gradient: Tensor, ratio: Tensor | None) -> Tensor | None:
    """Return the recorded gradient of all weights in the scale and type of `gradient`; `None` if none is recorded."""
    if layer.growth is None:
        return None
    recorded = layer.growth.to(gradient)
    return recorded if ratio is None else recorded / ratio.to(recorded)
