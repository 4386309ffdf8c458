"""A trained network as it leaves its run: which model of the catalogue, for which input, with which weights."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from equipoise.config import call, checked
from equipoise.errors import UserError
from equipoise.models import MODELS, Normalize

LARGEST = 2**28  # weights of a model, zeros included: what a header can make us allocate is 1 GiB per copy
LARGEST_INPUT = 2**22  # numbers of one image


@dataclass(frozen=True)
class Blueprint:
    """What a file says about a network beside its weights.

    model: a name of the catalogue, its `options`; input_shape: of one image; mean, std: of the normalisation.
    """

    model: str
    options: Mapping[str, Any]
    input_shape: tuple[int, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]

    def skeleton(self) -> nn.Module:
        """The model without memory for its weights, in eval mode, shown to take its input."""
        factory = MODELS[self.model]
        options = checked(factory, self.options, "model")
        try:
            with torch.device("meta"):
                model = call(factory, options, "model").eval()
                size = sum(parameter.numel() for parameter in model.parameters())
        except (RuntimeError, TypeError, OverflowError, MemoryError) as error:
            raise UserError(f"model: {' '.join(str(error).split())[:200]}") from None
        if size > LARGEST:
            raise UserError(f"a model of {size} weights is more than the {LARGEST} that a file may ask for")
        self._check_input(model)
        return model

    def _check_input(self, model: nn.Module) -> None:
        if min(self.input_shape, default=1) < 1 or math.prod(self.input_shape) > LARGEST_INPUT:
            raise UserError(f"an input of {self.input_shape} cannot be")
        try:
            with torch.no_grad():
                model(torch.empty(1, *self.input_shape, device="meta"))
        except RuntimeError as error:
            line = " ".join(str(error).split())[:200]
            raise UserError(f"the model does not take an input of {self.input_shape}: {line}") from None

    def fill(self, model: nn.Module, weights: Mapping[str, Tensor]) -> nn.Module:
        """Give a skeleton memory and exactly these parameters; running statistics are reset."""
        expected = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
        if differing := expected.keys() ^ weights.keys():
            raise UserError(f'the weights are not those of {self.model}: "{min(differing)}"')
        for name, shape in expected.items():
            if tuple(weights[name].shape) != shape:
                raise UserError(f'"{name}" is {tuple(weights[name].shape)}; {self.model} has {shape}')
        model = model.to_empty(device="cpu").requires_grad_(False)
        for module in model.modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm):
                module.reset_running_stats()
            if isinstance(module, Normalize):
                module.set(self.mean, self.std)
        for name, parameter in model.named_parameters():
            parameter.copy_(weights[name])
        return model


@dataclass(frozen=True)
class Network:
    """A blueprint with a state_dict that has the model's usual keys."""

    blueprint: Blueprint
    state: Mapping[str, Tensor]

    def build(self) -> nn.Module:
        """The dense model in eval mode, on the CPU."""
        skeleton = self.blueprint.skeleton()
        weights = {name: self.state[name] for name, _ in skeleton.named_parameters() if name in self.state}
        model = self.blueprint.fill(skeleton, weights)
        try:
            model.load_state_dict(dict(self.state))
        except RuntimeError as error:
            raise UserError(f"the weights do not fit the model: {' '.join(str(error).split())[:200]}") from None
        if not all(tensor.isfinite().all() for tensor in self.state.values()):
            raise UserError("the network has weights that are not finite; there is nothing to deploy")
        return model
