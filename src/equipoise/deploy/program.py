"""A packed network as one list of kernel steps for inference: BatchNorm folded, buffers fixed, one call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.fx import Node

from equipoise.errors import UserError
from equipoise.kernels import library as kernels
from equipoise.kernels import operators as functional
from equipoise.kernels.arena import NO_BORDER, Border
from equipoise.kernels.huge_pages import Slab
from equipoise.kernels.library import Step
from equipoise.kernels.taps import ConvShape, Taps
from equipoise.storage.packed_modules import BlockedBatchNorm, PackedLayer

CONV, PLANE, MEAN, COPY = range(4)
COLUMNS = 8  # in a vector of the kernel that runs along planes


class Program:
    """Steps for a fixed input shape; `lanes` is 16 (images side by side) or 1 (one image, plane by plane)."""

    def __init__(self, nodes: list[Node], model: nn.Module, shape: tuple[int, ...], blocks: int, lanes: int) -> None:
        self.model, self.lanes, self.blocks = model, lanes, blocks
        self.steps: list[Step] = []
        self._keep: list[Any] = []  # whatever the steps point to
        self._slab = Slab()
        self._values: dict[Node, Tensor] = {}
        self._folded: set[Node] = set()
        channels, height, width = {3: shape, 2: (shape[0], 1, shape[-1]), 1: (shape[0], 1, 1)}[len(shape)]
        self.input = self._buffer((channels, height, width), _border(nodes[0]))
        self._values[nodes[0]] = self.input
        for node in nodes[1:]:
            self._add(node)
        self.output, self.dims = self._values[nodes[-1]], flow(nodes, len(shape) + 1)[nodes[-1]]
        self._packed_steps = (Step * len(self.steps))(*self.steps)

    def run(self) -> None:
        """From `input` to `output`."""
        kernels.library().eq_program(self._packed_steps, len(self.steps), kernels.threads())

    def _buffer(self, shape: tuple[int, int, int], border: Border = NO_BORDER) -> Tensor:
        """(blocks, channels, height, width, lanes) inside zeros, rows long enough for whole vectors."""
        (channels, height, width), (rows, columns) = shape, border
        pitch = width + 2 * columns
        if self.lanes == 1:
            pitch = max(pitch, -(-width // COLUMNS) * COLUMNS + columns)
        plane = (height + 2 * rows) * pitch
        memory = self._slab.take((self.blocks * channels * plane + 2 * pitch) * self.lanes + 64)
        steps = tuple(self.lanes * step for step in (channels * plane, plane, pitch, 1))
        start = memory.storage_offset() + self.lanes * (rows * pitch + columns)
        view = memory.as_strided((self.blocks, *shape, self.lanes), (*steps, 1), start)
        view.border = border  # type: ignore[attr-defined]
        return view

    def _step(self, kind: int, x: Tensor, y: Tensor, **fields: Any) -> None:
        tensors = {name: value for name, value in fields.items() if isinstance(value, Tensor)}
        self._keep += [x, y, *tensors.values()]
        residual = tensors.pop("residual", None)
        plain = {name: value for name, value in fields.items() if not isinstance(value, Tensor) and value is not None}
        step = Step(x=kernels.describe(x), y=kernels.describe(y), kind=kind, lanes=self.lanes, **plain)
        if residual is not None:
            step.residual = kernels.describe(residual)
        for name, tensor in tensors.items():
            setattr(step, name, tensor.data_ptr())
        self.steps.append(step)

    def _add(self, node: Node) -> None:
        if node in self._folded:
            return
        module = self.model.get_submodule(str(node.target)) if node.op == "call_module" else None
        if isinstance(module, PackedLayer):
            self._add_layer(node, module)
        elif isinstance(module, BlockedBatchNorm):
            module.check_channels(self._source(node).shape[1])
            scale, shift = affine(module)
            self._add_plane(node, self._source(node), dict(node.kwargs), scale, shift)
        else:
            handlers: dict[Any, Callable[[Node], None]] = {
                functional.avg_pool: self._add_mean,
                functional.flatten: self._add_flatten,
            }
            handlers.get(node.target, self._add_pointwise)(node)

    def _source(self, node: Node) -> Tensor:
        return self._values[cast(Node, node.args[0])]

    def _add_pointwise(self, node: Node) -> None:
        done = dict(node.kwargs)
        if node.target is functional.relu:
            done["relu"] = True
        elif node.target is functional.max_pool:
            done["pool"] = True
        elif node.target is functional.add:
            done["residual"] = node.args[1]
        self._add_plane(node, self._source(node), done)

    def _add_plane(
        self, node: Node, x: Tensor, done: dict[str, Any], scale: Tensor | None = None, shift: Tensor | None = None
    ) -> None:
        _, channels, height, width, _ = x.shape
        pool = done.get("pool", False)
        if pool:
            functional.check_pool(4, (height, width), (2, 2))
        size = (height // 2, width // 2) if pool else (height, width)
        y = self._buffer((channels, *size), done.get("border", NO_BORDER))
        residual = self._values[done["residual"]] if "residual" in done else None
        if residual is not None and residual.shape != x.shape:
            raise UserError(
                f"a residual must have the shape of what it is added to, {_map(x)} per image, not {_map(residual)}"
            )
        relu = done.get("relu", False)
        self._step(PLANE, x, y, scale=scale, shift=shift, residual=residual, relu=relu, pool=pool)
        self._values[node] = y

    def _add_mean(self, node: Node) -> None:
        x = self._source(node)
        _, channels, height, width, _ = x.shape
        high, wide = cast("tuple[int, int]", node.kwargs.get("kernel") or (height, width))
        functional.check_pool(4, (height, width), (max(1, high), max(1, wide)))  # a map may be empty
        rows, columns = height // high, width // wide
        y = self._buffer((channels, rows, columns))
        self._step(MEAN, x[:, :, : rows * high, : columns * wide], y)
        self._values[node] = y

    def _add_flatten(self, node: Node) -> None:
        x = self._source(node)
        _, channels, height, width, lanes = x.shape
        y = self._buffer((channels * height * width, 1, 1)) if lanes > 1 else self._vector(channels * height * width)
        steps = tuple(lanes * step for step in (channels * height * width, height * width, width, 1))
        self._step(COPY, x, y.as_strided(x.shape, (*steps, 1), y.storage_offset()))
        self._values[node] = y

    def _vector(self, count: int) -> Tensor:
        """`count` channels side by side: planes of one value need no room for whole vectors."""
        memory = self._slab.take(self.blocks * count + 64)
        return memory.as_strided((self.blocks, count, 1, 1, 1), (count, 1, 1, 1, 1))

    def _add_layer(self, node: Node, layer: PackedLayer) -> None:
        """A convolution with what follows it folded in: BatchNorm, then ReLU where nothing stands between."""
        values, bias = layer.values.detach(), None if layer.bias is None else layer.bias.detach()
        x, last = self._source(node), node
        done: dict[str, Any] = dict(node.kwargs)
        norm = self._following(node, BlockedBatchNorm)
        if norm is not None:
            module = cast(BlockedBatchNorm, self.model.get_submodule(str(norm.target)))
            module.check_channels(layer.shape.out_channels)
            scale, shift = affine(module)
            values = values * scale.repeat_interleave(_row_counts(layer))
            bias = shift if bias is None else bias * scale + shift
            last, done = norm, dict(norm.kwargs)
        elif (user := self._following(node, functional.relu)) is not None:
            last, done = user, {"relu": True, **user.kwargs}
        alone = not {"pool", "residual"} & done.keys()
        y = self._convolve(layer, values, bias, x, done.get("border", NO_BORDER) if alone else NO_BORDER,
                           relu=bool(done.get("relu")) and alone)  # fmt: skip
        if alone:
            self._values[last] = y
        else:
            self._add_plane(last, y, done)
        self._folded.add(last)

    def _following(self, node: Node, what: Any) -> Node | None:
        user = next(iter(node.users)) if len(node.users) == 1 else None
        if user is None:
            return None
        if user.op == "call_module":
            fits = isinstance(what, type) and isinstance(self.model.get_submodule(str(user.target)), what)
            fits = fits and user.args[0] is node and user.kwargs.get("residual") in self._known()
        else:
            fits = user.target is what
        return user if fits else None

    def _known(self) -> set[Node | None]:
        """Values that exist already: a residual that comes later keeps its norm from being folded early."""
        return {None, *self._values}

    def _convolve(
        self, layer: PackedLayer, values: Tensor, bias: Tensor | None, x: Tensor, border: Border, relu: bool
    ) -> Tensor:
        shape = layer.shape
        shape.check_channels(x.shape[1])
        layer.check_values()
        x = self._bordered(x, shape.padding)
        size = shape.output((x.shape[2], x.shape[3]))
        y = self._buffer((shape.out_channels, *size), border)
        taps = Taps(shape, layer.index, transposed=False, one_block=self.lanes == 1)
        if self.lanes == 1 and shape.stride != (1, 1):
            x, offsets = self._phases(x, shape, size)
        else:
            offsets = _kernel_offsets(shape, x.stride(2), x.stride(3))
        taps.set_offsets(x.stride(1), offsets)
        taps.set_weights(values.contiguous())
        self._keep.append(taps)
        strided = x if self.lanes == 1 else _every(x, shape.stride)
        self._step(CONV, strided, y, taps=taps.taps, start=taps.start, blocks=taps.blocks, reach=taps.reach,
                   shift=bias, relu=relu)  # fmt: skip
        return y

    def _bordered(self, x: Tensor, border: Border) -> Tensor:
        have: Border = getattr(x, "border", NO_BORDER)
        if have[0] >= border[0] and have[1] >= border[1]:
            return x
        y = self._buffer((x.shape[1], x.shape[2], x.shape[3]), border)
        self._step(COPY, x, y)
        return y

    def _phases(self, x: Tensor, shape: ConvShape, size: tuple[int, int]) -> tuple[Tensor, Tensor]:
        """A strided convolution is one with stride 1 over the rows and columns of each remainder."""
        (sh, sw), (ph, pw), (dh, dw), (kh, kw) = shape.stride, shape.padding, shape.dilation, shape.kernel
        rows, columns = size[0] + dh * (kh - 1) // sh, size[1] + dw * (kw - 1) // sw
        split = self._buffer((sh * sw * x.shape[1], rows, columns))
        padded = (x.shape[2] + 2 * ph, x.shape[3] + 2 * pw)
        origin = x.storage_offset() - ph * x.stride(2) - pw
        for phase in range(sh * sw):
            i, j = divmod(phase, sw)
            count = (min(rows, -(-(padded[0] - i) // sh)), min(columns, -(-(padded[1] - j) // sw)))
            if min(count) < 1:
                continue
            steps = (x.stride(0), x.stride(1), sh * x.stride(2), sw, 1)
            source = x.as_strided((self.blocks, x.shape[1], *count, 1), steps, origin + i * x.stride(2) + j)
            target = split[:, phase * x.shape[1] : (phase + 1) * x.shape[1], : count[0], : count[1]]
            self._step(COPY, source, target)
        reach_h, reach_w = torch.arange(kh)[:, None] * dh, torch.arange(kw) * dw
        phase_step = x.shape[1] * split.stride(1)
        offsets = (reach_h % sh * sw + reach_w % sw) * phase_step + reach_h // sh * split.stride(2) + reach_w // sw
        return split, offsets.flatten()


def flow(nodes: list[Node], dims: int) -> dict[Node, int]:
    """How many dimensions each value of a blocked stretch has, for an input of `dims`."""
    found = {nodes[0]: dims}
    for node in nodes[1:]:
        found[node] = 2 if node.target is functional.flatten else found[cast(Node, node.args[0])]
    return found


def runs(nodes: list[Node], model: nn.Module, dims: int) -> bool:
    """Whether a program computes what the layers do with an input of `dims`: none of them folds or refuses it."""
    found = flow(nodes, dims)
    for node in nodes[1:]:
        layer = model.get_submodule(str(node.target)) if node.op == "call_module" else None
        have = found[cast(Node, node.args[0])]
        if isinstance(layer, PackedLayer) and layer.dims != have:
            return False
        if have != 4 and (node.target in (functional.max_pool, functional.avg_pool) or node.kwargs.get("pool")):
            return False
    return True


def _map(x: Tensor) -> tuple[int, ...]:
    return tuple(x.shape[1:4])


def affine(norm: nn.Module) -> tuple[Tensor, Tensor]:
    """Scale and shift of a BatchNorm in eval mode."""
    assert isinstance(norm, BlockedBatchNorm)
    assert norm.running_mean is not None
    assert norm.running_var is not None
    scale = (norm.running_var + norm.eps).rsqrt()
    if norm.weight is not None:
        scale = scale * norm.weight.detach()
    shift = -norm.running_mean * scale
    return scale, shift if norm.bias is None else shift + norm.bias.detach()


def _row_counts(layer: PackedLayer) -> Tensor:
    """Active weights of each output channel."""
    per_row = torch.div(
        layer.index, max(1, layer.shape.weight_numel // layer.shape.out_channels), rounding_mode="floor"
    )
    return torch.bincount(per_row.long(), minlength=layer.shape.out_channels)


def _kernel_offsets(shape: ConvShape, row_step: int, column_step: int) -> Tensor:
    rows, columns = (
        torch.arange(k) * d - p for k, d, p in zip(shape.kernel, shape.dilation, shape.padding, strict=True)
    )
    return (rows[:, None] * row_step + columns * column_step).flatten()


def _every(x: Tensor, stride: tuple[int, int]) -> Tensor:
    """`x` with steps from one output position to the next."""
    return x[:, :, :: stride[0], :: stride[1]]


def _border(node: Node) -> Border:
    return node.kwargs.get("border", NO_BORDER)  # type: ignore[return-value]
