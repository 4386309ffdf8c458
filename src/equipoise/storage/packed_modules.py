"""Layers whose parameter is the vector of their active values."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from typing import Any, ClassVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from equipoise.errors import UserError
from equipoise.kernels import boundary, library, operators
from equipoise.kernels.blocked import Blocked, as_float32, from_blocked, to_blocked
from equipoise.kernels.geometry import NO_BORDER, Border, ConvShape
from equipoise.kernels.library import LANES
from equipoise.kernels.linear import linear
from equipoise.kernels.plain_conv import conv
from equipoise.kernels.spread import for_spread, is_channels_last, spread, spread_by_torch
from equipoise.kernels.taps import Pattern, check_index, pattern_of
from equipoise.storage import layer_cost
from equipoise.storage.sparse_weight import is_cleared

# Attributes that a packed layer takes from the original layer
ATTRIBUTES = (
    "in_features", "out_features", "in_channels", "out_channels", "kernel_size", "stride", "padding", "dilation",
    "groups", "padding_mode", "output_padding", "transposed",
)  # fmt: skip


MOST_SHAPES = 64  # of inputs for which a layer remembers how it runs
Versions = list[int] | None


def _versions(*tensors: Tensor) -> Versions:
    """A list that changes with the tensors; `None` if they do not count their changes."""
    return None if any(tensor.is_inference() for tensor in tensors) else boundary.versions(tensors)


KINDS: tuple[type[nn.Module], ...] = (nn.Linear, nn.Conv1d, nn.Conv2d)


class PackedLayer(nn.Module):
    """A layer that stores `values`, its active weights in flat order, and their flat indices `index`.

    Gradients, momentum and every copy of the parameter then have the size of the active weights. The layer takes a
    plain tensor or a `Blocked` activation and returns the same kind. If the kernels are missing or `dense` is set, it
    computes with the dense weight; the stored tensors stay the same.

    Args:
        shape: Geometry of the layer.
        weight: The dense weight.
        bias: The bias, if any.
        mask: Boolean mask of the active weights.
        final: Number of active weights that a topology will end with; `None` if no topology has been planned.
        memory: Bitmap that a topology keeps of the dense weight, such as its signs.
    """

    values: nn.Parameter
    index: Tensor
    bias: nn.Parameter | None
    dims: ClassVar[int]

    def __init__(
        self,
        shape: ConvShape,
        weight: Tensor,
        bias: Tensor | None,
        mask: Tensor,
        final: int | None = None,
        memory: Tensor | None = None,
    ) -> None:
        super().__init__()
        if mask.shape != weight.shape or mask.dtype != torch.bool:
            raise UserError(
                f"the mask must be boolean of shape {tuple(weight.shape)}, not {tuple(mask.shape)} of {mask.dtype}"
            )
        if weight.dtype != torch.float32 or weight.device.type != "cpu":
            raise UserError(
                f"packed layers are float32 on cpu, not {weight.dtype} on {weight.device}; use masked storage there"
            )
        if weight.numel() >= 2**31:
            raise UserError(f"a weight of {weight.numel()} elements is too large to pack; the limit is 2^31")
        self.shape, self.weight_shape = shape, tuple(weight.shape)
        index = mask.flatten().nonzero().flatten()
        self.values = nn.Parameter(weight.detach().flatten()[index].clone())
        self.register_buffer("index", index.to(torch.int32))
        self.register_parameter("bias", None if bias is None else nn.Parameter(bias.detach().clone()))
        self.final = final
        self.memory = memory
        self.probe: Tensor | None = None
        self.weight_suffix = ".weight"  # of the name of the weight before packing, after the name of the layer
        self.in_blocks = False  # whether the layers around it run in the blocked layout
        # versions of tensors, aliases that keep their memory from other tensors, and what was found for them
        self._checked: tuple[Versions, Tensor, Tensor] | None = None
        self._kept: tuple[Versions, tuple[Tensor, Tensor], Tensor] | None = None
        self._dense_for: dict[Hashable, bool] = {}  # by the shapes of a plain input and of the values

    @property
    def of_patches(self) -> ConvShape | None:
        """The linear layer that the layer is on patches of a plain input; `None` if it has no such form."""
        return None

    @property
    def _on_tokens(self) -> bool:
        """Whether the linear kernel computes the layer on plain tensors, without the blocked layout."""
        return self.of_patches is not None

    @property
    def density(self) -> float:
        """Fraction of the weights that is active."""
        return self.values.numel() / max(1, math.prod(self.weight_shape))

    @property
    def weight(self) -> Tensor:
        """The dense weight, differentiable with respect to `values` and to the probe if one is open."""
        return self._weight(channels_last=False)

    def _weight(self, channels_last: bool) -> Tensor:
        if torch.compiler.is_compiling() or type(self.index) is not Tensor:  # such as tensors without memory
            weight = spread_by_torch(self.values, self.index, self.weight_shape)
        else:
            weight = spread(self.values, self._checked_index(), self.weight_shape, channels_last)
        probe = self._active_probe()
        return weight if probe is None else weight + probe

    def _checked_index(self) -> Tensor:
        """The indices for `spread`; those that the weight does not have are refused. The last ones are remembered."""
        versions = _versions(self.index)
        if versions is None or self._checked is None or self._checked[0] != versions:
            check_index(self.index, math.prod(self.weight_shape))
            self._checked = versions, self.index.detach(), for_spread(self.index, math.prod(self.weight_shape))
        return self._checked[2]

    # Gradients of inactive weights

    def open_probe(self) -> None:
        """Make the next backward passes also compute the gradient of inactive weights.

        The probe is a zero tensor in the shape of the weight that takes part in every forward pass as if it were added
        to the weight. Autograd sums the gradient of all weights, active or not, in `probe.grad`. A call of
        `torch.autograd.grad` for other tensors does not change it.
        """
        self.probe = torch.zeros(()).expand(self.weight_shape).requires_grad_()

    def close_probe(self) -> None:
        """Compute the gradient of active weights only."""
        self.probe = None

    def dense_weight(self, x: Tensor | None = None) -> Tensor:
        """Return `weight`, in the memory format of `x`. Without gradients it is kept until the values change."""
        channels_last = x is not None and is_channels_last(x)
        if torch.compiler.is_compiling() or (torch.is_grad_enabled() and self.values.requires_grad):
            return self._weight(channels_last)
        versions = _versions(self.values, self.index)
        if versions is None or self._kept is None or self._kept[0] != versions:
            self._kept = versions, (self.values.detach(), self.index.detach()), self._weight(channels_last).detach()
        return self._kept[2]

    def _active_probe(self) -> Tensor | None:
        """The probe if it takes part in this forward pass."""
        if self.probe is None or not (self.values.requires_grad and torch.is_grad_enabled()):
            return None
        if is_cleared(self.values.grad):
            self.probe.grad = None  # the gradients were cleared without a step
        return self.probe

    @property
    def mask(self) -> Tensor:
        """Boolean mask of the active weights, in the shape of the weight."""
        flat = torch.zeros(math.prod(self.weight_shape), dtype=torch.bool)
        return flat.index_fill_(0, self.index.long(), True).view(self.weight_shape)

    @property
    def dense_in_blocks(self) -> bool:
        """Whether leaving the blocked layout for torch's dense operation is faster at this density."""
        active, dense = self.index.numel(), layer_cost.outside_blocks(self.shape)
        if layer_cost.sparse(self.shape, active) <= dense:
            return False
        of_16_outputs = library.available() and self.pattern.blocks is not None
        return not of_16_outputs or layer_cost.sparse(self.shape, active, weight=layer_cost.BLOCK_WEIGHT) > dense

    def time_alone(self, images: int = LANES) -> float:
        """Estimate the time of the sparse kernel between plain tensors, in the units of `layer_cost`."""
        return layer_cost.sparse_alone(self.shape, self.index.numel(), images)

    def dense_alone(self, images: int = LANES) -> bool:
        """Return whether torch's dense operation is faster between plain tensors, for a batch of `images`."""
        active, small = self.index.numel(), layer_cost.is_small(self.shape)
        without_zeros = active == self.shape.weight_numel
        return without_zeros or (not small and self.time_alone(images) > layer_cost.dense(self.shape))

    def _runs_dense(self, x: Tensor) -> bool:
        """Return whether torch's dense operation is faster for a plain input, which is checked for either kernel.

        The choice depends on shapes and the number of active weights only, so that a run that is stopped and resumed
        computes the same numbers.
        """
        if not library.available():
            return True
        traced = torch.compiler.is_compiling() or type(x) is not Tensor  # such as tensors whose sizes are symbols
        key = None if traced else (x.shape, x.dtype, x.is_cpu, x.layout, *self._kind_of_values())
        found = None if key is None else self._dense_for.get(key)
        if found is not None:
            return found  # such an input has been checked
        self._check(x)
        self.check_values()
        if key is None:
            # an exported program takes batches of any size
            return self.dense_alone() if torch.compiler.is_exporting() else self.dense_alone(x.shape[0])
        found = self.estimate_dense(x.shape)
        if x.dtype is torch.float32:  # others depend on autocast
            if len(self._dense_for) >= MOST_SHAPES:
                self._dense_for.clear()
            self._dense_for[key] = found
        return found

    def _kind_of_values(self) -> tuple[Hashable, ...]:
        """All of the values and indices that `check_values` looks at."""
        values = self.values  # looked up once: a parameter is not an attribute
        return values.shape, values.dtype, values.is_cpu, self.index.shape

    def estimate_dense(self, size: torch.Size) -> bool:
        """Estimate whether torch's dense operation is faster for a plain input of this size, with fixed costs."""
        vectors, active = self._vectors(size), self.values.numel()
        sparse = vectors * self.time_alone(size[0]) + layer_cost.sparse_call(active, self._on_tokens)
        return sparse > vectors * layer_cost.dense(self.shape) + layer_cost.dense_call(self.shape, active)

    def _vectors(self, size: torch.Size) -> float:
        """Number of positions of the output, of all images, for an input of this size."""
        return size[0] * math.prod(size[2:]) / math.prod(self.shape.stride)

    @property
    def pattern(self) -> Pattern:
        """The pattern of the current indices."""
        return pattern_of(self.shape, self.index)

    @torch.no_grad()
    def rewire(self, index: Tensor, values: Tensor) -> None:
        """Replace the active weights, in place.

        Args:
            index: Ascending flat indices of the new active weights.
            values: Their values.
        """
        if index.shape != values.shape or index.dim() != 1:
            raise UserError(
                f"index {tuple(index.shape)} and values {tuple(values.shape)} must be vectors of equal length"
            )
        check_index(index, math.prod(self.weight_shape))
        self.index = index.to(torch.int32).clone()
        set_data(self.values, values.detach().to(torch.float32).clone())
        self.values.grad = None

    def how(self) -> str:
        """Return how the layer runs in large batches: `sparse`, or `dense` with the reason.

        In a small batch a small layer runs dense at more densities, because fixed costs decide.
        """
        if not library.available():
            return f"dense: {library.reason()}"
        if self.dense_in_blocks if self.in_blocks else self.dense_alone():
            return "dense: the dense kernel is faster at this density"
        return "sparse"

    def forward(self, x: Tensor | Blocked, border: Border = NO_BORDER) -> Tensor | Blocked:
        if isinstance(x, Blocked):
            return self._run_dense(x, border) if self.dense_in_blocks else self._run_blocked(x, border)
        if self._runs_dense(x):
            return self.dense_forward(x)
        if torch.compiler.is_compiling() or type(x) is not Tensor:  # such as tensors without memory
            return self._run_plain(as_float32(x))
        return from_blocked(self._run_blocked(to_blocked(x, self.shape.padding), NO_BORDER))

    def _run_plain(self, x: Tensor) -> Tensor:
        self.check_values()
        images = x if self.dims == 4 else x.unsqueeze(2)
        out = conv(images, self.values, self.bias, self.index, self.shape, self._active_probe())
        return out if self.dims == 4 else out.squeeze(2)

    def _run_blocked(self, x: Blocked, border: Border) -> Blocked:
        if x.dims != self.dims:
            raise self._wrong_dims(x.plain_shape)
        self.check_values()
        return operators.conv(x, self.values, self.bias, self.pattern, border, self._active_probe())

    def _run_dense(self, x: Blocked, border: Border) -> Blocked:
        return to_blocked(self.dense_forward(from_blocked(x)), border, x.data.dtype)

    def dense_forward(self, x: Tensor) -> Tensor:
        """Compute the layer with the dense weight."""
        raise NotImplementedError

    def _check(self, x: Tensor) -> None:
        """Refuse a plain input that the sparse kernel would refuse, whichever kernel takes it."""
        if x.dim() != self.dims:
            raise self._wrong_dims(tuple(x.shape))
        self.shape.check_channels(x.shape[1])
        self.shape.output((x.shape[2] if self.dims == 4 else 1, x.shape[-1]))
        as_float32(x)

    def _wrong_dims(self, shape: tuple[int, ...]) -> UserError:
        return UserError(f"{type(self).__name__} takes a batch of {self.dims} dimensions, not {shape}")

    def check_values(self) -> None:
        """Refuse values that the kernels cannot read, such as those of a model after `.double()` or `.half()`."""
        values = self.values
        if values.dtype != torch.float32 or not values.is_cpu:
            raise UserError(
                f"packed weights are float32 on cpu, not {values.dtype} on {values.device}; "
                "convert the model with .float() and .cpu(), or use masked storage"
            )
        if values.shape != self.index.shape:
            raise UserError(f"{list(values.shape)} values do not fit {list(self.index.shape)} indices")

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        """Also save the shape of the weight, in the metadata: `index` does not tell it."""
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if hasattr(destination, "_metadata"):
            destination._metadata[prefix[:-1]]["weight_shape"] = self.weight_shape

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, local_metadata: dict[str, Any], *rest: Any
    ) -> None:
        """Also load checkpoints with another number of active weights.

        Raises:
            UserError: If the active weights are not those of a layer of this shape.
        """
        values, index = (state_dict.get(prefix + name) for name in ("values", "index"))
        try:
            self._check_saved(values, index, local_metadata.get("weight_shape", self.weight_shape))
        except UserError as error:
            raise UserError(f'"{prefix[:-1] or type(self).__name__}" cannot be loaded: {error}') from None
        if values is not None and index is not None:
            state_dict[prefix + "index"] = index.to(torch.int32)
            if index.shape != self.index.shape:
                self.index = torch.empty_like(index, dtype=torch.int32)
                set_data(self.values, torch.empty_like(values, dtype=torch.float32))
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *rest)

    def _check_saved(self, values: Any, index: Any, weight_shape: Sequence[int]) -> None:
        if tuple(weight_shape) != self.weight_shape:
            raise UserError(f"it was saved from a weight of {tuple(weight_shape)}; this one has {self.weight_shape}")
        if values is None and index is None:
            return  # torch says what is missing
        if not isinstance(values, Tensor) or not isinstance(index, Tensor):
            raise UserError('active weights are two tensors, "values" and "index"')
        if values.shape != index.shape or not values.is_floating_point():
            raise UserError(f"{list(values.shape)} values of {values.dtype} do not fit {list(index.shape)} indices")
        check_index(index, math.prod(self.weight_shape))

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "probe": None, "_kept": None, "_checked": None, "_dense_for": {}}

    def extra_repr(self) -> str:
        return f"{self.weight_shape}, density={self.density:.4g}, {self.how()}"


