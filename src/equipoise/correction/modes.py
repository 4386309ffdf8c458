"""The modes of a correction: where the old gradient of a batch and the mean g̃ come from."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from equipoise.correction.active_vector import ActiveVector
from equipoise.correction.estimator import ModeName, TableType
from equipoise.correction.snapshot import RandomState, Snapshot
from equipoise.errors import UserError


class OldGradient(NamedTuple):
    """g_old of a batch, and its reference: g̃ or an estimate of it."""

    gradient: Tensor
    reference: Tensor
    loss: Tensor | None = None  # at the old weights, if a pass was made there
    known: Tensor | None = None  # 0 at entries that have no old gradient, 1 at the others; None: all have one
    noise: float = 0.0  # fraction of E‖gradient - reference‖² that is due to the noise of the reference


PassAtSnapshot = Callable[[], tuple[Tensor, Tensor]]  # -> loss, gradient as an active vector


class Mode:
    """Base of the modes. All gradients are active vectors of `vector`, which a refresh renews."""

    full_pass = False  # a refresh runs the batches at the new snapshot and records their gradients

    def __init__(self, snapshot: Snapshot, dtype: torch.dtype | None = None) -> None:
        self.snapshot = snapshot
        self.dtype = dtype  # of tables; None: as computed
        self.vector: ActiveVector | None = None

    def start(self, vector: ActiveVector, batches: int | None) -> None:
        """Begin a refresh; `batches` is their number, None if unknown."""
        self.vector = vector

    def record(self, gradient: Tensor, random: RandomState) -> None:
        """Record the next gradient of the full pass and the random state it was computed with."""

    def end_full_pass(self) -> None:
        """End the full pass: all gradients are recorded."""

    def pause(self) -> None:
        """Leave the coming epoch uncorrected."""

    def renew_snapshot(self) -> None:
        """End a refresh: copy the live weights."""
        self.snapshot.take()

    def random(self) -> RandomState | None:
        """Return the random state that the next step must use to share its dropout masks with g_old; None: any."""
        return None

    def old(self, run: PassAtSnapshot, index: int | None) -> OldGradient | None:
        """Return the old gradient of the next step, with `run` if it needs a pass; None: it cannot be corrected."""
        raise NotImplementedError

    def end_step(self, new: Tensor, delta: Tensor | None, index: int | None) -> None:
        """End a step, given its batch gradient and the correction that was added to it."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


class Recompute(Mode):
    """g_old by a second pass on the batch, g̃ by a full pass over all batches (the paper)."""

    full_pass = True
    _mean: Tensor | None = None  # the sum until the full pass ends
    _count = 0

    def start(self, vector: ActiveVector, batches: int | None) -> None:
        super().start(vector, batches)
        self._mean, self._count = None, 0

    def record(self, gradient: Tensor, random: RandomState) -> None:
        self._mean = gradient if self._mean is None else self._mean.add_(gradient)
        self._count += 1

    def end_full_pass(self) -> None:
        assert self._mean is not None
        self._mean /= self._count  # the mean over batches of batch means

    def old(self, run: PassAtSnapshot, index: int | None) -> OldGradient | None:
        assert self._mean is not None
        loss, gradient = run()
        return OldGradient(gradient, self._mean, loss)

    def state_dict(self) -> dict[str, Any]:
        return {"mean": self._mean}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._mean = state["mean"]


class Replay(Mode):
    """One pass over the coming batches at the snapshot, whose gradients are stored: exact at two passes per batch."""

    full_pass = True

    def __init__(self, snapshot: Snapshot, dtype: torch.dtype | None = None) -> None:
        super().__init__(snapshot, dtype)
        self._rows: list[Tensor] = []
        self._randoms: list[RandomState] = []
        self._mean: Tensor | None = None
        self._next = 0

    def start(self, vector: ActiveVector, batches: int | None) -> None:
        super().start(vector, batches)
        self._rows, self._randoms, self._mean, self._next = [], [], None, 0

    def record(self, gradient: Tensor, random: RandomState) -> None:
        self._rows.append(gradient.to(self.dtype))
        self._randoms.append(random)
        # The mean of the stored rows, not of the computed ones: the correction stays unbiased with bf16 rows.
        row = self._rows[-1].to(gradient.dtype)
        self._mean = row.clone() if self._mean is None else self._mean.add_(row)

    def end_full_pass(self) -> None:
        assert self._mean is not None
        self._mean /= len(self._rows)

    def random(self) -> RandomState | None:
        return self._randoms[self._next] if self._next < len(self._randoms) else None

    def old(self, run: PassAtSnapshot, index: int | None) -> OldGradient | None:
        if self._mean is None or self._next >= len(self._rows):
            raise UserError("replay has used all batches of the last refresh; call refresh with the coming batches")
        return OldGradient(self._rows[self._next].to(self._mean.dtype), self._mean)

    def end_step(self, new: Tensor, delta: Tensor | None, index: int | None) -> None:
        self._next += 1

    def state_dict(self) -> dict[str, Any]:
        """Return the rows that later steps need; at the end of an epoch there are none."""
        left = slice(self._next, None)
        if not self._rows[left]:
            return {"rows": [], "randoms": [], "mean": None}
        randoms = [random.state() for random in self._randoms[left]]
        return {"rows": self._rows[left], "randoms": randoms, "mean": self._mean}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._rows, self._mean, self._next = list(state["rows"]), state["mean"], 0
        if self._mean is not None:
            self._randoms = [RandomState.of(cpu, cuda, self._mean.device) for cpu, cuda in state["randoms"]]


