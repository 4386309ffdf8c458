"""Scores against numpy, and the three scores of a model."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from equipoise.topology.ema import EMA
from equipoise.training.evaluate import score, score_three_ways, three_ways


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.5), nn.Linear(6, 3))


def batches(sizes: tuple[int, ...] = (7, 7, 3), seed: int = 1) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [(torch.randn(n, 4, generator=generator), torch.randint(3, (n,), generator=generator)) for n in sizes]


def images() -> Iterator[Tensor]:
    return (x * 3 + 1 for x, _ in batches((8, 8), seed=2))


def oracle(net: nn.Module, data: list[tuple[Tensor, Tensor]]) -> tuple[float, float]:
    """Mean cross-entropy and accuracy over images, whatever their batches, in float64."""
    net = copy.deepcopy(net).double().eval()
    with torch.no_grad():
        logits = np.concatenate([net(x.double()).numpy() for x, _ in data])
    labels = np.concatenate([y.numpy() for _, y in data])
    shifted = logits - logits.max(1, keepdims=True)
    log_p = shifted - np.log(np.exp(shifted).sum(1, keepdims=True))
    return float(-log_p[np.arange(len(labels)), labels].mean()), float((logits.argmax(1) == labels).mean())


def test_a_score_is_the_mean_over_images_not_over_batches() -> None:
    net, data = model(), batches()
    found = score(net, data)
    loss, accuracy = oracle(net, data)
    assert found.images == 17
    assert found.loss == pytest.approx(loss, rel=1e-5)
    assert found.accuracy == pytest.approx(accuracy, abs=1e-12)


def test_a_score_leaves_no_trace() -> None:
    net = model()
    net[2].eval()
    before = copy.deepcopy(net.state_dict())
    random = torch.get_rng_state()
    first = score(net, batches())
    assert score(net, batches()) == first
    assert torch.equal(random, torch.get_rng_state())
    assert [m.training for m in net.modules()] == [True, True, True, False, True]
    assert all(torch.equal(before[name], value) for name, value in net.state_dict().items())
    assert all(p.grad is None for p in net.parameters())


def test_training_flags_come_back_after_an_error() -> None:
    net = model()
    with pytest.raises(IndexError):
        score(net, [(torch.randn(2, 4), torch.tensor([0, 7]))])
    assert all(m.training for m in net.modules())


def test_no_images_have_no_score_but_no_crash() -> None:
    assert score(model(), []).images == 0


def test_precision_is_the_callers() -> None:
    net = model()
    seen: list[Any] = []
    net[0].register_forward_hook(lambda _, __, output: seen.append(output.dtype))
    score(net, batches((4,)), lambda: torch.autocast("cpu", torch.bfloat16))
    assert seen == [torch.bfloat16]


def test_the_three_scores_are_of_the_model_with_other_statistics_and_other_weights() -> None:
    net = model()
    average = EMA(net, 0.5)
    with torch.no_grad():
        for p in net.parameters():
            p.add_(torch.randn_like(p))
    average.update()
    before = copy.deepcopy(net.state_dict())
    found = score_three_ways(net, batches, images, average)
    assert list(found) == ["plain", "bn_recalibrated", "ema"]

    def fresh(other: nn.Sequential) -> nn.Sequential:
        """BatchNorm statistics set by hand."""
        with torch.no_grad():
            hidden = [other[0](x) for x in images()]
            statistics = dict(other[1].named_buffers())
            statistics["running_mean"].copy_(torch.stack([h.mean(0) for h in hidden]).mean(0))
            statistics["running_var"].copy_(torch.stack([h.var(0) for h in hidden]).mean(0))
        return other

    averaged = copy.deepcopy(net)
    averaged.load_state_dict(average.values, strict=False)
    for name, other in (("plain", net), ("bn_recalibrated", fresh(copy.deepcopy(net))), ("ema", fresh(averaged))):
        loss, accuracy = oracle(other, batches())
        assert found[name].loss == pytest.approx(loss, rel=1e-5)
        assert found[name].accuracy == pytest.approx(accuracy)
    assert len({score.loss for score in found.values()}) == 3
    assert all(torch.equal(before[name], value) for name, value in net.state_dict().items())


def test_without_an_average_there_are_two_scores() -> None:
    assert list(score_three_ways(model(), batches, images)) == ["plain", "bn_recalibrated"]
    assert list(three_ways(model(), images)) == ["plain", "bn_recalibrated"]


def test_the_model_is_itself_again_as_soon_as_scoring_fails() -> None:
    net = model()
    average = EMA(net, 0.5)
    for value in average.values.values():
        value.zero_()
    before = copy.deepcopy(net.state_dict())
    calls = iter(range(3))

    def test() -> list[tuple[Tensor, Tensor]]:
        if next(calls) == 2:
            raise RuntimeError("the averaged one")
        return batches()

    try:
        score_three_ways(net, test, images, average)
    except RuntimeError:  # the traceback still holds the frames
        assert all(torch.equal(before[name], value) for name, value in net.state_dict().items())
    else:
        raise AssertionError("the error was lost")
