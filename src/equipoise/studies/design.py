"""A study: arms x seeds of one recipe, the paper's numbers for them and its claims about them, as strict YAML."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

from equipoise.catalogue import suggestion
from equipoise.config import build, call, parse_yaml, split
from equipoise.errors import UserError
from equipoise.studies.metrics import BY_EPOCH, MEASURED, METRICS, SHARES, WINDOW
from equipoise.studies.results import VERSION, Claim, PaperValue, rounded, slug
from equipoise.studies.robust import JUDGES
from equipoise.training.recipe import apply_overrides, lay_over, make_recipe, read_recipe

SCORES = ("plain", "bn_recalibrated", "ema")


@dataclass(frozen=True, kw_only=True)
class Design:
    """What a study asks for.

    name: of its file. title, about: for people. shows: the tables and figures of the paper it is about.

    recipe: a recipe and overlays, by name or file. set: overrides for all arms. arms: overrides by arm, in which
    `recipe` takes another recipe. seeds. budgets: numbers of epochs; beside its own, every arm is run with each of
    them, as `ARM, 100 epochs`, so that there are complete runs of equal cost.

    robust: the attack that judges the final weights; attacked: how many test images, 0 is all. measure: whether
    gradients are measured at the final weights; measure_every: also every so many epochs, against the weights of an
    epoch before. paper: its numbers. claims: what it says about them.
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
            raise UserError(f"seeds={list(self.seeds)}: whole numbers from 0 on, each once")
        if len({*self.budgets}) < len(self.budgets) or min(self.budgets, default=1) < 1:
            raise UserError(f"budgets={list(self.budgets)}: epochs, whole numbers from 1 on, each once")
        if self.robust is not None:
            JUDGES[self.robust]
        if self.attacked < 0:
            raise UserError(f"attacked={self.attacked}: how many images are attacked, 0 for all")
        if self.measure_every < 0 or (self.measure_every and not self.measure):
            raise UserError(f"measure_every={self.measure_every}: epochs, 0 for never, and with `measure: true`")
        self._check_slugs()
        self._check_arms()
        self._check_questions()

    def _check_slugs(self) -> None:
        """Names come from files; what becomes of them in a path is plain, and no two are the same there."""
        seen: dict[str, str] = {}
        for arm in self.every_arm:
            other = seen.setdefault(slug(arm), arm)
            if other != arm:
                raise UserError(f'the arms "{other}" and "{arm}" would share their files; rename one')

    def _check_arms(self) -> None:
        """Numbers and claims are about arms and ways that there are."""
        for named in [value.arm for value in self.paper] + [arm for c in self.claims for arm in (c.better, c.than)]:
            if named not in self.every_arm:
                raise UserError(f'no arm is called "{named}"{suggestion(named, list(self.every_arm))}')
        for score in [value.score for value in self.paper] + [claim.score for claim in self.claims]:
            if score not in SCORES:
                raise UserError(f'no score is called "{score}"; there is {", ".join(SCORES)}')

    def _check_questions(self) -> None:
        """What is asked can be answered by the results that there will be."""
        asked = [(claim.metric, claim) for claim in self.claims] + [(value.what, value) for value in self.paper]
        for metric, question in asked:
            METRICS[metric]
            if question.at is not None and (question.at < 1 or metric not in BY_EPOCH):
                raise UserError(f"{metric} at: {question.at}: epochs count from 1, and are of {', '.join(BY_EPOCH)}")
            if metric == "epochs-to" and not 0 < (question.threshold or 0) <= 1:
                raise UserError(f"epochs-to needs a threshold, a share such as 0.7, not {question.threshold}")
            if metric in ("clean", "robust") and self.robust is None:
                raise UserError(f"{metric} is of an attack after training: name one, such as `robust: pgd50x10`")
            if metric in MEASURED and not self.measure:
                raise UserError(f"{metric} is measured after training only with `measure: true`")
            if metric == "stability" and question.at is not None and question.at < WINDOW:
                raise UserError(f"stability at: {question.at}: it looks at {WINDOW} epochs together")
            if metric != "epochs-to" and question.threshold is not None:
                raise UserError(f"{metric} has no threshold; epochs-to has")
        for value in self.paper:
            if value.what in SHARES and not 0 <= value.value <= 1:
                raise UserError(f"{value.what} of {value.value} in the paper: write a share, such as 0.505")
        for claim in self.claims:
            if claim.better == claim.than:
                raise UserError(f'a claim sets "{claim.better}" beside itself')
            if claim.margin < 0:
                raise UserError(f"margin={claim.margin}: by how much the first may be worse, from 0 on")

    @property
    def every_arm(self) -> dict[str, Mapping[str, Any]]:
        """The arms, and after them the same with each budget."""
        more = {_at(arm, b): {**own, "epochs": b} for b in self.budgets for arm, own in self.arms.items()}
        return {**self.arms, **more}

    def raw(self, arm: str, seed: int) -> dict[str, Any]:
        """The recipe of an arm and a seed."""
        if arm not in self.every_arm:
            raise UserError(f'{self.name}: no arm is called "{arm}"{suggestion(arm, list(self.every_arm))}')
        own = dict(self.every_arm[arm])
        sources = own.pop("recipe", self.recipe)
        sources = [sources] if isinstance(sources, str) else sources
        if not isinstance(sources, Sequence) or not all(isinstance(source, str) for source in sources):
            raise UserError("recipe is a name or a file, or a list of them")
        raw = override(override(read_recipe(*sources), self.set), own)
        if "seed" in raw:
            raise UserError("seeds are the study's, such as `seeds: [0, 1]`")
        return {**raw, "seed": seed}

    def asked(self) -> dict[str, Any]:
        """What is kept beside the results."""
        budgets = {_at(arm, budget): arm for budget in self.budgets for arm in self.arms}
        return {"version": VERSION, **asdict(self), "arms": self.every_arm, "budgets": budgets}


