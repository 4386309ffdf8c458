"""Batches of a dataset that is held on the device, with reproducible epochs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from equipoise.checks import require_whole
from equipoise.data.augment import Augment, Moves, move
from equipoise.data.dataset import Images
from equipoise.data.epoch_order import EpochPlan, Order
from equipoise.errors import UserError

KEPT_EPOCHS = 2  # the current epoch, and one that is replayed or looked ahead to
Assemble = Callable[..., tuple[Tensor, Tensor]]


@dataclass(frozen=True, eq=False)
class Epoch:
    """The random choices of one epoch, on the device; row n of `moves` is for the n-th image of the plan."""

    plan: EpochPlan
    images: Tensor
    moves: Moves | None

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self.images, *(self.moves or ())


def assemble(
    images: Tensor, labels: Tensor, order: Tensor, moves: Moves | None, start: Tensor, size: int, reflect: bool
) -> tuple[Tensor, Tensor]:
    """Build one batch. The function is pure and does not synchronise with the host, so it can be compiled.

    Args:
        images: All images, uint8 [N, C, H, W].
        labels: All labels, int64 [N].
        order: Indices of the epoch's images in the order of use.
        moves: Augmentation of the images of `order`, row by row; `None` for no augmentation.
        start: Index into `order` of the first image of the batch, a 0-dim int64 tensor.
        size: Number of images in the batch.
        reflect: Fill of the moved images, as in `move`.

    Returns:
        x, float32 in [0, 1], in channels_last memory format on a CUDA device; and y, int64.
    """
    rows = start + torch.arange(size, device=order.device)
    chosen = order.index_select(0, rows)
    x = images.index_select(0, chosen)
    if moves is not None:
        x = move(x, Moves(*(each.index_select(0, rows) for each in moves)), reflect=reflect)
    layout = torch.channels_last if images.is_cuda else torch.contiguous_format
    return unit(x).contiguous(memory_format=layout), labels.index_select(0, chosen)


class Loader:
    """Batches `(x, y)` of a dataset in memory; x is float32 in [0, 1] and not normalised, y is int64.

    An epoch has the same batches with the same augmentation each time it is requested, on any device, in any
    order and after any restart: its random choices are a function of (seed, purpose, epoch). The data position
    of a run is therefore the pair (epoch, batch). The images stay on the device as uint8 and are augmented
    there; building a batch needs no copy from the host and no synchronisation.

    `epoch` and `batch` return batches. `place` and `assemble` do the same in two steps, for work that is
    recorded once as a CUDA graph: `place` writes the position to tensors at fixed addresses, and `assemble`
    reads only those.

    Args:
        images: The dataset.
        batch: Batch size, summed over the processes.
        seed: Seed of the order and of the augmentation.
        augment: Augmentation; `None` for none.
        shuffle: Whether to permute the images in every epoch.
        drop_last: Whether to leave out a last batch that is not full.
        device: Device of the images and the batches.
        fixed_batches: Draw the members of each batch once and permute only the batches, as estimators with one
            memory per batch (SAGA) require.
        rank: Index of this process.
        ranks: Number of processes. Each gets every `ranks`-th image of every batch; the augmentation of an image
            does not depend on the number of processes.
    """

    def __init__(
        self,
        images: Images,
        batch: int = 128,
        seed: int = 0,
        augment: Augment | None = None,
        shuffle: bool = True,
        drop_last: bool = False,
        device: str | torch.device = "cpu",
        fixed_batches: bool = False,
        rank: int = 0,
        ranks: int = 1,
    ) -> None:
        self.order = Order(len(images), batch, seed, shuffle, drop_last, fixed_batches, rank, ranks)
        self.images = images.to(device)
        self.augment = augment
        if augment is not None:
            augment.check_size(*self.image_shape[1:])
        self._epochs: dict[int, Epoch] = {}
        self._placed_epoch = -1
        self._placed: list[Tensor] = []  # the tensors of that epoch
        self._start = torch.zeros((), dtype=torch.int64, device=device)

    def __len__(self) -> int:
        """Number of batches per epoch."""
        return len(self.order)

    @property
    def image_shape(self) -> torch.Size:
        """Channels, height and width of an image."""
        return self.images.images.shape[1:]

    def epoch(self, epoch: int, start: int = 0, raw: bool = False) -> Iterator[tuple[Tensor, Tensor]]:
        """The batches of an epoch, beginning with batch `start`; `raw` leaves out the augmentation."""
        self.order.check(start, extra=1)
        drawn = self.drawn(epoch)
        return (self._batch(drawn, i, raw) for i in range(start, len(self)))

    def batch(self, epoch: int, i: int) -> tuple[Tensor, Tensor]:
        """Batch i of an epoch, bit-equal to the one that `epoch` yields."""
        self.order.check(i)
        return self._batch(self.drawn(epoch), i)

    def index(self, epoch: int, i: int) -> int:
        """Index, constant over epochs, of the fixed batch that is batch i of an epoch."""
        return self.order.index(epoch, i)

    def place(self, epoch: int, i: int) -> int:
        """Point the loader at batch i of an epoch.

        The position is written to tensors that keep their addresses for the life of the loader. `epoch` and
        `batch` neither read nor change it.

        Returns:
            The number of images in this process's share of the batch, to be passed to `assemble`.
        """
        self.order.check(i)
        drawn = self.drawn(epoch)
        if epoch != self._placed_epoch:
            self._placed = self._placed or [torch.empty_like(tensor) for tensor in drawn.tensors]
            for placed, tensor in zip(self._placed, drawn.tensors, strict=True):
                placed.copy_(tensor)
            self._placed_epoch = epoch
        part = drawn.plan.part(i)
        self._start.fill_(part.start)
        return part.stop - part.start

    def assemble(self, size: int, function: Assemble = assemble, raw: bool = False) -> tuple[Tensor, Tensor]:
        """Build the batch that the loader points at, bit-equal to the one that `batch` returns.

        Args:
            size: Number of images, as returned by `place`.
            function: `assemble` or a compiled version of it.
            raw: Leave out the augmentation.
        """
        if not self._placed:
            raise UserError("the loader points at no batch; call place(epoch, i) before assemble(size)")
        return self._assembled(self._placed[:1] if raw else self._placed, self._start, size, function)

    def _batch(self, drawn: Epoch, i: int, raw: bool = False) -> tuple[Tensor, Tensor]:
        part = drawn.plan.part(i)
        start = torch.full_like(self._start, part.start)  # torch.tensor(...) would synchronise with the host
        tensors = drawn.tensors[:1] if raw else drawn.tensors
        return self._assembled(tensors, start, part.stop - part.start, assemble)

    def _assembled(
        self, tensors: Sequence[Tensor], start: Tensor, size: int, function: Assemble
    ) -> tuple[Tensor, Tensor]:
        order, *moves = tensors
        reflect = self.augment is not None and self.augment.reflect
        drawn = Moves(*moves) if moves else None
        return function(self.images.images, self.images.labels, order, drawn, start, size, reflect)

    def drawn(self, epoch: int) -> Epoch:
        """The random choices of an epoch."""
        require_whole(least=0, epoch=epoch)  # before the look-up: as keys of a dict, True and 1.0 equal 1
        if epoch not in self._epochs:
            drawn = self._draw(epoch)
            while len(self._epochs) >= KEPT_EPOCHS:
                del self._epochs[next(iter(self._epochs))]  # the oldest draw
            self._epochs[epoch] = drawn
        return self._epochs[epoch]

    def _draw(self, epoch: int) -> Epoch:
        plan = self.order.plan(epoch)
        device = self.images.images.device
        moves = None
        if self.augment is not None:
            _, height, width = self.image_shape
            drawn = self.augment.draw(len(self.images), height, width, self.order.seed, epoch)
            moves = Moves(*(each[plan.images].to(device) for each in drawn))
        return Epoch(plan, plan.images.to(device), moves)


def unit(images: Tensor) -> Tensor:
    """Convert uint8 pixels to float32 in [0, 1]."""
    # Not div_(255): CUDA computes it as this product and the CPU does not, so the last bit would differ.
    return images.to(torch.float32).mul_(1 / 255)
