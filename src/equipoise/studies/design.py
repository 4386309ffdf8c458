"""Study files: arms x seeds of one recipe, the paper's numbers for the arms and its claims about them."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

from equipoise.catalogue import suggestion
from equipoise.config import build, call, parse_yaml
from equipoise.errors import UserError
from equipoise.scores import ALL_SCORES
from equipoise.studies.metrics import BY_EPOCH, MEASURED, METRICS, SHARES, WINDOW
from equipoise.studies.results import VERSION, Claim, PaperValue, Question, slug
from equipoise.studies.robust import JUDGES
from equipoise.training.build_recipe import import_code, make_recipe
from equipoise.training.recipe_files import apply_overrides, lay_over, read_recipe


@dataclass(frozen=True, kw_only=True)
class Design:
    """A study file.

    Attributes:
        name: The name of the file, without `.yaml`.
        title: The name of the study for readers.
        about: What the study is about, for readers.
        shows: The tables and figures of the paper that the study is about.
        recipe: A recipe and overlays, each a packaged name or a file.
        set: Overrides for all arms.
        arms: Overrides by arm. The key `recipe` takes another recipe for the arm.
        seeds: Seeds of every arm.
        budgets: Numbers of epochs. Every arm is also run with each of them, as `ARM, 100 epochs`, so that complete
            runs of equal cost can be compared.
        robust: The attack on the final weights; `None` for none.
        attacked: How many test images are attacked; 0 for all.
        measure: Whether gradients are measured at the final weights.
        measure_every: Also measure gradients every this many epochs; 0 for never.
        paper: The paper's numbers.
        claims: The paper's statements about the arms, and controls.
    """

    name: str
    title: str
    arms: Mapping[str, Mapping[str, Any]]
    about: str = ""
    shows: Sequence[str] = ()
    recipe: str | Sequence[str] = ()
    set: Mapping[str, Any] = field(default_factory=dict)
    seeds: Sequence[int] = (0,)
    budgets: Sequence[int] = ()
    robust: str | None = None
    attacked: int = 0
    measure: bool = False
    measure_every: int = 0
    paper: Sequence[PaperValue] = ()
    claims: Sequence[Claim] = ()

    def __post_init__(self) -> None:
        if not self.arms or not self.seeds:
            raise UserError("a study has at least one arm and one seed")
        if len({*self.seeds}) < len(self.seeds) or min(self.seeds) < 0:
            raise UserError(f"seeds={list(self.seeds)}: distinct whole numbers, at least 0")
        if len({*self.budgets}) < len(self.budgets) or min(self.budgets, default=1) < 1:
            raise UserError(f"budgets={list(self.budgets)}: distinct numbers of epochs, at least 1")
        if self.robust is not None:
            JUDGES[self.robust]
        if self.attacked < 0:
            raise UserError(f"attacked={self.attacked}: the number of attacked images, 0 for all")
        if self.measure_every < 0 or (self.measure_every and not self.measure):
            raise UserError(f"measure_every={self.measure_every}: epochs, 0 for never; it needs `measure: true`")
        seen: dict[str, str] = {}
        for arm in self.every_arm:
            if (other := seen.setdefault(slug(arm), arm)) != arm:
                raise UserError(f'the arms "{other}" and "{arm}" would share their files; rename one')
        for claim in self.claims:
            if claim.better == claim.than:
                raise UserError(f'a claim compares "{claim.better}" with itself')
            self._check(claim, claim.better, claim.than)
        for value in self.paper:
            self._check(value, value.arm)
            if value.metric in SHARES and not 0 <= value.value <= 1:
                raise UserError(f"{value.metric}={value.value} in the paper: write a share, such as 0.505")

    def _check(self, question: Question, *arms: str) -> None:
        """Raise a `UserError` if the results of this study cannot answer a question about these arms."""
        metric, at, threshold = question.metric, question.at, question.threshold
        METRICS[metric]
        for arm in arms:
            if arm not in self.every_arm:
                raise UserError(f'no arm is called "{arm}"{suggestion(arm, list(self.every_arm))}')
        if question.score not in ALL_SCORES:
            raise UserError(f'no score is called "{question.score}"{suggestion(question.score, list(ALL_SCORES))}')
        if at is not None and metric not in BY_EPOCH:
            raise UserError(f"{metric} at epoch {at}: `at` needs a metric of single epochs: {', '.join(BY_EPOCH)}")
        if metric in ("stability", "window-accuracy") and at is not None and at < WINDOW:
            raise UserError(f"{metric} at epoch {at}: it needs {WINDOW} epochs")
        if metric == "epochs-to" and not 0 < (threshold or 0) <= 1:
            raise UserError(f"epochs-to needs a threshold between 0 and 1, such as 0.7, not {threshold}")
        if metric != "epochs-to" and threshold is not None:
            raise UserError(f"{metric} has no threshold; only epochs-to has one")
        if metric in ("clean", "robust") and self.robust is None:
            raise UserError(f"{metric} needs an attack after training, such as `robust: pgd50x10`")
        if metric in MEASURED and not self.measure:
            raise UserError(f"{metric} needs `measure: true`")

    @property
    def every_arm(self) -> dict[str, Mapping[str, Any]]:
        """The arms, followed by the same arms with each budget."""
        more = {_with_budget(arm, b): {**own, "epochs": b} for b in self.budgets for arm, own in self.arms.items()}
        return {**self.arms, **more}

    @property
    def judged(self) -> dict[str, Any]:
        """How the final weights of every run are attacked and measured."""
        attacked = self.attacked if self.robust else 0
        return {"robust": self.robust, "attacked": attacked, "measure": self.measure, "along": self.measure_every}

    def raw(self, arm: str, seed: int) -> dict[str, Any]:
        """Return the recipe of an arm and a seed, as plain values."""
        if arm not in self.every_arm:
            raise UserError(f'{self.name}: no arm is called "{arm}"{suggestion(arm, list(self.every_arm))}')
        own = dict(self.every_arm[arm])
        sources = own.pop("recipe", self.recipe)
        sources = [sources] if isinstance(sources, str) else sources
        if not isinstance(sources, Sequence) or not all(isinstance(source, str) for source in sources):
            raise UserError("recipe: expected a name or a file, or a list of them")
        raw = _override(_override(read_recipe(*sources), self.set), own)
        if "seed" in raw:
            raise UserError("seed: the seeds are those of the study, such as `seeds: [0, 1]`")
        return {**raw, "seed": seed}

    def parts(self) -> Iterator[dict[str, Any]]:
        """Yield the recipes and overrides that the recipes of the arms are made of."""
        yield _override({}, self.set)
        for own in ({"recipe": self.recipe}, *self.arms.values()):
            yield _override({}, {key: value for key, value in own.items() if key != "recipe"})
            sources = own.get("recipe", ())
            yield from map(read_recipe, [sources] if isinstance(sources, str) else sources)

    def to_json(self) -> dict[str, Any]:
        """Return the content of study.json."""
        budgets = {_with_budget(arm, budget): arm for budget in self.budgets for arm in self.arms}
        return {"version": VERSION, **asdict(self), "arms": self.every_arm, "budgets": budgets}


def _with_budget(arm: str, budget: int) -> str:
    return f"{arm}, {budget} epochs"


def _override(raw: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Merge nested keys into a recipe as overlays do, then set dotted keys as the command line does."""
    nested = {key: value for key, value in changes.items() if "." not in str(key)}
    dotted = [f"{key}={json.dumps(value)}" for key, value in changes.items() if key not in nested]
    return apply_overrides(lay_over(raw, nested), dotted)


