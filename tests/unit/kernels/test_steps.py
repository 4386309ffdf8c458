"""Steps of inference programs against float64 operations of torch."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from equipoise.errors import UserError
from equipoise.kernels.blocks import find
from equipoise.kernels.geometry import ConvShape
from equipoise.kernels.planes import Planes
from equipoise.kernels.steps import FEW, KernelSteps, checked_index, plan

# in channels, out channels, kernel, stride, padding, dilation, groups, height, width
CONVS = [
    (3, 5, (3, 3), (1, 1), (1, 1), (1, 1), 1, 7, 9),
    (4, 6, (1, 1), (1, 1), (1, 1), (1, 1), 2, 5, 5),
    (2, 3, (3, 3), (1, 1), (0, 0), (1, 1), 1, 3, 3),
    (2, 3, (3, 2), (2, 1), (1, 0), (1, 1), 1, 6, 7),
    (4, 4, (3, 3), (2, 3), (2, 1), (2, 1), 4, 11, 13),
    (3, 2, (5, 5), (1, 1), (2, 2), (1, 1), 1, 2, 2),
    (2, 33, (3, 3), (1, 1), (1, 1), (1, 1), 1, 1, 40),
    (40, 5, (3, 3), (1, 1), (1, 1), (1, 1), 1, 33, 32),  # several blocks of source channels
    (40, 7, (1, 1), (1, 1), (0, 0), (1, 1), 1, 1, 1),
    (200, 3, (3, 3), (1, 1), (1, 1), (1, 1), 1, 4, 4),
]
# images, lanes, bf16
BATCHES = [
    (1, 1, False),
    (3, 1, False),
    (7, 1, False),
    (17, 16, False),
    (1, 16, True),
    (17, 16, True),
    (65, 16, True),
]


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(math.prod(shape)))


def run(steps: KernelSteps, x: Planes, y: Planes, images: Tensor) -> Tensor:
    return torch.from_numpy(steps.buffers(x, y).compute(images.numpy(), 2)).double()


def steps_for(images: int, lanes: int, half: bool) -> KernelSteps:
    return KernelSteps(-(-images // (lanes << half)), lanes, half)


def assert_close(found: Tensor, wanted: Tensor, half: bool) -> None:
    tolerance = 2e-2 if half else 1e-5  # a bf16 number has 8 bits
    assert found.shape == wanted.shape
    assert torch.allclose(found, wanted, tolerance, tolerance * float(wanted.abs().max()))


def rounded(x: Tensor, half: bool) -> Tensor:
    return (x.bfloat16() if half else x).double()


@pytest.mark.parametrize("batch", BATCHES, ids=str)
@pytest.mark.parametrize("conv", CONVS, ids=str)
@pytest.mark.parametrize("border", [(0, 0), (2, 3)])
def test_a_convolution_and_one_that_reads_its_border(
    conv: tuple[int, int, tuple[int, int], tuple[int, int], tuple[int, int], tuple[int, int], int, int, int],
    batch: tuple[int, int, bool],
    border: tuple[int, int],
) -> None:
    inputs, outputs, kernel, stride, padding, dilation, groups, height, width = conv
    (images, lanes, half), given = batch, random(batch[0], inputs, height, width)
    weight, bias = random(outputs, inputs // groups, *kernel), random(outputs)
    weight[random(*weight.shape) < 0.3] = 0
    after = random(4, outputs, 3, 3)
    shape = ConvShape(outputs, inputs, kernel, stride, padding, dilation, groups)
    steps = steps_for(images, lanes, half)
    x = steps.buffer((inputs, height, width), padding)
    index = weight.flatten().nonzero().flatten().numpy()
    y = steps.conv(x, shape, index, weight.flatten().numpy()[index], bias.numpy(), relu=True, border=border)
    end, fits = y, min(y.size[1] + 2 * border[0], y.size[2] + 2 * border[1]) > 2
    if fits:
        again = ConvShape(4, outputs, (3, 3), padding=border)
        end = steps.conv(y, again, np.arange(after.numel()), after.flatten().numpy())
    wanted = F.conv2d(rounded(given, half), weight.double(), bias.double(), stride, padding, dilation, groups).relu()
    if fits:
        wanted = F.conv2d(wanted, after.double(), None, 1, border)
    assert_close(run(steps, x, end, given), wanted, half)


@pytest.mark.parametrize("batch", BATCHES, ids=str)
@pytest.mark.parametrize("size", [(3, 3), (5, 9), (16, 16)])
@pytest.mark.parametrize("stride", [1, 2])
def test_a_convolution_of_blocks(batch: tuple[int, int, bool], size: tuple[int, int], stride: int) -> None:
    images, lanes, half = batch
    given, weight, bias = random(images, 5, *size), random(32, 5, 3, 3), random(32)
    weight.view(2, 16, 45)[(random(2, 45) < 0.7)[:, None].expand(2, 16, 45)] = 0
    shape = ConvShape(32, 5, (3, 3), (stride, stride), (1, 1))
    index = weight.flatten().nonzero().flatten().numpy()
    assert find(shape, checked_index(shape, index)) is not None  # the kernel of blocks is used
    steps = steps_for(images, lanes, half)
    x = steps.buffer((5, *size), (1, 1))
    y = steps.conv(x, shape, index, weight.flatten().numpy()[index], bias.numpy(), relu=True, border=(1, 2))
    wanted = F.conv2d(rounded(given, half), weight.double(), bias.double(), stride, 1).relu()
    assert_close(run(steps, x, y, given), wanted, half)


@pytest.mark.parametrize("batch", BATCHES, ids=str)
@pytest.mark.parametrize("size", [(2, 2), (5, 3), (7, 18), (16, 16), (33, 35)])
@pytest.mark.parametrize("pool", [False, True])
def test_scale_shift_residual_relu_and_pool(batch: tuple[int, int, bool], size: tuple[int, int], pool: bool) -> None:
    images, lanes, half = batch
    given, scale, shift = random(images, 3, *size), random(3), random(3)
    steps = steps_for(images, lanes, half)
    x = steps.buffer((3, *size), (1, 2))
    residual = None if pool else x
    y = steps.plane(x, scale.numpy(), shift.numpy(), residual, relu=True, pool=pool, border=(1, 1))
    z = rounded(given, half) * scale.double()[:, None, None] + shift.double()[:, None, None]
    wanted = F.max_pool2d(z, 2) if pool else z + rounded(given, half)
    assert_close(run(steps, x, y, given), wanted.relu(), half)


@pytest.mark.parametrize("batch", BATCHES, ids=str)
@pytest.mark.parametrize("mean", [False, True])
def test_windows_and_flattening(batch: tuple[int, int, bool], mean: bool) -> None:
    images, lanes, half = batch
    given = random(images, 3, 7, 9)
    steps = steps_for(images, lanes, half)
    x = steps.buffer((3, 7, 9))
    y = steps.flatten(steps.pool(x, (4, 5), (3, 3), (2, 2), (1, 1), mean=mean, count_padding=True))
    wanted = (F.avg_pool2d if mean else F.max_pool2d)(rounded(given, half), 3, 2, 1).flatten(1)[..., None, None]
    assert_close(run(steps, x, y, given), wanted, half)


@pytest.mark.parametrize("batch", BATCHES, ids=str)
@pytest.mark.parametrize("size", [(1, 1), (3, 3), (4, 17)])
def test_blocks_of_sixteen_outputs(batch: tuple[int, int, bool], size: tuple[int, int]) -> None:
    images, lanes, half = batch
    given, weight = random(images, 5, *size), random(32, 5, 3, 3)
    weight *= (random(2, 1, 5, 3, 3) > 0).repeat(1, 16, 1, 1, 1).view(32, 5, 3, 3)
    steps = steps_for(images, lanes, half)
    x = steps.buffer((5, *size), (1, 1))
    index = weight.flatten().nonzero().flatten().numpy()
    shape = ConvShape(32, 5, (3, 3), padding=(1, 1))
    y = steps.conv(x, shape, index, weight.flatten().numpy()[index], border=(1, 1))
    assert_close(run(steps, x, y, given), F.conv2d(rounded(given, half), weight.double(), padding=1), half)


def test_infinities_and_nan_of_an_image_stay_in_it() -> None:
    given = random(40, 2, 4, 4)
    given[3, 0, 1, 1], given[4, 1, 2, 2] = math.nan, math.inf
    weight = random(2, 2, 3, 3)
    steps = KernelSteps(2, 16, True)
    x = steps.buffer((2, 4, 4), (1, 1))
    shape = ConvShape(2, 2, (3, 3), padding=(1, 1))
    y = steps.plane(steps.conv(x, shape, np.arange(36), weight.flatten().numpy()), relu=True)
    found = run(steps, x, y, given)
    wanted = F.conv2d(rounded(given, True), weight.double(), padding=1).relu()
    assert (found.isnan() == wanted.isnan()).all()
    clean = [i for i in range(40) if i not in (3, 4)]
    assert_close(found[clean], wanted[clean], True)


def test_more_images_than_fit_are_refused() -> None:
    steps = KernelSteps(1, 16, True)
    x = steps.buffer((1, 2, 2))
    buffers = steps.buffers(x, steps.plane(x))
    assert len(buffers.compute(np.zeros((32, 1, 2, 2), np.float32), 1)) == 32
    with pytest.raises(UserError, match="do not fit"):
        buffers.compute(np.zeros((33, 1, 2, 2), np.float32), 1)


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("images", [*range(20), 33, 64, 128, 129, 300])
def test_a_plan_has_room_for_its_images(images: int, half: bool) -> None:
    batch = plan(images, (3, 32, 32), half)
    assert (batch.lanes == 1) == (images < FEW)
    assert batch.half == (half and images > 16)
    for part in range(1, min(images, batch.together) + 1):
        room = (batch.lanes << batch.half) * batch.blocks(part)
        assert part <= room < max(2 * part, 2 * batch.lanes << batch.half)
