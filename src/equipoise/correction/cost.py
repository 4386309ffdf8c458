"""What a correction costs, told before a run starts: passes and memory."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import NamedTuple

import torch

from equipoise.correction.active_vector import Coordinates
from equipoise.correction.estimator import Estimator, Way
from equipoise.correction.modes import TABLE_TYPES
from equipoise.errors import UserError

STANDING_VECTORS = 3  # g̃ or what stands for it, and the two sums behind the report's variances


class Plan(NamedTuple):
    """How old gradients are got, the passes of an epoch as a multiple of SGD's, and the bytes held between steps."""

    mode: Way | None
    cost: float
    memory: int

    def __str__(self) -> str:
        if self.mode is None:
            return "no correction"
        return f"{self.mode}: {self.cost:.2f} x the passes of SGD, {readable(self.memory)} for snapshot and gradients"

    def fits(self, device: torch.device) -> bool:
        """Whether a table of old gradients, where there is one, fits in the memory that is free now."""
        available = available_memory(device)
        return self.mode not in ("replay", "table") or available is None or self.memory <= available

    def check(self, device: torch.device) -> None:
        """Refuse a table of old gradients that would not fit in the memory that is free now."""
        available = available_memory(device)
        if available is None or self.fits(device):
            return
        assert self.mode is not None
        ways = {"replay": 'mode="running" needs no table', "table": 'mode="running" of AGENT or SVRG needs no table'}
        raise UserError(
            f"{self.mode} needs {readable(self.memory)} and {readable(available)} are free on {device}; "
            f'{ways[self.mode]}, and table="bf16" halves it'
        )


def make_plan(estimator: Estimator, coordinates: Coordinates, snapshot: int, batches: int) -> Plan:
    """The plan for epochs of so many batches; `snapshot` is the size of one in bytes."""
    if not estimator.corrects:
        return Plan(None, 1.0, 0)
    memory = STANDING_VECTORS * coordinates.size * coordinates.dtype.itemsize
    if estimator.source in ("replay", "table"):
        memory += batches * coordinates.size * (TABLE_TYPES[estimator.table] or coordinates.dtype).itemsize
    if estimator.keeps_snapshot:
        memory += snapshot
    return Plan(estimator.source, estimator.cost, memory)


def available_memory(device: torch.device) -> int | None:
    """The bytes that can still be taken on a device; None where nobody tells."""
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
    """Bytes as people say them."""
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if size >= scale:
            return f"{size / scale:.1f} {unit}"
    return f"{size} bytes"