# Reading


def read_study(source: str, allow_code: bool = False) -> Design:
    """Read a study file and check the recipe of every arm.

    Args:
        source: A `.yaml` file, or the name of a packaged study.
        allow_code: Whether to import the Python code that the study and its recipes name.

    Raises:
        UserError: If the file cannot be read, or a key or value is wrong.
    """
    design = read_design(source)
    if allow_code:
        for part in design.parts():
            import_code(part)
    for arm in design.every_arm:
        where = f"{Path(source).name}, {arm}"
        recipe = call(make_recipe, {"raw": call(design.raw, {"arm": arm, "seed": design.seeds[0]}, where)}, where)
        latest = max([c.at for c in design.claims if c.at and arm in (c.better, c.than)], default=0)
        if latest > recipe.epochs:
            raise UserError(f"{where}: a claim is about epoch {latest} of {recipe.epochs}")
    return design


def read_design(source: str) -> Design:
    """Read a study file like `read_study`, without the check of the recipes."""
    raw = parse_yaml(_text(source), source)
    if not isinstance(raw, Mapping):
        raise UserError(f"{source}: expected keys and values, with `title` and `arms` among them")
    if "name" in raw:
        raise UserError(f"{source}: the name of a study is that of its file; `title` is for readers")
    raw = _with_recipe_paths(raw, source)
    if isinstance(raw.get("arms"), dict):
        raw["arms"] = {name: _with_recipe_paths(arm, source) for name, arm in raw["arms"].items()}
    return build(Design, {**raw, "name": Path(source).stem}, Path(source).name)


def _with_recipe_paths(part: Any, source: str) -> Any:
    """Take recipe files relative to the folder of the study."""
    if not isinstance(part, Mapping) or "recipe" not in part:
        return part

    def placed(recipe: Any) -> Any:
        is_file = isinstance(recipe, str) and recipe.endswith((".yaml", ".yml"))
        return os.path.normpath(Path(source).parent / recipe) if is_file else recipe

    recipe = part["recipe"]
    return {**part, "recipe": [placed(item) for item in recipe] if isinstance(recipe, list) else placed(recipe)}


def _text(source: str) -> str:
    if not source.endswith((".yaml", ".yml")):
        if source not in packaged_studies():
            hint = suggestion(source, packaged_studies())
            raise UserError(f'no study is called "{source}" and it is not a .yaml file{hint}')
        return (resources.files("equipoise.studies") / "designs" / f"{source}.yaml").read_text(encoding="utf-8")
    try:
        return Path(source).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read the study {source}: {error}") from None


def packaged_studies() -> list[str]:
    """Return the names of the studies that come with the package."""
    folder = resources.files("equipoise.studies") / "designs"
    return sorted(file.name.removesuffix(".yaml") for file in folder.iterdir() if file.name.endswith(".yaml"))
