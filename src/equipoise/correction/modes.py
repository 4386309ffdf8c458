"""The modes of a correction: where the old gradient of a batch and the mean g̃ come from."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from equipoise.correction.active_vector import ActiveVector
from equipoise.correction.estimator import ModeName, TableType
from equipoise.correction.fingerprint import Fingerprint
from equipoise.correction.snapshot import RandomState, Snapshot
from equipoise.correction.state import Check, Stateful, count, optional, tensor
from equipoise.errors import UserError

VECTOR = optional(tensor(-1))


class OldGradient(NamedTuple):
    """g_old of a batch, and its reference: g̃ or an estimate of it."""

    gradient: Tensor
    reference: Tensor
    loss: Tensor | None = None  # at the old weights, if a pass was made there
    known: Tensor | None = None  # 0 at entries that have no old gradient, 1 at the others; None: all have one
    noise: float = 0.0  # fraction of E‖gradient - reference‖² that is due to the noise of the reference


PassAtSnapshot = Callable[[], tuple[Tensor, Tensor]]  # -> loss, gradient as an active vector


class Mode(Stateful):
    """Base of the modes. All gradients are active vectors of `vector`, which a refresh renews."""

    full_pass = False  # a refresh runs the batches at the new snapshot and records their gradients

    def __init__(self, snapshot: Snapshot, dtype: torch.dtype | None = None) -> None:
        self.snapshot = snapshot
        self.dtype = dtype  # of tables; None: as computed
        self.vector: ActiveVector | None = None
        self.reset()

    def reset(self) -> None:
        """Forget all gradients."""

    def start(self, vector: ActiveVector, batches: int | None) -> None:
        """Begin a refresh; `batches` is their number, None if unknown."""
        self.vector = vector
        self.reset()

    def expect(self, batch: tuple[Any, ...]) -> None:
        """Note the next batch of the full pass, before it runs."""

    def record(self, gradient: Tensor, random: RandomState) -> None:
        """Record the next gradient of the full pass and the random state it was computed with."""

    def end_full_pass(self) -> None:
        """End the full pass: all gradients are recorded."""

    def pause(self) -> None:
        """Leave the next epoch uncorrected."""

    def renew_snapshot(self) -> None:
        """End a refresh: copy the live weights."""
        self.snapshot.take()

    def random(self) -> RandomState | None:
        """Return the random state that the next step must use to share its dropout masks with g_old; None: any."""
        return None

    def check(self, batch: tuple[Any, ...]) -> None:
        """Compare the batch of the next step with the one that is expected."""

    def verify(self) -> None:
        """Raise UserError if an earlier step had another batch than expected; this waits for a GPU."""

    def old(self, run: PassAtSnapshot, index: int | None) -> OldGradient | None:
        """Return the old gradient of the next step, with `run` if it needs a pass; None: it cannot be corrected."""
        raise NotImplementedError

    def end_step(self, new: Tensor, delta: Tensor | None, index: int | None) -> None:
        """End a step, given its batch gradient and the correction that was added to it."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._check_lengths(getattr(self, name) for name, fits in self.saved.items() if fits is VECTOR)

    def _check_lengths(self, vectors: Iterable[Tensor | None]) -> None:
        """Refuse saved gradients with another number of weights than `vector`."""
        size = 0 if self.vector is None else self.vector.size
        for vector in vectors:
            if vector is not None and len(vector) != size:
                raise UserError(f"the state has an old gradient of {len(vector)} weights instead of {size}")


class Recompute(Mode):
    """g_old by a second pass on the batch, g̃ by a full pass over all batches (the paper)."""

    full_pass = True
    saved: ClassVar[Mapping[str, Check]] = {"mean": VECTOR}

    def reset(self) -> None:
        self.mean: Tensor | None = None  # the sum until the full pass ends
        self.count = 0

    def record(self, gradient: Tensor, random: RandomState) -> None:
        self.mean = gradient if self.mean is None else self.mean.add_(gradient)
        self.count += 1

    def end_full_pass(self) -> None:
        assert self.mean is not None
        self.mean /= self.count  # the mean over batches of batch means

    def old(self, run: PassAtSnapshot, index: int | None) -> OldGradient | None:
        if self.mean is None:
            raise UserError("the correction has no mean gradient; call refresh before the steps")
        loss, gradient = run()
        return OldGradient(gradient, self.mean, loss)


