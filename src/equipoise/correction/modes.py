"""Where the old gradient of a batch, and the mean it scatters around, come from."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from equipoise.correction.active_vector import Coordinates
from equipoise.correction.estimator import TableType, Way
from equipoise.correction.snapshot import Random, Snapshot
from equipoise.errors import UserError


class Old(NamedTuple):
    """g_old of a batch, and g̃ or what stands for it."""

    gradient: Tensor
    reference: Tensor
    loss: Tensor | None = None  # of the old weights on the batch, where a pass was made
    known: Tensor | None = None  # 0 at coordinates that have no old gradient, 1 elsewhere; None: all have
    noise: float = 0.0  # the reference's own share of E‖gradient - reference‖²


class Pair(NamedTuple):
    """Of one step: g_old - g̃ where it can be used, what was added to the gradient, the mean weight of it."""

    scatter: Tensor
    delta: Tensor | None = None
    weight: Tensor | None = None


PassAtSnapshot = Callable[[], tuple[Tensor, Tensor]]  # -> loss, gradient at the coordinates


class Source:
    """One way to get old gradients. All vectors are in `coordinates`, which a refresh renews."""

    full_pass = False  # a refresh runs the batches at the new snapshot and shows their gradients to `see`

    def __init__(self, snapshot: Snapshot, dtype: torch.dtype | None = None) -> None:
        self.snapshot = snapshot
        self.dtype = dtype  # of tables
        self.coordinates: Coordinates | None = None

    def start(self, coordinates: Coordinates, batches: int | None) -> None:
        """A refresh begins; `batches` is how many there are, where that is known."""
        self.coordinates = coordinates

    def see(self, gradient: Tensor, random: Random) -> None:
        """The gradient of the next batch of the full pass, and the random numbers it was computed with."""

    def old(self, run: PassAtSnapshot, index: int | None) -> Old | None:
        """The pair for the coming step; None where it cannot be corrected."""
        raise NotImplementedError

    def random(self) -> Random | None:
        """The random numbers that the coming step must use for its dropout to equal the old gradient's."""
        return None

    def after(self, new: Tensor, delta: Tensor | None, index: int | None) -> None:
        """The step's own gradient, and what was added to it, once they are known."""

    def end_full_pass(self) -> None:
        """All batches have been seen."""

    def pause(self) -> None:
        """The coming epoch is not corrected."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


class Recompute(Source):
    """g_old by a second pass on the batch, g̃ by a full pass over all of them (the paper)."""

    full_pass = True

    def __init__(self, snapshot: Snapshot, dtype: torch.dtype | None = None) -> None:
        super().__init__(snapshot, dtype)
        self._mean: Tensor | None = None  # a sum while the full pass lasts
        self._seen = 0

    def start(self, coordinates: Coordinates, batches: int | None) -> None:
        super().start(coordinates, batches)
        self._mean, self._seen = None, 0

    def see(self, gradient: Tensor, random: Random) -> None:
        self._mean = gradient if self._mean is None else self._mean.add_(gradient)
        self._seen += 1

    def end_full_pass(self) -> None:
        assert self._mean is not None
        self._mean /= self._seen  # the mean over batches of batch means

    def old(self, run: PassAtSnapshot, index: int | None) -> Old | None:
        assert self._mean is not None
        loss, gradient = run()
        return Old(gradient, self._mean, loss)

    def state_dict(self) -> dict[str, Any]:
        return {"mean": self._mean}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._mean = state["mean"]


class Replay(Source):
    """The coming batches run once at the snapshot and their gradients kept: exact, and each batch only twice."""

    full_pass = True

    def __init__(self, snapshot: Snapshot, dtype: torch.dtype | None = None) -> None:
        super().__init__(snapshot, dtype)
        self._rows: list[Tensor] = []
        self._randoms: list[Random] = []
        self._mean: Tensor | None = None
        self._next = 0

    def start(self, coordinates: Coordinates, batches: int | None) -> None:
        super().start(coordinates, batches)
        self._rows, self._randoms, self._mean, self._next = [], [], None, 0

    def see(self, gradient: Tensor, random: Random) -> None:
        self._rows.append(gradient.to(self.dtype))
        self._randoms.append(random)
        # the mean of what is stored, not of what was computed: with bf16 rows the correction stays unbiased
        row = self._rows[-1].to(gradient.dtype)
        self._mean = row.clone() if self._mean is None else self._mean.add_(row)

    def end_full_pass(self) -> None:
        assert self._mean is not None
        self._mean /= len(self._rows)

    def old(self, run: PassAtSnapshot, index: int | None) -> Old | None:
        if self._mean is None or self._next >= len(self._rows):
            raise UserError("replay has used all the batches it was given; call refresh with the coming ones")
        return Old(self._rows[self._next].to(self._mean.dtype), self._mean)

    def random(self) -> Random | None:
        return self._randoms[self._next] if self._next < len(self._randoms) else None

    def after(self, new: Tensor, delta: Tensor | None, index: int | None) -> None:
        self._next += 1

    def state_dict(self) -> dict[str, Any]:
        """Only what later steps need: at the end of an epoch that is nothing."""
        left = slice(self._next, None)
        if not self._rows[left]:
            return {"rows": [], "randoms": [], "mean": None}
        randoms = [random.state() for random in self._randoms[left]]
        return {"rows": self._rows[left], "randoms": randoms, "mean": self._mean}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._rows, self._mean, self._next = list(state["rows"]), state["mean"], 0
        if self._mean is not None:
            self._randoms = [Random.of(cpu, cuda, self._mean.device) for cpu, cuda in state["randoms"]]


class Running(Source):
    """g_old by a second pass; the mean of the earlier ones since the refresh stands for g̃. No full pass."""

    def __init__(self, snapshot: Snapshot, dtype: torch.dtype | None = None) -> None:
        super().__init__(snapshot, dtype)
        self._mean: Tensor | None = None
        self._seen = 0

    def start(self, coordinates: Coordinates, batches: int | None) -> None:
        super().start(coordinates, batches)
        self._mean, self._seen = None, 0

    def old(self, run: PassAtSnapshot, index: int | None) -> Old | None:
        loss, gradient = run()
        earlier = self._mean
        self._seen += 1
        self._mean = gradient if earlier is None else torch.lerp(earlier, gradient, 1 / self._seen)
        # of n independent gradients, the mean of n - 1 makes 1/n of the variance of its difference to the n-th
        return None if earlier is None else Old(gradient, earlier, loss, noise=1 / self._seen)

    def state_dict(self) -> dict[str, Any]:
        return {"mean": self._mean, "seen": self._seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._mean, self._seen = state["mean"], state["seen"]


class Previous(Source):
    """MVR: g_old at the last step's weights, and the last step's estimate stands for g̃."""

    def __init__(self, snapshot: Snapshot, dtype: torch.dtype | None = None) -> None:
        super().__init__(snapshot, dtype)
        self._estimate: Tensor | None = None

    def start(self, coordinates: Coordinates, batches: int | None) -> None:
        """Nothing begins anew at a refresh: the recursion goes on."""
        if self.coordinates is None:
            self.coordinates = coordinates

    def pause(self) -> None:
        """The recursion breaks off: weights will move that it does not see."""
        self._estimate = None

    def old(self, run: PassAtSnapshot, index: int | None) -> Old | None:
        known = self._follow_topology()
        if self._estimate is None:
            return None
        loss, gradient = run()
        return Old(gradient, self._estimate, loss, known)

    def _follow_topology(self) -> Tensor | None:
        """Move the estimate to the weights active now; what was grown since the last step has none."""
        older = self.coordinates
        assert older is not None
        if older.topology is None or older.topology.updates == older.made_at:
            return None
        self.coordinates = older.renewed()
        if self._estimate is not None:
            self._estimate = self.coordinates.translate(older, self._estimate)
        return self.coordinates.known_to(older)

    def after(self, new: Tensor, delta: Tensor | None, index: int | None) -> None:
        """An overflow, after which a GradScaler skips the step, leaves the estimate as it was: it would stay."""
        self._estimate = finite_or(new if delta is None else new + delta, self._estimate)
        self.snapshot.take()

    def state_dict(self) -> dict[str, Any]:
        return {"estimate": self._estimate}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._estimate = state["estimate"]


class Table(Source):
    """SAGA: the gradient of each fixed batch as last seen, and their mean."""

    def __init__(self, snapshot: Snapshot, dtype: torch.dtype | None = None) -> None:
        super().__init__(snapshot, dtype)
        self._rows: dict[int, Tensor] = {}
        self._mean: Tensor | None = None
        self._batches = 0
        self._known: Tensor | None = None

    def start(self, coordinates: Coordinates, batches: int | None) -> None:
        """Translate the table to the weights active now; what was grown since the last refresh is unknown."""
        if batches is None:
            raise UserError("SAGA needs to know how many batches there are: give refresh a loader with a length")
        older = self.coordinates
        super().start(coordinates, batches)
        self._known = None
        if older is not None and not coordinates.same_parameters(older):
            self._rows = {}  # some were frozen or thawed: the table is filled anew
        elif older is not None and older.made_at != coordinates.made_at:
            self._rows = {i: coordinates.translate(older, row) for i, row in self._rows.items()}
            self._known = coordinates.known_to(older)
        self._batches = batches
        self._mean = None
        if self._rows.keys() >= set(range(batches)):
            self._mean = torch.zeros_like(self._rows[0], dtype=coordinates.dtype)
            for i in range(batches):
                self._mean += self._rows[i] / batches

    def old(self, run: PassAtSnapshot, index: int | None) -> Old | None:
        if index is None or not 0 <= index < self._batches:
            raise UserError(f"SAGA needs to know which of {self._batches} batches this is: backward(..., index=i)")
        if self._mean is None:
            return None
        return Old(self._rows[index].to(self._mean.dtype), self._mean, known=self._known)

    def after(self, new: Tensor, delta: Tensor | None, index: int | None) -> None:
        assert index is not None
        row = finite_or(new, self._rows.get(index)).to(self.dtype)  # an overflow would stay in the mean
        if self._mean is not None:
            # by the difference of what is stored, so that the mean stays that of the table
            self._mean = self._mean + (row.to(new.dtype) - self._rows[index].to(new.dtype)) / self._batches
        self._rows[index] = row

    def state_dict(self) -> dict[str, Any]:
        return {"rows": self._rows, "mean": self._mean, "batches": self._batches, "known": self._known}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._rows, self._mean = dict(state["rows"]), state["mean"]
        self._batches, self._known = state["batches"], state["known"]


def finite_or(new: Tensor, old: Tensor | None) -> Tensor:
    """A gradient that overflowed anywhere is replaced by the one before, or zero; nothing leaves the device."""
    instead = torch.zeros_like(new) if old is None else old.to(new.dtype)
    return torch.where(new.isfinite().all(), new, instead)


SOURCES: dict[Way, type[Source]] = {
    "recompute": Recompute,
    "replay": Replay,
    "running": Running,
    "previous": Previous,
    "table": Table,
}

TABLE_TYPES: dict[TableType, torch.dtype | None] = {"float32": None, "bf16": torch.bfloat16}  # None: as computed
