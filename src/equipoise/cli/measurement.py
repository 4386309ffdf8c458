"""`equipoise measure` and `theory`."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from equipoise.cli.common import AllowCode, Best, Run, console, open_run
from equipoise.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor

    from equipoise.analysis.theory import Setting
    from equipoise.training import Trainer

MU = 0.25  # of Reddi et al. 2016, for the default of the smoothness L


def measure(
    run: Run,
    best: Best = False,
    batches: Annotated[int, typer.Option(help="Number of training batches, at most those of an epoch.")] = 50,
    noise: Annotated[float, typer.Option(help="Standard deviation of the noise on the weights.")] = 0.015,
    draws: Annotated[int, typer.Option(help="How often the noise is drawn; the numbers are means.")] = 3,
    against: Annotated[
        str | None, typer.Option(help="Another checkpoint instead of noise: a file, or best, step-000000100, ...")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print measure.json instead of tables.")] = False,
    allow_code: AllowCode = False,
) -> None:
    """Measure a checkpoint: variance and correlation of its gradients, c* and ĉ, FLOPs by layer, passes."""
    from equipoise.display.measure_tables import cost_line, cost_table, gradient_table, sample_line
    from equipoise.files import write_whole
    from equipoise.training.measure import measure_trainer
    from equipoise.training.run_cost import measure_cost
    from equipoise.training.run_folder import strict_json

    trainer = open_run(run, best, allow_code=allow_code)
    old = None if against is None else _weights_at(trainer, run, against)
    gradients = measure_trainer(trainer, batches, noise, old=old, draws=draws)
    cost = measure_cost(trainer)
    found = {"version": 1, "epoch": trainer.epoch, "against": against, "gradients": gradients, "cost": cost}
    text = strict_json(found, indent=2)
    write_whole(run / "measure.json", f"{text}\n".encode())
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
    _print_epochs(run / "measure.jsonl")


def _print_epochs(file: Path) -> None:
    """Print the measurements that were made during training, if there are any."""
    from equipoise.display.measure_tables import along_table
    from equipoise.training.run_folder import read_epochs

    lines = read_epochs(file)
    if not lines:
        return
    try:
        table = along_table(lines, "During training, against the weights of one epoch before")
    except (LookupError, TypeError, ValueError) as error:
        raise UserError(f"{file} was not written by equipoise: {error!r}") from None
    console.print()
    console.print(table)


def _weights_at(trainer: Trainer, run: Path, name: str) -> dict[str, Tensor]:
    """Return the weights of another checkpoint, by file or name, in the storage of the run."""
    from equipoise.training import checkpoint

    inside = run / "checkpoints" / f"{name.removesuffix('.safetensors')}.safetensors"
    other = checkpoint.load(inside if inside.is_file() else Path(name))
    current = copy.deepcopy(trainer.state_dict())
    trainer.load_state_dict({**other, "fingerprint": current["fingerprint"]})  # may be a run of another seed
    weights = copy.deepcopy(trainer.parts.model.state_dict())
    trainer.load_state_dict(current)
    return weights


def theory(
    smoothness: Annotated[float | None, typer.Option("--L", help="Smoothness L. Default: L for mu = 1/4.")] = None,
    eta: Annotated[float, typer.Option(help="Step size.")] = 0.1,
    c: Annotated[float, typer.Option(help="Weight of the old gradient; for AGENT, gamma times its c.")] = 0.1,
    n: Annotated[int, typer.Option("--n", help="Batch size.")] = 128,
    samples: Annotated[int, typer.Option("--N", help="Number of samples.")] = 50_000,
    alpha: Annotated[float, typer.Option(help="Exponent of the theorem's step size.")] = 2 / 3,
    gap: Annotated[float, typer.Option(help="Initial loss minus minimal loss.")] = 1.0,
    sigma: Annotated[float, typer.Option(help="Largest norm of the gradient of a sample.")] = 1.0,
    steps: Annotated[int, typer.Option(help="Number of steps that the bounds are for.")] = 100_000,
    out: Annotated[Path, typer.Option(help="Figure of a small problem and its bounds.")] = Path("theory.png"),
) -> None:
    """Evaluate Theorem 1 (nu, nu*, bounds of AGENT, SVRG and SGD), and draw a small problem with its bounds."""
    from equipoise.analysis.descent import trajectories
    from equipoise.analysis.descent_figure import draw_descent
    from equipoise.display.tables import make_table

    if steps < 1 or not (0 <= gap < math.inf and 0 <= sigma < math.inf):
        raise UserError(
            f"steps={steps}, gap={gap}, sigma={sigma}: steps must be at least 1, the others finite and at least 0"
        )
    with _arithmetic():
        setting = _setting(smoothness, eta, c, n, samples, alpha)
        arms = {f"AGENT, c = {setting.coefficient:g}": setting, "SVRG": setting.svrg(), "SGD": setting.sgd()}
        columns = [_column(arm, gap, sigma, steps) for arm in arms.values()]
    rows = [[name, *(column[name] for column in columns)] for name in columns[0]]
    title = (
        f"Theorem 1: L {setting.smoothness:.4g}, eta {setting.step_size:g}, n {setting.batch_size}, "
        f"N {setting.samples}, alpha {setting.alpha:.4g}, gap {gap:g}, sigma {sigma:g}, {steps} steps"
    )
    draw_descent(trajectories(), out)
    console.print(make_table(["", *arms], rows, title))
    if not setting.admissible:
        console.print("Theorem 1 does not apply: it needs mu < 1 and nu > 0; use a smaller eta or L")
    console.print(f"AGENT, SVRG and SGD on a small non-convex problem, with their bounds: {out}")


@contextmanager
def _arithmetic() -> Iterator[None]:
    """Turn overflow and division by zero into a `UserError`."""
    try:
        yield
    except ArithmeticError as error:
        raise UserError(f"the numbers are too large or too small to compute with ({error})") from None


def _setting(smoothness: float | None, eta: float, c: float, n: int, samples: int, alpha: float) -> Setting:
    from equipoise.analysis.theory import Setting

    if smoothness is None:
        if not (eta > 0 and samples > 0):
            raise UserError(f"eta is {eta} and N {samples}; both must be above 0")
        smoothness = MU * max(n, 1) / (eta * samples**alpha)
    return Setting(smoothness, eta, n, samples, c, alpha)


def _column(setting: Setting, gap: float, sigma: float, steps: int) -> dict[str, str]:
    """Format the numbers of one method; there is a bound only if phi > 0."""
    from equipoise.display.measure_tables import significant

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