class Replay(Mode):
    """One pass over the coming batches at the snapshot, whose gradients are stored: exact at two passes per batch."""

    full_pass = True

    def reset(self) -> None:
        self.expected: list[Fingerprint] = []
        self.differs = torch.tensor(False, device="cpu")  # whether a step had another batch than expected
        self.rows: list[Tensor] = []
        self.randoms: list[RandomState] = []
        self.mean: Tensor | None = None
        self.next = 0

    def expect(self, batch: tuple[Any, ...]) -> None:
        self.expected.append(Fingerprint.of(batch))

    def record(self, gradient: Tensor, random: RandomState) -> None:
        self.rows.append(gradient.to(self.dtype))
        self.randoms.append(random)
        # The mean of the stored rows, not of the computed ones: the correction stays unbiased with bf16 rows.
        row = self.rows[-1].to(gradient.dtype)
        self.mean = row.clone() if self.mean is None else self.mean.add_(row)

    def end_full_pass(self) -> None:
        assert self.mean is not None
        self.mean /= len(self.rows)

    def random(self) -> RandomState | None:
        return self.randoms[self.next] if self.next < len(self.randoms) else None

    def check(self, batch: tuple[Any, ...]) -> None:
        """Compare fingerprints. Those on a GPU are verified later, because the step would have to wait for it."""
        if self.next < len(self.expected):
            self.differs = self.differs | self.expected[self.next].differs(Fingerprint.of(batch))
            if self.differs.is_cpu:
                self.verify()

    def verify(self) -> None:
        if self.differs:
            self.differs = torch.tensor(False, device="cpu")
            raise UserError(
                "replay got another batch in a step than in refresh; give refresh the coming batches in order (seed "
                "the generator of the loader before both, or in Lightning shuffle by a sampler with set_epoch), or use "
                'mode="recompute" or mode="running"'
            )

    def old(self, run: PassAtSnapshot, index: int | None) -> OldGradient | None:
        if self.mean is None or self.next >= len(self.rows):
            raise UserError("replay has used all batches of the last refresh; call refresh with the coming batches")
        return OldGradient(self.rows[self.next].to(self.mean.dtype), self.mean)

    def end_step(self, new: Tensor, delta: Tensor | None, index: int | None) -> None:
        self.next += 1

    def state_dict(self) -> dict[str, Any]:
        """Return the rows that later steps need; at the end of an epoch there are none."""
        self.verify()
        left = slice(self.next, None)
        if not self.rows[left]:
            return {"expected": [], "rows": [], "randoms": [], "mean": None}
        randoms = [random.state() for random in self.randoms[left]]
        expected = [tuple(fingerprint) for fingerprint in self.expected[left]]
        return {"expected": expected, "rows": self.rows[left], "randoms": randoms, "mean": self.mean}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.reset()
        self.expected = [Fingerprint.saved(structure, values) for structure, values in state["expected"]]
        self.rows, self.mean = list(state["rows"]), state["mean"]
        if not all(map(tensor(-1), self.rows)) or not VECTOR(self.mean) or (self.mean is None) == bool(self.rows):
            raise UserError("the state of the correction has a wrong table of old gradients")
        if not len(self.rows) == len(self.expected) == len(state["randoms"]):
            raise UserError("the state of the correction has old gradients without their batches")
        self._check_lengths([self.mean, *self.rows])
        if self.mean is not None:
            self.randoms = [RandomState.of(cpu, cuda, self.mean.device) for cpu, cuda in state["randoms"]]


class Running(Mode):
    """g_old by a second pass, g̃ by the mean of the earlier g_old since the refresh; there is no full pass."""

    saved: ClassVar[Mapping[str, Check]] = {"mean": VECTOR, "count": count}

    def reset(self) -> None:
        self.mean: Tensor | None = None
        self.count = 0

    def old(self, run: PassAtSnapshot, index: int | None) -> OldGradient | None:
        loss, gradient = run()
        earlier = self.mean
        self.count += 1
        self.mean = gradient if earlier is None else torch.lerp(earlier, gradient, 1 / self.count)
        # The mean of n - 1 independent gradients has 1/n of the variance of its difference to the n-th.
        return None if earlier is None else OldGradient(gradient, earlier, loss, noise=1 / self.count)


