"""Recomputed BatchNorm statistics against plain means over batches."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from equipoise.errors import UserError
from equipoise.training.bn_recalibration import bn_recalibrated


def model() -> nn.Sequential:
    torch.manual_seed(0)
    net = nn.Sequential(
        *(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3, momentum=0.3), nn.ReLU(), nn.Dropout(0.5)),
        *(nn.Flatten(), nn.Linear(3 * 4 * 4, 5), nn.BatchNorm1d(5, affine=False), nn.LayerNorm(5)),
    )
    net(torch.randn(8, 2, 6, 6))  # statistics of its own
    return net


def batches(count: int = 4) -> list[Tensor]:
    """Of different sizes: each counts as one."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(5 + i, 2, 6, 6, generator=generator) for i in range(count)]


def statistics(activations: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """The mean over batches of each batch's mean and unbiased variance per channel, in float64."""
    flat = [np.moveaxis(a.astype(np.float64), 1, 0).reshape(a.shape[1], -1) for a in activations]
    return np.mean([a.mean(1) for a in flat], 0), np.mean([a.var(1, ddof=1) for a in flat], 0)


def test_statistics_are_the_plain_means_over_batches() -> None:
    net = model()
    convolved = [net[0](x).detach() for x in batches()]
    with bn_recalibrated(net, batches()):
        first, second = net[1], net[6]
        assert isinstance(first, nn.BatchNorm2d)
        assert isinstance(second, nn.BatchNorm1d)
        assert first.running_mean is not None
        assert first.running_var is not None
        assert second.running_mean is not None
        assert second.running_var is not None
        mean, variance = statistics([a.numpy() for a in convolved])
        np.testing.assert_allclose(first.running_mean.numpy(), mean, atol=1e-6)
        np.testing.assert_allclose(first.running_var.numpy(), variance, rtol=1e-5)
        # the second norm sees what the first gives when it normalises by the batch, without dropout
        normed = [
            (a - a.mean((0, 2, 3), keepdim=True)) / (a.var((0, 2, 3), keepdim=True, correction=0) + 1e-5).sqrt()
            for a in convolved
        ]
        weight, bias = first.weight[:, None, None], first.bias[:, None, None]
        hidden = [net[5]((a * weight + bias).relu().flatten(1)).detach().numpy() for a in normed]
        mean, variance = statistics(hidden)
        np.testing.assert_allclose(second.running_mean.numpy(), mean, atol=1e-5)
        np.testing.assert_allclose(second.running_var.numpy(), variance, rtol=1e-4)


def test_everything_is_as_before_afterwards() -> None:
    net = model()
    net[3].eval()  # a module that its owner has frozen
    before = copy.deepcopy(net.state_dict())
    flags = [module.training for module in net.modules()]
    random = torch.get_rng_state()
    with bn_recalibrated(net, batches()):
        assert not any(module.training for module in net.modules())
        assert not torch.equal(net.state_dict()["1.running_mean"], before["1.running_mean"])
        net(torch.randn(3, 2, 6, 6, generator=torch.Generator().manual_seed(0)))
    assert torch.equal(random, torch.get_rng_state())
    assert [module.training for module in net.modules()] == flags
    after = net.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert net[1].momentum == 0.3
    assert all(p.grad is None for p in net.parameters())


@pytest.mark.parametrize("where", ["while estimating", "inside"])
def test_everything_comes_back_after_an_error(where: str) -> None:
    def broken() -> Iterator[Tensor]:
        yield batches()[0]
        if where == "while estimating":
            raise RuntimeError

    net = model()
    before = copy.deepcopy(net.state_dict())
    with pytest.raises(RuntimeError), bn_recalibrated(net, broken()):
        raise RuntimeError
    assert all(module.training for module in net.modules())
    assert all(torch.equal(before[name], value) for name, value in net.state_dict().items())
    assert net[1].momentum == 0.3


def test_norms_that_keep_no_statistics_are_left_alone() -> None:
    net = nn.Sequential(nn.BatchNorm1d(3, track_running_stats=False), nn.LayerNorm(3))

    def never() -> Iterator[Tensor]:
        raise AssertionError("no batch is needed")
        yield

    with bn_recalibrated(net, never()):
        assert not net.training


def test_no_batch_is_an_error_and_not_statistics_of_nothing() -> None:
    with pytest.raises(UserError, match="without images"), bn_recalibrated(model(), []):
        pass


def test_statistics_are_estimated_in_the_precision_that_is_scored() -> None:
    seen = []
    net = model()
    net[0].register_forward_hook(lambda _, __, output: seen.append(output.dtype))
    with bn_recalibrated(net, batches(1), lambda: torch.autocast("cpu", torch.bfloat16)):
        pass
    assert seen == [torch.bfloat16]
