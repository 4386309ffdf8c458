"""What `equipoise measure` and `equipoise theory` do."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from torch import Tensor

from equipoise.analysis.descent import trajectories
from equipoise.analysis.descent_figure import draw_descent
from equipoise.analysis.theory import Setting
from equipoise.display.measure_tables import (
    along_table,
    cost_line,
    cost_table,
    gradient_table,
    sample_line,
    significant,
)
from equipoise.display.tables import make_table
from equipoise.errors import UserError
from equipoise.files import write_whole
from equipoise.training import Trainer, checkpoint
from equipoise.training.measure import measure_trainer
from equipoise.training.run_cost import measure_cost
from equipoise.training.run_folder import read_epochs, strict_json

MU = 0.25  # Reddi et al.'s, where the smoothness L is not given


def measure_command(
    run: Path,
    trainer: Trainer,
    batches: int,
    noise: float,
    draws: int,
    against: str | None,
    as_json: bool,
    console: Console,
) -> None:
    """Measure a run where it stands, show it, and leave it in the run's measure.json."""
    old = None if against is None else weights_at(trainer, find_checkpoint(run, against))
    gradients = measure_trainer(trainer, batches, noise, old=old, draws=draws)
    cost = measure_cost(trainer)
    found = {"version": 1, "epoch": trainer.epoch, "against": against, "gradients": gradients, "cost": cost}
    text = strict_json(found, indent=2)
    write_whole(run / "measure.json", (text + "\n").encode())
    if as_json:
        print(text)
        return
    other = f"noise {noise:g} ({draws} draws)" if against is None else against
    title = f"{run}, epoch {trainer.epoch}, {gradients['batches']} of {gradients['of']} batches, against {other}"
    console.print(gradient_table(gradients, title))
    if line := sample_line(gradients):
        console.print(line)
    console.print()
    console.print(cost_table(cost, gradients["c_star_by_layer"], "Cost, a multiply-add counting 2"))
    console.print(cost_line(cost))
    _show_way(run / "measure.jsonl", console)


def _show_way(file: Path, console: Console) -> None:
    """What was measured while the run trained, where anything was."""
    lines = read_epochs(file)
    if not lines:
        return
    try:
        table = along_table(lines, "On the way, against the weights of an epoch before")
    except (LookupError, TypeError, ValueError) as error:
        raise UserError(f"{file} is not as equipoise writes it: {error!r}") from None
    console.print()
    console.print(table)


def find_checkpoint(run: Path, name: str) -> Path:
    """A file, or the name of a checkpoint in the run's folder, such as `best`."""
    inside = run / "checkpoints" / f"{name.removesuffix('.safetensors')}.safetensors"
    return inside if inside.is_file() else Path(name)


def weights_at(trainer: Trainer, path: Path) -> dict[str, Tensor]:
    """The weights of another checkpoint of the recipe, in the storage of the run; the trainer stays where it is."""
    state = checkpoint.load(path)
    here = copy.deepcopy(trainer.state_dict())
    trainer.load_state_dict(state)
    weights = copy.deepcopy(trainer.parts.model.state_dict())
    trainer.load_state_dict(here)
    return weights


@contextmanager
def _computing() -> Iterator[None]:
    """Numbers that overflow, or vanish where they divide, are wrong input."""
    try:
        yield
    except ArithmeticError as error:
        raise UserError(f"the numbers are too large or too small to compute with ({error})") from None


@_computing()
def make_setting(smoothness: float | None, eta: float, c: float, n: int, samples: int, alpha: float) -> Setting:
    """The numbers of the theory; L is the one of mu = 1/4 where it is not given."""
    if smoothness is None:
        if not (eta > 0 and samples > 0):
            raise UserError(f"eta is {eta} and N {samples}; both must be above 0")
        smoothness = MU * max(n, 1) / (eta * samples**alpha)
    return Setting(smoothness, eta, n, samples, c, alpha)


def theory_command(setting: Setting, gap: float, sigma: float, steps: int, out: Path, console: Console) -> None:
    """The numbers of Theorem 1 for AGENT beside those of SVRG and SGD, and the small problem's curves."""
    if steps < 1 or not (0 <= gap < math.inf and 0 <= sigma < math.inf):
        raise UserError(
            f"steps={steps}, gap={gap}, sigma={sigma}: steps are at least 1, the others finite and not negative"
        )
    arms = {f"AGENT, c = {setting.coefficient:g}": setting, "SVRG": setting.svrg(), "SGD": setting.sgd()}
    with _computing():
        columns = [_column(arm, gap, sigma, steps) for arm in arms.values()]
    rows = [[name, *(column[name] for column in columns)] for name in columns[0]]
    title = (
        f"Theorem 1: L {setting.smoothness:.4g}, eta {setting.step_size:g}, n {setting.batch_size}, "
        f"N {setting.samples}, alpha {setting.alpha:.4g}, gap {gap:g}, sigma {sigma:g}, {steps} steps"
    )
    draw_descent(trajectories(), out)
    console.print(make_table(["", *arms], rows, title))
    if not setting.admissible:
        console.print("Theorem 1 says nothing here: it needs mu < 1 and nu > 0; a smaller eta or L helps")
    console.print(f"AGENT, SVRG and SGD on a small non-convex problem, with their bounds: {out}")


def _column(setting: Setting, gap: float, sigma: float, steps: int) -> dict[str, str]:
    """One method's numbers; a bound only where there is one."""
    numbers: dict[str, Any] = {
        "mu": setting.mu,
        "m, steps of an epoch": setting.steps_per_epoch,
        "nu (SVRG's is nu*)": setting.nu,
        "first term": None,
        "second term": None,
        "bound on the mean of |grad|²": None,
    }
    if setting.phi > 0:
        bound = setting.bound(gap, sigma, steps)
        numbers |= dict(zip(list(numbers)[3:], (*bound, bound.total), strict=True))
    return {name: "none" if value is None else significant(value) for name, value in numbers.items()}