def _at(arm: str, budget: int) -> str:
    return f"{arm}, {budget} epochs"


def override(raw: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Lay nested keys over a recipe, as overlays do, then set dotted ones, as the command line does."""
    nested = {key: value for key, value in changes.items() if "." not in str(key)}
    dotted = [f"{key}={json.dumps(value)}" for key, value in changes.items() if key not in nested]
    return apply_overrides(lay_over(raw, nested), dotted)


# Reading


def read_study(source: str) -> Design:
    """A study by file, or by name among those that come with the package; the recipe of every arm is made once."""
    design = read_design(source)
    for arm in design.every_arm:
        where = f"{Path(source).name}, {arm}"
        recipe = call(make_recipe, {"raw": call(design.raw, {"arm": arm, "seed": design.seeds[0]}, where)}, where)
        late = [
            c.at for c in design.claims if arm in (c.better, c.than) and c.at is not None and c.at > recipe.epochs
        ]
        if late:
            raise UserError(f"{where}: a claim is about epoch {late[0]}, and it has {recipe.epochs}")
    return design


def read_design(source: str) -> Design:
    """The same without a look at the recipes."""
    raw = parse_yaml(_text(source), source)
    if not isinstance(raw, Mapping):
        raise UserError(f"{source}: a study is keys and values, with `title` and `arms` among them")
    if "name" in raw:
        raise UserError(f"{source}: a study is called as its file is; `title` is for people")
    return build(Design, {**_beside(raw, source), "name": Path(source).stem}, Path(source).name)


def _beside(raw: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Recipe files are named from where the study lies."""

    def placed(recipe: Any) -> Any:
        if isinstance(recipe, list):
            return [placed(item) for item in recipe]
        is_file = isinstance(recipe, str) and recipe.endswith((".yaml", ".yml"))
        return os.path.normpath(Path(source).parent / recipe) if is_file else recipe

    def moved(part: Any) -> Any:
        return {**part, "recipe": placed(part["recipe"])} if isinstance(part, Mapping) and "recipe" in part else part

    arms = raw.get("arms")
    result: dict[str, Any] = moved(raw)
    return (
        {**result, "arms": {name: moved(arm) for name, arm in arms.items()}} if isinstance(arms, dict) else {**result}
    )


def _text(source: str) -> str:
    if not source.endswith((".yaml", ".yml")):
        if source not in packaged_studies():
            hint = suggestion(source, packaged_studies())
            raise UserError(f'no study is called "{source}" and it is no .yaml file{hint}')
        return (resources.files("equipoise.studies") / "designs" / f"{source}.yaml").read_text(encoding="utf-8")
    try:
        return Path(source).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read the study {source}: {error}") from None


def packaged_studies() -> list[str]:
    """The names of the studies that come with the package."""
    folder = resources.files("equipoise.studies") / "designs"
    return sorted(file.name.removesuffix(".yaml") for file in folder.iterdir() if file.name.endswith(".yaml"))


# Comparing


def same_recipe(asked: Mapping[str, Any], found: Mapping[str, Any]) -> bool:
    """Whether a run of one recipe stands for the other.

    Where the data lies, on which device it runs and when it saves do not matter; a mode of the correction or a storage
    that was left open may have been chosen.
    """
    left, right = _essence(asked), _essence(found)
    if "mode" not in left["correction"]:
        right["correction"].pop("mode", None)
    if left.get("storage", "auto") == "auto":
        right.pop("storage", None)
        left.pop("storage", None)
    return left == right


def _essence(raw: Mapping[str, Any]) -> dict[str, Any]:
    essence = {key: value for key, value in raw.items() if key not in ("device", "checkpoint")}
    for part in ("data", "correction"):
        name, options = split(essence.get(part, "sgd" if part == "correction" else "digits"), part)
        essence[part] = {"name": name, **{key: value for key, value in options.items() if key != "root"}}
    return dict(rounded(essence))  # as results are written