class PackedConv2d(PackedLayer):
    """Conv2d with any stride, zero padding, dilation and groups."""

    dims = 4

    @property
    def of_patches(self) -> ConvShape | None:
        return self.shape.of_patches()

    def forward(self, x: Tensor | Blocked, border: Border = NO_BORDER) -> Tensor | Blocked:
        shape = self.of_patches
        if isinstance(x, Blocked) or shape is None:
            return super().forward(x, border)
        return self.dense_forward(x) if self._runs_dense(x) else self._run_patches(as_float32(x), shape)

    def _run_patches(self, x: Tensor, shape: ConvShape) -> Tensor:
        """The layer on a plain tensor, as a linear layer on its patches: no layout but torch's is needed."""
        self.shape.check_channels(x.shape[1])
        (high, wide), (height, width) = self.shape.kernel, self.shape.output((x.shape[2], x.shape[3]))
        tiles = x[:, :, : height * high, : width * wide].unflatten(3, (width, wide)).unflatten(2, (height, high))
        patches = tiles.permute(0, 2, 4, 1, 3, 5).flatten(3)
        probe = self._active_probe()
        probe = None if probe is None else probe.flatten(1)
        sizes = shape.out_channels, shape.in_channels
        out = linear(patches, self.values, self.bias, self.index, sizes, probe).permute(0, 3, 1, 2)
        # as torch does, so that code after it may call `view`
        return out if x.is_contiguous(memory_format=torch.channels_last) else out.contiguous()

    def time_alone(self, images: int = LANES) -> float:
        shape = self.of_patches
        if shape is None:
            return super().time_alone(images)
        return layer_cost.sparse_on_tokens(shape, self.index.numel())

    def dense_forward(self, x: Tensor) -> Tensor:
        s = self.shape
        return F.conv2d(x, self.dense_weight(x), self.bias, s.stride, s.padding, s.dilation, s.groups)


