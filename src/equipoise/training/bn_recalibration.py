"""BatchNorm statistics estimated anew for the weights at hand."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from equipoise.errors import UserError


@contextmanager
def reestimated(
    model: nn.Module, batches: Iterable[Tensor], autocast: Callable[[], AbstractContextManager[None]] = nullcontext
) -> Iterator[None]:
    """Within it, running statistics are the plain mean over `batches` of images; afterwards they are as before.

    Running statistics trail the weights while the learning rate is high and cost several points of accuracy; a
    comparison in which only one arm has fresh ones measures this and nothing else. Only BatchNorm runs in training
    mode here, so no random number is drawn.
    """
    norms = [m for m in model.modules() if isinstance(m, _BatchNorm) and m.track_running_stats]
    saved = [{key: value.clone() for key, value in norm.named_buffers()} for norm in norms]
    momenta = [norm.momentum for norm in norms]
    flags = {module: module.training for module in model.modules()}
    try:
        if norms:
            with torch.no_grad(), autocast():
                _estimate(model, norms, batches)
        model.eval()
        yield
    finally:
        for norm, buffers, momentum in zip(norms, saved, momenta, strict=True):
            norm.momentum = momentum
            for key, value in norm.named_buffers():
                value.copy_(buffers[key])
        for module, flag in flags.items():
            module.training = flag


def _estimate(model: nn.Module, norms: list[_BatchNorm], batches: Iterable[Tensor]) -> None:
    model.eval()
    for norm in norms:
        norm.reset_running_stats()
        norm.training = True
    seen = 0
    for number, x in enumerate(batches, 1):
        for norm in norms:
            norm.momentum = 1 / number  # a cumulative mean; momentum None is one too, but waits for the device
        model(x)
        seen += len(x)
    if seen == 0:
        raise UserError("BatchNorm statistics cannot be estimated from no batch")
