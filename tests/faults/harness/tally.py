"""What a campaign counts."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass
class Tally:
    """Counts of a campaign, or of a part of it.

    Args:
        runs: Runs that were killed and resumed, by kind.
        pipelines: Names of the pipelines among them.
        kills: Kills with SIGKILL, by moment.
        kill_seconds: Seconds of all runs that were killed, with their undisturbed twins.
        damages: Checkpoints that were damaged before a resume.
        inputs: Wrong inputs, by kind.
        concurrent: Groups of threads or processes that ran at the same time, by kind.
        calls: Calls under sanitizers, by kind.
        failures: One line for each failure.
    """

    runs: Counter[str] = field(default_factory=Counter)
    pipelines: set[str] = field(default_factory=set)
    kills: Counter[str] = field(default_factory=Counter)
    kill_seconds: float = 0.0
    damages: int = 0
    inputs: Counter[str] = field(default_factory=Counter)
    concurrent: Counter[str] = field(default_factory=Counter)
    calls: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)

    def add(self, other: Tally) -> None:
        """Add the counts of a part."""
        for mine, theirs in (
            (self.runs, other.runs),
            (self.kills, other.kills),
            (self.inputs, other.inputs),
            (self.concurrent, other.concurrent),
            (self.calls, other.calls),
        ):
            mine.update(theirs)
        self.pipelines |= other.pipelines
        self.kill_seconds += other.kill_seconds
        self.damages += other.damages
        self.failures += other.failures

    def __str__(self) -> str:
        counts = {
            "kills": self.kills,
            "runs": self.runs,
            "inputs": self.inputs,
            "concurrent runs": self.concurrent,
            "kernel calls": self.calls,
        }
        return ", ".join(f"{count.total()} {name}" for name, count in counts.items())