class PackedConv1d(PackedLayer):
    """Conv1d, as a convolution of maps one row high."""

    dims = 3

    def dense_forward(self, x: Tensor) -> Tensor:
        s = self.shape
        return F.conv1d(x, self.dense_weight(), self.bias, s.stride[1:], s.padding[1:], s.dilation[1:], s.groups)


class PackedLinear(PackedLayer):
    """Linear. A plain input may have any leading dimensions and is read as it is, without the blocked layout."""

    dims = 2
    _on_tokens = True

    def forward(self, x: Tensor | Blocked, border: Border = NO_BORDER) -> Tensor | Blocked:
        if isinstance(x, Blocked):
            if x.dims == 2:
                return super().forward(x)
            return to_blocked(cast(Tensor, self.forward(from_blocked(x))), border, x.data.dtype)
        if self._runs_dense(x):
            return self.dense_forward(x)
        shape = self.shape.out_channels, self.shape.in_channels
        return linear(as_float32(x), self.values, self.bias, self.index, shape, self._active_probe())

    def _check(self, x: Tensor) -> None:
        if not x.dim():
            raise self._wrong_dims(())
        self.shape.check_channels(x.shape[-1])
        as_float32(x)

    def dense_forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.dense_weight(), self.bias)

    def time_alone(self, images: int = LANES) -> float:
        return layer_cost.sparse_on_tokens(self.shape, self.index.numel())

    def _vectors(self, size: torch.Size) -> float:
        return math.prod(size[:-1])


