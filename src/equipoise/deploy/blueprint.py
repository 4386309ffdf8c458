"""A trained network independent of its run: a model of the catalogue, its input and its weights."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from equipoise.checks import require_classes
from equipoise.config import call, checked
from equipoise.errors import UserError
from equipoise.models import MODELS, Normalize

LARGEST = 2**28  # weights of a model, zeros included: a header can make us allocate 1 GiB per copy
LARGEST_INPUT = 2**22  # numbers in one image


@dataclass(frozen=True)
class Blueprint:
    """Everything that a file says about a network apart from its weights.

    Args:
        model: Name in the catalogue of models.
        options: Options of the model.
        input_shape: Shape of one image.
        mean: Mean of the normalisation, per channel; empty if the model has none.
        std: Standard deviation of the normalisation, per channel.
        classes: Names of the classes, by label; empty if unknown.
        zoom: Side of the centred square of an image that the network saw in evaluations, as a multiple of the shorter
            side of the image.
    """

    model: str
    options: Mapping[str, Any]
    input_shape: tuple[int, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    classes: tuple[str, ...] = ()
    zoom: float = 1.0

    def skeleton(self) -> nn.Module:
        """Build the model in eval mode without memory for its weights, and check that it takes its input.

        Raises:
            UserError: If the model cannot be built, is too large, or does not take the input.
        """
        factory = MODELS[self.model]
        options = checked(factory, self.options, "model")
        try:
            with torch.device("meta"):
                model = call(factory, options, "model").eval()
                size = sum(parameter.numel() for parameter in model.parameters())
        except (RuntimeError, TypeError, OverflowError, MemoryError) as error:
            for name, value in options.items():
                if isinstance(value, int) and value > LARGEST:
                    raise UserError(f"model.{name}={value}: {self.model} cannot be built that large") from None
            raise UserError(f"model: {' '.join(str(error).split())[:200]}") from None
        if size > LARGEST:
            raise UserError(f"the model has {size} weights, more than the {LARGEST} that a file may ask for")
        self._check_input(model)
        return model

    def _check_input(self, model: nn.Module) -> None:
        if not 0 < self.zoom <= 1:
            raise UserError(f"zoom={self.zoom}: above 0 and at most 1")
        if min(self.input_shape, default=1) < 1 or math.prod(self.input_shape) > LARGEST_INPUT:
            raise UserError(f"no image has the shape {self.input_shape}")
        try:
            with torch.no_grad():
                scores = model(torch.empty(1, *self.input_shape, device="meta"))
        except RuntimeError as error:
            line = " ".join(str(error).split())[:200]
            raise UserError(f"the model does not take an input of {self.input_shape}: {line}") from None
        if isinstance(scores, Tensor) and scores.dim() > 1:
            require_classes(self.classes, scores.shape[1])

    def fill(self, model: nn.Module, weights: Mapping[str, Tensor]) -> nn.Module:
        """Give a skeleton memory and exactly these parameters; running statistics are reset.

        Raises:
            UserError: If names or shapes are not those of the model.
        """
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
            if isinstance(module, Normalize) and self.mean:
                module.set(self.mean, self.std)
        for name, parameter in model.named_parameters():
            parameter.copy_(weights[name])
        return model


def foreign_buffers(model: nn.Module) -> list[str]:
    """Return the names of the buffers that are neither statistics of a BatchNorm nor those of `Normalize`."""
    known = (nn.modules.batchnorm._BatchNorm, Normalize)
    owners = {f"{name}." if name else "": module for name, module in model.named_modules()}
    found = [(prefix, name) for prefix, m in owners.items() if not isinstance(m, known) for name in m._buffers]
    return [f"{prefix}{name}" for prefix, name in found]


@dataclass(frozen=True)
class Network:
    """A blueprint with a state_dict in the usual keys of its model."""

    blueprint: Blueprint
    state: Mapping[str, Tensor]

    def build(self) -> nn.Module:
        """Build the dense model in eval mode on the CPU.

        Raises:
            UserError: If the weights do not fit the model or are not finite.
        """
        skeleton = self.blueprint.skeleton()
        weights = {name: self.state[name] for name, _ in skeleton.named_parameters() if name in self.state}
        model = self.blueprint.fill(skeleton, weights)
        for name in foreign_buffers(model):
            if name not in self.state:
                raise UserError(f'"{name}" is a buffer that is not in the state_dict; register it as persistent')
        try:
            model.load_state_dict(dict(self.state))
        except RuntimeError as error:
            raise UserError(f"the weights do not fit the model: {' '.join(str(error).split())[:200]}") from None
        if not all(tensor.isfinite().all() for tensor in self.state.values()):
            raise UserError("the network has weights that are not finite; there is nothing to deploy")
        return model
