"""The state of an optimizer by the names of the parameters, as checkpoints store it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from equipoise.storage.flat import FlatParameters


class NamedState:
    """The state of an optimizer by parameter name, whether it steps parameters or flat stretches of them.

    Args:
        optimizer: The optimizer.
        named: The trainable parameters by name.
        flat: Their layout, if the optimizer steps stretches.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        named: Sequence[tuple[str, nn.Parameter]],
        flat: FlatParameters | None = None,
    ) -> None:
        self._optimizer, self._named, self._flat = optimizer, named, flat

    def _stepped(self, parameter: nn.Parameter) -> nn.Parameter:
        return parameter if self._flat is None else self._flat.stretch_of(parameter)

    def _view(self, parameter: nn.Parameter, value: Any) -> Any:
        stepped = self._stepped(parameter)
        whole = self._flat is not None and isinstance(value, Tensor) and value.shape == stepped.shape
        return self._flat.view(parameter, value) if whole and self._flat is not None else value

    def state_dict(self) -> dict[str, dict[str, Any]]:
        """Momentum, moments and step counts of each parameter."""
        state = self._optimizer.state
        return {
            name: {key: self._view(p, value) for key, value in state.get(self._stepped(p), {}).items()}
            for name, p in self._named
        }

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        """Load what `state_dict` returned."""
        self._optimizer.state.clear()
        for name, parameter in self._named:
            stepped = self._stepped(parameter)
            own = self._optimizer.state[stepped]
            for key, value in state[name].items():
                if not isinstance(value, Tensor):
                    own[key] = value
                elif self._flat is not None and value.shape == parameter.shape and key != "step":  # a step is 0-dim
                    own.setdefault(key, torch.zeros_like(stepped))
                    self._flat.view(parameter, own[key]).copy_(value)
                else:
                    own[key] = value.to(parameter.device, copy=True)
            if not own:
                del self._optimizer.state[stepped]