def weight_name(name: str, layer: PackedLayer) -> str:
    """Return the name that the weight of the packed layer `name` had before packing.

    It was `name.weight`, or `name_weight` if the layer is a projection of an attention.
    """
    return f"{name}{layer.weight_suffix}".removeprefix(".")


def named_layers(model: nn.Module) -> dict[str, PackedLayer]:
    """Return the packed layers of a model by the names of their weights before packing."""
    modules = model.named_modules()
    return {weight_name(name, layer): layer for name, layer in modules if isinstance(layer, PackedLayer)}


def set_data(parameter: Tensor, data: Tensor) -> None:
    """Replace the data of a parameter. The length may change, also while an old autograd graph is alive."""
    if data.shape != parameter.shape:
        # autograd remembers the length of a leaf until its type changes
        parameter.data = torch.empty(0, dtype=torch.float64)
    parameter.data = data


def is_packable(layer: nn.Module) -> bool:
    """Whether a layer is a Linear, Conv1d or Conv2d that the kernels and their fallback cover."""
    return no_kernel(layer) is None


def no_kernel(layer: nn.Module) -> str | None:
    """Return why the sparse kernels cannot compute a layer; `None` if they can."""
    name, kind = type(layer).__name__, next((kind for kind in KINDS if isinstance(layer, kind)), None)
    if kind is None:
        return f"no sparse kernel computes a {name}"
    methods = ("forward", "_conv_forward") if issubclass(kind, _ConvNd) else ("forward",)
    if any(getattr(type(layer), method) is not getattr(kind, method) for method in methods):
        return f"{name} overrides its forward"
    if isinstance(layer, nn.Conv1d | nn.Conv2d) and (layer.padding_mode != "zeros" or _padding(layer) is None):
        return "the sparse kernels need equal zero padding on both sides"
    return None


