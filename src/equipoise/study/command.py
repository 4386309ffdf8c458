"""What `equipoise study` does with its options."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from equipoise.errors import UserError
from equipoise.study.launch import here, processes
from equipoise.study.runner import jobs_of, run_study, state
from equipoise.study.study import packaged_studies, read_design, read_study


def study_command(
    file: str | None,
    results: Path,
    work: Path,
    data: Path | None,
    jobs: int,
    only: Sequence[str],
    seeds: str,
    list_only: bool,
    reproduction: Path | None,
    console: Console,
) -> bool:
    """Run, list, or write the page; whether all went well."""
    if reproduction is not None:
        from equipoise.study.reproduction import write_page

        write_page(results, reproduction)
        console.print(f"written: {reproduction}")
        return True
    if file is None:
        for name in packaged_studies():
            console.print(f"{name:<28}{read_design(name).title}")
        return True
    design = read_study(file)
    chosen = jobs_of(design, results, work, list(dict.fromkeys(only)), parse_seeds(seeds), data)
    if list_only:
        for job in chosen:
            console.print(f"{job}: {state(job)}")
        return True
    launcher = here if jobs == 1 else processes(jobs)
    return run_study(design, chosen, results, launcher, console.print)


def parse_seeds(text: str) -> list[int]:
    """`0,1` as numbers; nothing is all of them."""
    words = [word.strip() for word in text.split(",")] if text else []
    wrong = [word for word in words if not (word.isascii() and word.isdecimal() and len(word) < 19)]
    if wrong:
        raise UserError(f'--seeds {text}: "{wrong[0]}" is not a seed; write them as 0,1')
    return list(dict.fromkeys(map(int, words)))
