"""Threads and forked processes that use one packed or frozen model at the same time."""

from __future__ import annotations

import copy
import gc
import threading
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from equipoise.deploy.frozen import MOST_PROGRAMS, freeze, is_frozen
from equipoise.deploy.program import Program
from equipoise.kernels import library
from equipoise.kernels.huge_pages import Floats
from equipoise.kernels.steps import Buffers
from equipoise.topology.packing import pack
from fork_helpers import assert_forks_compute
from sparse_helpers import masks, packed_model

pytestmark = pytest.mark.skipif(not library.available(), reason=library.reason())


class Net(nn.Module):
    """Convolutions for images of any size."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(4, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(),
            nn.Conv2d(32, 32, 3, stride=2, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        )  # fmt: skip
        self.head = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x))


def sparse() -> nn.Module:
    torch.manual_seed(0)
    model = Net().eval()
    return pack(model, masks(model, 0.1)).eval()


def in_threads(work: Callable[[int], None], count: int) -> None:
    """Run `work` in threads, and raise the first of their errors."""
    errors: list[BaseException] = []

    def attempt(number: int) -> None:
        try:
            work(number)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=attempt, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


@pytest.mark.parametrize("named", [False, True], ids=["positional", "keyword"])
@pytest.mark.parametrize("frozen", [True, False], ids=["frozen", "packed"])
def test_threads_with_inputs_of_other_sizes_get_the_results_of_one_thread(frozen: bool, named: bool) -> None:
    model = freeze(sparse()) if frozen else sparse()
    assert is_frozen(model) is frozen
    inputs = [torch.randn(images, 4, size, size) for images, size in ((16, 12), (16, 24), (3, 16), (40, 9))]

    def run(x: Tensor) -> Tensor:
        with torch.no_grad():
            return model(x=x) if named else model(x)

    wanted = [run(x) for x in inputs]

    def work(number: int) -> None:
        for _ in range(15):
            assert torch.equal(run(inputs[number]), wanted[number])

    in_threads(work, len(inputs))


def test_threads_train_copies_of_one_model() -> None:
    """Idle buffers pass from one thread to another."""
    inputs = [torch.randn(16, 4, size, size) for size in (8, 12, 8)]
    start = packed_model(Net())
    models = [copy.deepcopy(start) for _ in inputs]

    def gradient(model: nn.Module, x: Tensor) -> Tensor:
        for _ in range(5):
            model(x).square().mean().backward()
        return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])

    wanted = [gradient(copy.deepcopy(start), x) for x in inputs]

    def work(number: int) -> None:
        assert torch.equal(gradient(models[number], inputs[number]), wanted[number])

    in_threads(work, len(inputs))


def test_calls_of_a_frozen_model_run_at_the_same_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second call enters the kernels before the first one has left them, on buffers of its own."""
    model, x = freeze(sparse()), torch.randn(3, 4, 8, 8)
    wanted, both, run = model(x), threading.Barrier(2, timeout=60), Buffers.compute

    def meet(buffers: Buffers, images: Floats, threads: int) -> Floats:
        both.wait()
        return run(buffers, images, threads)

    monkeypatch.setattr(Buffers, "compute", meet)

    def work(_: int) -> None:
        assert torch.equal(model(x), wanted)

    in_threads(work, 2)


@pytest.mark.parametrize("frozen", [True, False], ids=["frozen", "packed"])
def test_a_child_that_is_forked_while_a_thread_computes_does_not_hang(frozen: bool) -> None:
    model = freeze(sparse()) if frozen else sparse()
    assert_forks_compute(model, torch.randn(2, 4, 8, 8), torch.randn(64, 4, 32, 32), times=8)


def programs() -> int:
    gc.collect()
    return sum(type(found) is Program for found in gc.get_objects())


def test_a_frozen_model_keeps_few_programs() -> None:
    before, model, plain = programs(), freeze(sparse()), sparse()
    with torch.no_grad():
        for height in range(5, 5 + MOST_PROGRAMS + 9):
            model(torch.randn(1, 4, height, 6))
        x = torch.randn(1, 4, 5, 6)  # the program of this shape is gone
        torch.testing.assert_close(model(x), plain(x))
    assert programs() - before == MOST_PROGRAMS


def test_a_frozen_model_uses_the_weights_that_were_loaded_last() -> None:
    model, x = freeze(sparse()), torch.randn(3, 4, 8, 8)
    before = model(x)
    state = {name: tensor * 2 if name.endswith("bias") else tensor for name, tensor in model.state_dict().items()}
    model.load_state_dict(state)
    assert not torch.equal(model(x), before)
    torch.testing.assert_close(model(x), type(model).forward(model, x))  # layer by layer
