"""From a recipe to the objects of a run."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import chain

import torch
from torch import nn
from torch.nn.modules.dropout import _DropoutNd

from equipoise.correction import Correction, Estimator
from equipoise.correction.gradients import Gradients
from equipoise.data import Loader, load
from equipoise.errors import UserError
from equipoise.seeds import derive
from equipoise.storage.flat import FlatParameters
from equipoise.topology import Topology
from equipoise.topology.ema import EMA
from equipoise.topology.packing import pack
from equipoise.training.build_model import check_fit, make_model
from equipoise.training.choose_storage import choose_storage
from equipoise.training.engine import CudaEngine, Engine
from equipoise.training.flat_gradients import FlatGradients
from equipoise.training.loaders import AnyLoader, scoring_loaders, training_loader
from equipoise.training.meter import Meter, add_batch
from equipoise.training.passes import Passes
from equipoise.training.precision import packed_precision, prepare_gpu
from equipoise.training.recipe import Recipe
from equipoise.training.run_batches import RunBatches
from equipoise.training.step import Step
from equipoise.training.sync_batchnorm import SyncedBatchNorm, synchronise
from equipoise.world import ALONE, World


@dataclass
class Parts:
    """The objects of a run, made in one place so that a new run and a resumed one are made alike.

    Attributes:
        classes: Names of the classes, by label.
        train: The training images, shuffled and augmented.
        loaders: Every split in order, for scoring.
        flat: The layout of the parameters in masked storage.
    """

    device: torch.device
    model: nn.Module
    optimizer: torch.optim.Optimizer
    topology: Topology
    correction: Correction
    ema: EMA | None
    classes: tuple[str, ...]
    train: AnyLoader
    loaders: dict[str, AnyLoader]
    flat: FlatParameters | None
    engine: Engine
    batches: RunBatches
    passes: Passes
    meter: Meter
    step: Step

    @property
    def judged_on(self) -> str:
        """The split that epochs are scored on: the held-out images if there are any, else the test images."""
        return "validation" if "validation" in self.loaders else "test"


def make_parts(
    recipe: Recipe,
    world: World = ALONE,
    engine: Engine | None = None,
    on_startup: Callable[[float], None] = lambda seconds: None,
) -> Parts:
    """Make the objects of a run.

    Args:
        recipe: The recipe.
        world: The processes that train together.
        engine: Runs the steps; chosen from recipe and device by default.
        on_startup: Called with seconds that an engine spends on compiling and capturing.
    """
    device = find_device(recipe.device) if world.alone else world.device
    splits = load(recipe.data.name, recipe.data.root, recipe.data.validation, recipe.seed, recipe.data_options)
    torch.manual_seed(derive(recipe.seed, "model"))
    model = synchronise(make_model(recipe, splits), world).to(device)
    world.broadcast(chain(model.parameters(), model.buffers()))  # processors may round differently
    if device.type == "cuda":
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    train = training_loader(recipe, splits.train, device, world)
    check_fit(model, recipe, train, len(splits.classes), device)
    prepare_gpu(recipe.precision, device)  # now: the convolutions of one image need not be measured
    packed = choose_storage(recipe, model, device) == "packed"
    if packed:
        model = pack(model, recipe.topology, packed_precision(recipe.precision))
    engine = engine or choose_engine(recipe, model, train, device, world, on_startup)
    groups = recipe.optimizer.groups(model)
    flat = None
    if not packed:
        flat = FlatParameters([group["params"] for group in groups])
        groups = [{**group, "params": [s]} for group, s in zip(groups, flat.stretches, strict=True)]
    optimizer = recipe.optimizer.build(groups, engine.captures, engine.compiled)
    topology = Topology(
        recipe.topology,
        model,
        optimizer,
        recipe.epochs * len(train),
        flat=flat,
        world=world,
        compile=engine.compiled,
        hooks=False,
    )
    batches = RunBatches(recipe, model, train, device, world, engine)
    passes = Passes(recipe, model, batches, device, world, engine, flat, topology)
    gradients = Gradients() if flat is None else FlatGradients(passes, flat)
    correction = attach_correction(recipe, model, topology, len(train), gradients)
    ema = EMA(model, recipe.ema, topology, flat, engine.compiled) if recipe.ema else None
    meter = Meter(device, engine.compiled(add_batch))
    step = Step(model, optimizer, topology, correction, ema, train, batches, passes, meter, engine, recipe.clip)
    loaders = scoring_loaders(recipe, splits, device, world)
    return Parts(
        *(device, model, optimizer, topology, correction),
        *(ema, splits.classes, train, loaders, flat),
        *(engine, batches, passes, meter, step),
    )


def choose_engine(
    recipe: Recipe,
    model: nn.Module,
    loader: AnyLoader,
    device: torch.device,
    world: World,
    on_startup: Callable[[float], None],
) -> Engine:
    """The CUDA engine on a GPU, unless the recipe says `eager` or the steps cannot be captured."""
    if recipe.engine == "eager" or device.type != "cuda":
        return Engine()
    if reason := obstacle(recipe, model, loader, world):
        warnings.warn(f"steps run in eager mode, which is slower: {reason}", stacklevel=2)
        return Engine()
    return CudaEngine(device, on_startup=on_startup, communicates=not world.alone)


def obstacle(recipe: Recipe, model: nn.Module, loader: AnyLoader, world: World) -> str:
    """Why the steps of a run cannot be captured; empty if they can."""
    if not world.capturable and any(isinstance(module, SyncedBatchNorm) for module in model.modules()):
        return "BatchNorm communicates inside a pass, which only nccl can do in a CUDA graph"
    if not isinstance(loader, Loader):
        return "the images are not on the device"
    if any(isinstance(module, _DropoutNd) for module in model.modules()):
        return "dropout draws new numbers in every pass"
    if recipe.correction.when == "pays" and recipe.objective.attack_passes and recipe.full_pass != "clean":
        return "a probe cannot attack ahead"
    return ""


def attach_correction(
    recipe: Recipe, model: nn.Module, topology: Topology, batches: int, gradients: Gradients
) -> Correction:
    """The correction of the recipe.

    If the recipe leaves the mode open, it is `replay` if batches are known ahead and their gradients fit in memory,
    else `recompute`. Both have the same g_old and g̃; `replay` estimates the loss coefficient from a tenth of the
    batches.
    """
    estimator, named = recipe.correction, recipe.raw.get("correction")
    is_open = (
        not (isinstance(named, Mapping) and "mode" in named)
        and estimator.corrects
        and estimator.mode == "recompute"
        and estimator.batch_fraction == estimator.step_fraction == 1
        and not recipe.objective.attack_passes
        and not recipe.as_published.raw_full_pass
    )

    def attach(estimator: Estimator) -> Correction:
        return estimator.attach(
            model,
            topology,
            recipe.epochs * batches,
            recipe.seed,
            world=topology.world,
            cost=relative_cost(recipe, estimator),
            gradients=gradients,
            bn_trace=recipe.as_published.bn_trace,
        )

    if is_open:
        replaying = attach(replace(estimator, mode="replay"))
        if topology.world.all(replaying.estimate_cost(batches).fits(replaying.device)):
            return replaying
    return attach(estimator)


def relative_cost(recipe: Recipe, estimator: Estimator) -> float:
    """Passes of an epoch relative to those without correction, attacks included.

    A forward pass counts 1, a backward pass 2, and a backward pass to the images alone, as in an attack, 1.
    """
    own = 3 * recipe.loss_passes
    attack = 2 * recipe.objective.attack_passes
    extra = own * (estimator.cost - 1)
    if recipe.full_pass == "adversarial" and estimator.mode == "recompute":
        extra += attack
    return 1 + extra / (own + attack)


def find_device(name: str) -> torch.device:
    """The device of a recipe."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    kind, _, number = name.partition(":")
    if name != "cpu" and (kind != "cuda" or (number and not number.isdecimal()) or name.endswith(":")):
        raise UserError(f'no device is called "{name}"; there is auto, cpu, cuda, cuda:0, ...')
    if kind == "cuda" and int(number or 0) >= torch.cuda.device_count():
        raise UserError(f"device={name}, but torch finds {torch.cuda.device_count()} GPUs here; use device=cpu")
    return torch.device(name)
