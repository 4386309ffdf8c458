"""Recipes: everything that a run is made of, as strict YAML."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Annotated, Any, Literal

from equipoise.catalogue import Catalogue
from equipoise.config import parameters_of
from equipoise.correction import CORRECTIONS, Estimator
from equipoise.data import DATASETS, Augment
from equipoise.errors import UserError
from equipoise.lr_schedule import SCHEDULES, Schedule
from equipoise.models import MODELS
from equipoise.objectives import OBJECTIVES, Objective
from equipoise.topology import ALGORITHMS, Algorithm
from equipoise.training.optimizers import OPTIMIZERS, OptimizerOptions
from equipoise.training.published import PublishedOptions
from equipoise.training.rollback import RollbackOptions

CATALOGUES: dict[str, Catalogue[Any]] = {
    "model": MODELS,
    "data": DATASETS,
    "topology": ALGORITHMS,
    "objective": OBJECTIVES,
    "correction": CORRECTIONS,
    "optimizer": OPTIMIZERS,
    "schedule": SCHEDULES,
}

DEFAULT_NAMES = {
    "model": "small",
    "data": "digits",
    "topology": "dense",
    "objective": "standard",
    "correction": "sgd",
    "optimizer": "sgd",
    "schedule": "piecewise",
}

MODEL_OPTIONS_OF_DATA = ("classes", "num_classes", "channels", "in_chans", "size")
"""Options of models that a run takes from its data, unless the recipe sets them. timm uses the second and fourth."""


@dataclass(frozen=True, kw_only=True)
class DataOptions:
    """The dataset and how its images are read.

    Args:
        name: A dataset of the catalogue.
        root: Folder of its files.
        batch: Images per training step.
        test_batch: Images per batch in evaluations.
        validation: Number of training images that are held out.
        augment: Random crops, shifts and flips of the training images; `null` for none.
        normalize: Whether the first layer of the model scales pixels to mean 0 and deviation 1. BSR-Net leaves them
            in [0, 1].
        drop_last: Whether the incomplete last batch of an epoch is left out.
        size: Side of the square images that are cut from image folders.
        workers: Processes that read image folders.
    """

    name: str = "digits"
    root: str = "data"
    batch: int = 128
    test_batch: int = 500
    validation: int = 0
    augment: Augment | None = None
    normalize: bool = True
    drop_last: bool = False
    size: int = 224
    workers: int = 2

    def __post_init__(self) -> None:
        DATASETS[self.name]
        for name in ("batch", "test_batch"):
            if getattr(self, name) < 1:
                raise UserError(f"{name}={getattr(self, name)}: at least one image")


@dataclass(frozen=True, kw_only=True)
class CheckpointOptions:
    """When checkpoints are written and how many are kept.

    Args:
        every: Epochs between checkpoints.
        steps: Also write one every `steps` steps; 0 for never.
        keep: Number of checkpoints that are kept.
        best: Also write and keep a checkpoint of the best epoch so far.
    """

    every: int = 1
    steps: int = 0
    keep: int = 2
    best: bool = True

    def __post_init__(self) -> None:
        if self.every < 1 or self.keep < 1 or self.steps < 0:
            raise UserError("every and keep are at least 1, steps at least 0")


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """What to train and how.

    Args:
        model: Name of a model of the catalogue.
        model_options: Options of the model.
        data: The dataset and how its images are read.
        data_options: Options of the dataset besides those that all datasets have.
        topology: Which weights exist.
        objective: The loss that is minimised.
        correction: Which gradient is used.
        optimizer: The optimizer and its learning rate.
        schedule: The learning rate over time.
        epochs: Epochs of training.
        seed: The seed of the run. All other seeds are derived from it.
        precision: `auto` is bf16 on a GPU and float32 on a CPU. With `float32` a GPU does not use TF32 either. With
            `bf16` a packed model stores the activations between its layers in bf16 and computes in float32.
        engine: `auto` compiles and captures the steps on a GPU; `eager` does not.
        device: `auto`, `cpu`, `cuda` or `cuda:N`.
        storage: `masked` keeps sparse weights as dense tensors with zeros, `packed` as vectors of their active
            values, which the CPU kernels use. `auto` packs on a CPU from 90 % sparsity if the model allows it.
        ema: Decay of the exponential moving average of the weights; 0 for none.
        bn_recalibration_batches: Training batches from which BatchNorm statistics are recomputed at evaluation.
        full_pass: In adversarial training, the images of the full gradient g̃: `clean` as in the paper, or
            `adversarial`, attacked at the snapshot.
        clip: Largest gradient norm; 0 for no clipping.
        weights: File of pretrained weights: a state_dict (`.pt`, `.safetensors`) or an exported network. Reading it
            executes no code. With the topology `{name: static, distribution: nonzeros}` its zeros stay zero.
        checkpoint: When checkpoints are written and how many are kept.
        rollback: What happens if a loss or gradient is not finite.
        as_published: What only the published code of AGENT does, for comparisons with it.
        raw: The mapping that the recipe was made from. It is saved in the run folder.
    """

    model: str
    model_options: Mapping[str, Any]
    data: DataOptions
    data_options: Mapping[str, Any]
    topology: Algorithm
    objective: Annotated[Objective, OBJECTIVES]
    correction: Annotated[Estimator, CORRECTIONS]
    optimizer: Annotated[OptimizerOptions, OPTIMIZERS]
    schedule: Annotated[Schedule, SCHEDULES]
    epochs: int = 10
    seed: int = 0
    precision: Literal["auto", "float32", "bf16"] = "auto"
    engine: Literal["auto", "eager"] = "auto"
    device: str = "auto"
    storage: Literal["auto", "masked", "packed"] = "auto"
    ema: float = 0.995
    bn_recalibration_batches: int = 32
    full_pass: Literal["clean", "adversarial"] = "clean"
    clip: float = 0.0
    weights: str | None = None
    checkpoint: CheckpointOptions = CheckpointOptions()
    rollback: RollbackOptions = field(default_factory=RollbackOptions)
    as_published: PublishedOptions = field(default_factory=PublishedOptions)
    raw: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.epochs < 1:
            raise UserError(f"epochs={self.epochs}: at least 1")
        if not 0 <= self.ema < 1:
            raise UserError(f"ema={self.ema}: the decay of the weight average, at least 0 and below 1")
        if self.bn_recalibration_batches < 1:
            raise UserError(f"bn_recalibration_batches={self.bn_recalibration_batches}: at least 1 batch")
        if self.clip < 0:
            raise UserError(f"clip={self.clip}: the largest gradient norm, 0 for no clipping")
        if self.objective.attack_passes and self.correction.corrects and self.correction.mode == "replay":
            raise UserError("replay needs batches that are known ahead, and attacked ones are not; use mode=running")
        self._check_published()

    def _check_published(self) -> None:
        published, correction = self.as_published, self.correction
        full_pass = correction.corrects and correction.mode in ("recompute", "replay")
        if (published.raw_full_pass or published.bn_trace) and not full_pass:
            raise UserError("as_published: raw_full_pass and bn_trace need a full pass; use correction=agent")
        if published.raw_full_pass and (correction.mode != "recompute" or correction.when != "always"):
            raise UserError("as_published.raw_full_pass needs correction.mode=recompute and correction.when=always")
        if published.raw_full_pass and self.full_pass != "clean":
            raise UserError("as_published.raw_full_pass is on images that are not attacked; use full_pass=clean")

    @property
    def loss_passes(self) -> int:
        """Number of forward passes over the batch in a step, each followed by a backward pass."""
        return self.objective.loss_passes + (self.as_published.raw_gradient > 0)


KEYS = [f.name for f in fields(Recipe) if f.name not in ("model_options", "data_options", "raw")]
"""The keys of a recipe file."""


def model_defaults(model: str) -> dict[str, Any]:
    """Return the default of every option of a model."""
    signature = inspect.signature(MODELS[model]).parameters
    return {name: signature[name].default for name in parameters_of(MODELS[model])}