def _padding(layer: nn.Conv1d | nn.Conv2d) -> tuple[int, ...] | None:
    """Padding of each axis; `None` if "same" padding differs between the two sides of an axis."""
    if layer.padding == "valid":
        return (0,) * len(layer.kernel_size)
    if layer.padding == "same":  # torch allows this only with stride 1
        beyond = [d * (k - 1) for d, k in zip(layer.dilation, layer.kernel_size, strict=True)]
        return None if any(b % 2 for b in beyond) else tuple(b // 2 for b in beyond)
    return cast("tuple[int, ...]", layer.padding)


def packed(
    layer: nn.Module, mask: Tensor, final: int | None = None, memory: Tensor | None = None
) -> PackedLayer | None:
    """Return the packed form of a layer; `None` if it has none. Frozen parameters stay frozen.

    The packed layer keeps the attributes of the layer, such as `in_features` or `kernel_size`.

    Args:
        layer: The layer.
        mask: As in `PackedLayer`.
        final: As in `PackedLayer`.
        memory: As in `PackedLayer`.
    """
    if not is_packable(layer):
        return None
    new = _packed(cast("nn.Linear | nn.Conv2d", layer), mask, final, memory)
    for name in ATTRIBUTES:
        if hasattr(layer, name):
            setattr(new, name, getattr(layer, name))
    keep_frozen(new, layer)
    return new


def keep_frozen(new: PackedLayer, layer: nn.Module) -> None:
    """Freeze the parameters of a packed layer that are frozen in the original."""
    new.values.requires_grad_(cast(Tensor, layer.weight).requires_grad)
    if new.bias is not None:
        new.bias.requires_grad_(cast(Tensor, layer.bias).requires_grad)


def _packed(layer: nn.Linear | nn.Conv2d, mask: Tensor, final: int | None, memory: Tensor | None) -> PackedLayer:
    if isinstance(layer, nn.Linear):
        shape = ConvShape(layer.out_features, layer.in_features)
        return PackedLinear(shape, layer.weight, layer.bias, mask, final, memory)
    lead = (0, 0, 1) if isinstance(layer, nn.Conv1d) else ()
    kernel, stride, dilation = (_pair(v, lead[2:]) for v in (layer.kernel_size, layer.stride, layer.dilation))
    padding = _pair(cast(Sequence[int], _padding(layer)), lead[:1])
    shape = ConvShape(layer.out_channels, layer.in_channels, kernel, stride, padding, dilation, layer.groups)
    kind = PackedConv1d if isinstance(layer, nn.Conv1d) else PackedConv2d
    return kind(shape, layer.weight, layer.bias, mask, final, memory)


def _pair(value: Sequence[int], lead: Sequence[int]) -> tuple[int, int]:
    rows, columns = (*lead, *value)
    return rows, columns
