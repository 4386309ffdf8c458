"""Batches of a folder of images, decoded in worker processes, with reproducible epochs."""

from __future__ import annotations

import atexit
import signal
import weakref
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from multiprocessing.util import Finalize
from random import Random
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from equipoise.checks import require_whole
from equipoise.data.dataset import Folder
from equipoise.data.epoch_order import Order
from equipoise.data.image_files import ResizedCrop, centre_box, crop, decode
from equipoise.data.loader import unit
from equipoise.errors import UserError
from equipoise.seeds import derive

EVALUATION_ZOOM = 224 / 256  # the usual centre crop of 224 pixels from an image resized to 256


class FolderLoader:
    """Batches `(x, y)` of a folder of images; x is float32 [B, 3, size, size] in [0, 1], y is int64.

    Epochs are reproducible as with `Loader`. The crop and the flip of an image are a function of
    (seed, epoch, image) and do not depend on the number of workers or the batch size.

    Args:
        folder: The dataset.
        augment: Random crop; `None` for the centre square, as in evaluation.
        size: Side of the images in pixels.
        workers: Number of decoding processes; 0 decodes in this process.

    The other arguments are the same as for `Loader`.
    """

    def __init__(
        self,
        folder: Folder,
        batch: int = 128,
        seed: int = 0,
        augment: ResizedCrop | None = None,
        shuffle: bool = True,
        drop_last: bool = False,
        device: str | torch.device = "cpu",
        fixed_batches: bool = False,
        size: int = 224,
        workers: int = 2,
        rank: int = 0,
        ranks: int = 1,
    ) -> None:
        require_whole(size=size)
        require_whole(least=0, workers=workers)
        self.order = Order(len(folder), batch, seed, shuffle, drop_last, fixed_batches, rank, ranks)
        self.folder = folder
        self.augment = augment
        self.device = torch.device(device)
        self.size = size
        self.workers = workers

    def __len__(self) -> int:
        """Number of batches per epoch."""
        return len(self.order)

    @property
    def image_shape(self) -> torch.Size:
        """Channels, height and width of an image."""
        return torch.Size([3, self.size, self.size])

    def epoch(self, epoch: int, start: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        """The batches of an epoch, beginning with batch `start`."""
        self.order.check(start, extra=1)
        plan = self.order.plan(epoch)
        images = plan.images.tolist()
        batches = DataLoader(
            self._squares(epoch),
            batch_sampler=[images[plan.part(i)] for i in range(start, len(self))],
            collate_fn=_collated,
            num_workers=self.workers,
            worker_init_fn=_leave_signals_to_the_run,
            pin_memory=self.device.type == "cuda",
            generator=torch.Generator(),  # a separate one, because the default draws from the global generator
        )
        stream = self._stream(batches)
        _open_streams.add(stream)
        Finalize(stream, _close, [weakref.ref(stream)], exitpriority=1)
        return stream

    def batch(self, epoch: int, i: int) -> tuple[Tensor, Tensor]:
        """Batch i of an epoch, bit-equal to the one that `epoch` yields; decoded in this process."""
        self.order.check(i)
        plan = self.order.plan(epoch)
        squares = self._squares(epoch)
        return self._delivered(_collated([squares[n] for n in plan.images[plan.part(i)].tolist()]))

    def index(self, epoch: int, i: int) -> int:
        """Index, constant over epochs, of the fixed batch that is batch i of an epoch."""
        return self.order.index(epoch, i)

    def _squares(self, epoch: int) -> _Squares:
        return _Squares(self.folder, self.size, self.augment, self.order.seed, epoch)

    def _stream(self, batches: DataLoader[Any]) -> Generator[tuple[Tensor, Tensor], None, None]:
        # A plain loop, so that an error releases the iterator and its workers at once.
        for batch in batches:
            yield self._delivered(batch)

    def _delivered(self, batch: tuple[Tensor, Tensor] | UserError) -> tuple[Tensor, Tensor]:
        if isinstance(batch, UserError):
            raise UserError(*batch.args)  # a new error: raising this local would create a reference cycle
        x, y = (each.to(self.device, non_blocking=True) for each in batch)
        return unit(x), y


def _leave_signals_to_the_run(worker: int) -> None:
    """Ignore signals that reach all processes of a run at once, such as from systemd, Slurm and Ctrl-C.

    The run stops after its step and ends its workers. With torch's handler they would end before the run, which would
    fail.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


# At its exit Python sends SIGTERM to the workers of an unfinished epoch and waits for them, but they ignore it. So its
# streams are closed before: in a main process by `atexit`, before torch's exit function, after which a loader no longer
# ends its workers, and in a process of multiprocessing, which does not call `atexit`, by `Finalize`.
_open_streams: weakref.WeakSet[Generator[Any, None, None]] = weakref.WeakSet()


@atexit.register
def _close_streams() -> None:
    for stream in list(_open_streams):
        stream.close()


def _close(stream: weakref.ref[Generator[Any, None, None]]) -> None:
    if (found := stream()) is not None:
        found.close()


@dataclass(frozen=True, eq=False)
class _Squares(Dataset[tuple[Tensor, int] | UserError]):
    """The crop of each image in one epoch; the object that is sent to the workers."""

    folder: Folder
    size: int
    augment: ResizedCrop | None
    seed: int
    epoch: int

    def __getitem__(self, n: int) -> tuple[Tensor, int] | UserError:
        # An error is returned as a value: raised in a worker, it would arrive wrapped in a traceback.
        try:
            image = decode(self.folder.root / str(self.folder.names[n]))
        except UserError as error:
            return error
        if self.augment is None:
            square = crop(image, centre_box(*image.size, zoom=EVALUATION_ZOOM), self.size)
        else:
            rng = Random(derive(self.seed, "resized crop", self.epoch, n))
            box, flip = self.augment.box(*image.size, rng), self.augment.flip and rng.random() < 0.5
            square = crop(image, box, self.size, flip)
        return square, int(self.folder.labels[n])


def _collated(squares: list[tuple[Tensor, int] | UserError]) -> tuple[Tensor, Tensor] | UserError:
    images: list[Tensor] = []
    labels: list[int] = []
    for square in squares:
        if isinstance(square, UserError):
            return square
        images.append(square[0])
        labels.append(square[1])
    return torch.stack(images), torch.tensor(labels)