class Previous(Mode):
    """MVR: g_old at the weights of the last step, g̃ by the corrected gradient of the last step."""

    saved: ClassVar[Mapping[str, Check]] = {"estimate": VECTOR}

    def reset(self) -> None:
        self.estimate: Tensor | None = None

    def start(self, vector: ActiveVector, batches: int | None) -> None:
        """Continue the recursion: a refresh does not interrupt it."""
        if self.vector is None:
            self.vector = vector

    def pause(self) -> None:
        """End the recursion: it will not see the steps of the next epoch."""
        self.reset()

    def renew_snapshot(self) -> None:
        if self.estimate is None:  # otherwise the snapshot holds the weights of the last step
            self.snapshot.take()

    def old(self, run: PassAtSnapshot, index: int | None) -> OldGradient | None:
        known = self._follow_topology()
        if self.estimate is None:
            return None
        loss, gradient = run()
        return OldGradient(gradient, self.estimate, loss, known)

    def _follow_topology(self) -> Tensor | None:
        """Move the estimate to the weights that are active now; weights grown since the last step have none."""
        older = self.vector
        assert older is not None
        if older.topology is None or older.topology.updates == older.made_at:
            return None
        self.vector = older.renewed()
        if self.estimate is not None:
            self.estimate = self.vector.translate(older, self.estimate)
        return self.vector.known_to(older)

    def end_step(self, new: Tensor, delta: Tensor | None, index: int | None) -> None:
        """Keep the corrected gradient, unless it overflowed: a GradScaler then skips the step."""
        self.estimate = _finite_or(new if delta is None else new + delta, self.estimate)
        self.snapshot.take()


def _numbered_vectors(value: Any) -> bool:
    return isinstance(value, dict) and all(map(count, value)) and all(map(tensor(-1), value.values()))


class Table(Mode):
    """SAGA: the last gradient of each fixed batch, and the mean of all of them."""

    saved: ClassVar[Mapping[str, Check]] = {
        "rows": _numbered_vectors,
        "mean": VECTOR,
        "batches": count,
        "known": VECTOR,
    }

    def reset(self) -> None:
        self.rows: dict[int, Tensor] = {}
        self.mean: Tensor | None = None
        self.batches = 0
        self.known: Tensor | None = None

    def start(self, vector: ActiveVector, batches: int | None) -> None:
        """Move the table to the weights that are active now; weights grown since the last refresh are unknown."""
        if batches is None:
            raise UserError("SAGA needs the number of batches: give refresh a loader with a length")
        older, self.vector = self.vector, vector
        self.mean = self.known = None
        if older is not None and not vector.same_parameters(older):
            self.rows = {}  # parameters were frozen or unfrozen: fill the table again
        elif older is not None and older.made_at != vector.made_at:
            self.rows = {i: vector.translate(older, row) for i, row in self.rows.items()}
            self.known = vector.known_to(older)
        self.batches = batches
        if self.rows.keys() >= set(range(batches)):
            self.mean = torch.zeros_like(self.rows[0], dtype=vector.dtype)
            for i in range(batches):
                self.mean += self.rows[i] / batches

    def old(self, run: PassAtSnapshot, index: int | None) -> OldGradient | None:
        if index is None or not 0 <= index < self.batches:
            raise UserError(f"index={index} must be the number of the batch, from 0 to {self.batches - 1}, with SAGA")
        if self.mean is None:
            return None
        return OldGradient(self.rows[index].to(self.mean.dtype), self.mean, known=self.known)

    def end_step(self, new: Tensor, delta: Tensor | None, index: int | None) -> None:
        assert index is not None
        row = _finite_or(new, self.rows.get(index)).to(self.dtype)  # an overflow would never leave the mean
        if self.mean is not None:
            # The difference of stored rows keeps the mean equal to the mean of the table.
            self.mean = self.mean + (row.to(new.dtype) - self.rows[index].to(new.dtype)) / self.batches
        self.rows[index] = row

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._check_lengths(self.rows.values())


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
