"""The cost of a correction, known before a run starts: passes and memory."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import NamedTuple

import torch

from equipoise.correction.active_vector import ActiveVector
from equipoise.correction.estimator import Estimator, ModeName
from equipoise.correction.modes import TABLE_TYPES
from equipoise.errors import UserError

STANDING_VECTORS = 3  # g̃ or its estimate, and the two sums of the step statistics


class CostEstimate(NamedTuple):
    """The mode, the passes of an epoch relative to SGD, and the bytes that are held between steps."""

    mode: ModeName | None
    passes: float
    memory: int

    def __str__(self) -> str:
        if self.mode is None:
            return "no correction"
        memory = readable(self.memory)
        return f"{self.mode}: {self.passes:.2f} x the passes of SGD, {memory} for snapshot and gradients"

    def fits(self, device: torch.device) -> bool:
        """Whether a table of old gradients, if there is one, fits in the free memory of the device."""
        available = available_memory(device)
        return self.mode not in ("replay", "table") or available is None or self.memory <= available

    def check(self, device: torch.device) -> None:
        """Raise UserError if a table of old gradients does not fit in the free memory of the device."""
        if self.fits(device):
            return
        free = readable(available_memory(device) or 0)
        other = 'mode="running"' if self.mode == "replay" else 'AGENT or SVRG with mode="running"'
        raise UserError(
            f"{self.mode} needs {readable(self.memory)} and {free} are free on {device}; "
            f'use {other}, which has no table, or table="bf16", which halves it'
        )


def estimate_cost(
    estimator: Estimator, vector: ActiveVector, snapshot_bytes: int, batches: int, passes: float
) -> CostEstimate:
    """Estimate the cost of epochs with this number of batches; `passes` is the cost of an epoch relative to SGD."""
    if not estimator.corrects:
        return CostEstimate(None, passes, 0)
    memory = STANDING_VECTORS * vector.size * vector.dtype.itemsize
    if estimator.mode in ("replay", "table"):
        memory += batches * vector.size * (TABLE_TYPES[estimator.table] or vector.dtype).itemsize
    if estimator.keeps_snapshot:
        memory += snapshot_bytes
    return CostEstimate(estimator.mode, passes, memory)


def available_memory(device: torch.device) -> int | None:
    """Return the free memory of a device in bytes; None if unknown."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    if device.type != "cpu":
        return None
    meminfo = Path("/proc/meminfo")  # its MemAvailable counts the page cache, which sysconf's free pages do not
    if meminfo.is_file() and (found := re.search(r"MemAvailable:\s+(\d+) kB", meminfo.read_text())):
        return int(found[1]) * 1024
    if "SC_AVPHYS_PAGES" in os.sysconf_names:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return None


def readable(size: int) -> str:
    """Return a number of bytes with a unit."""
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if size >= scale:
            return f"{size / scale:.1f} {unit}"
    return f"{size} bytes"