class Running(Mode):
    """g_old by a second pass, g̃ by the mean of the earlier g_old since the refresh; there is no full pass."""

    _mean: Tensor | None = None
    _count = 0

    def start(self, vector: ActiveVector, batches: int | None) -> None:
        super().start(vector, batches)
        self._mean, self._count = None, 0

    def old(self, run: PassAtSnapshot, index: int | None) -> OldGradient | None:
        loss, gradient = run()
        earlier = self._mean
        self._count += 1
        self._mean = gradient if earlier is None else torch.lerp(earlier, gradient, 1 / self._count)
        # The mean of n - 1 independent gradients has 1/n of the variance of its difference to the n-th.
        return None if earlier is None else OldGradient(gradient, earlier, loss, noise=1 / self._count)

    def state_dict(self) -> dict[str, Any]:
        return {"mean": self._mean, "count": self._count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._mean, self._count = state["mean"], state["count"]


class Previous(Mode):
    """MVR: g_old at the weights of the last step, g̃ by the corrected gradient of the last step."""

    _estimate: Tensor | None = None

    def start(self, vector: ActiveVector, batches: int | None) -> None:
        """Continue the recursion: a refresh does not interrupt it."""
        if self.vector is None:
            self.vector = vector

    def pause(self) -> None:
        """End the recursion: it will not see the steps of the coming epoch."""
        self._estimate = None

    def renew_snapshot(self) -> None:
        if self._estimate is None:  # otherwise the snapshot is that of the last step
            self.snapshot.take()

    def old(self, run: PassAtSnapshot, index: int | None) -> OldGradient | None:
        known = self._follow_topology()
        if self._estimate is None:
            return None
        loss, gradient = run()
        return OldGradient(gradient, self._estimate, loss, known)

    def _follow_topology(self) -> Tensor | None:
        """Move the estimate to the weights that are active now; weights grown since the last step have none."""
        older = self.vector
        assert older is not None
        if older.topology is None or older.topology.updates == older.made_at:
            return None
        self.vector = older.renewed()
        if self._estimate is not None:
            self._estimate = self.vector.translate(older, self._estimate)
        return self.vector.known_to(older)

    def end_step(self, new: Tensor, delta: Tensor | None, index: int | None) -> None:
        """Keep the corrected gradient, unless it overflowed: a GradScaler then skips the step."""
        self._estimate = _finite_or(new if delta is None else new + delta, self._estimate)
        self.snapshot.take()

    def state_dict(self) -> dict[str, Any]:
        return {"estimate": self._estimate}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._estimate = state["estimate"]


class Table(Mode):
    """SAGA: the last gradient of each fixed batch, and the mean of all of them."""

    def __init__(self, snapshot: Snapshot, dtype: torch.dtype | None = None) -> None:
        super().__init__(snapshot, dtype)
        self._rows: dict[int, Tensor] = {}
        self._mean: Tensor | None = None
        self._batches = 0
        self._known: Tensor | None = None

    def start(self, vector: ActiveVector, batches: int | None) -> None:
        """Move the table to the weights that are active now; weights grown since the last refresh are unknown."""
        if batches is None:
            raise UserError("SAGA needs the number of batches: give refresh a loader with a length")
        older = self.vector
        super().start(vector, batches)
        self._known = None
        if older is not None and not vector.same_parameters(older):
            self._rows = {}  # parameters were frozen or unfrozen: fill the table again
        elif older is not None and older.made_at != vector.made_at:
            self._rows = {i: vector.translate(older, row) for i, row in self._rows.items()}
            self._known = vector.known_to(older)
        self._batches = batches
        self._mean = None
        if self._rows.keys() >= set(range(batches)):
            self._mean = torch.zeros_like(self._rows[0], dtype=vector.dtype)
            for i in range(batches):
                self._mean += self._rows[i] / batches

    def old(self, run: PassAtSnapshot, index: int | None) -> OldGradient | None:
        if index is None or not 0 <= index < self._batches:
            raise UserError(f"index={index} must be that of the batch, from 0 to {self._batches - 1}, with SAGA")
        if self._mean is None:
            return None
        return OldGradient(self._rows[index].to(self._mean.dtype), self._mean, known=self._known)

    def end_step(self, new: Tensor, delta: Tensor | None, index: int | None) -> None:
        assert index is not None
        row = _finite_or(new, self._rows.get(index)).to(self.dtype)  # an overflow would never leave the mean
        if self._mean is not None:
            # The difference of stored rows keeps the mean equal to that of the table.
            self._mean = self._mean + (row.to(new.dtype) - self._rows[index].to(new.dtype)) / self._batches
        self._rows[index] = row

    def state_dict(self) -> dict[str, Any]:
        return {"rows": self._rows, "mean": self._mean, "batches": self._batches, "known": self._known}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._rows, self._mean = dict(state["rows"]), state["mean"]
        self._batches, self._known = state["batches"], state["known"]


def _finite_or(new: Tensor, old: Tensor | None) -> Tensor:
    """Return `new`, or `old` (zero if None) if an entry of `new` overflowed; no value leaves the device."""
    instead = torch.zeros_like(new) if old is None else old.to(new.dtype)
    return torch.where(new.isfinite().all(), new, instead)


MODES: dict[ModeName, type[Mode]] = {
    "recompute": Recompute,
    "replay": Replay,
    "running": Running,
    "previous": Previous,
    "table": Table,
}

TABLE_TYPES: dict[TableType, torch.dtype | None] = {"float32": None, "bf16": torch.bfloat16}  # None: as computed
