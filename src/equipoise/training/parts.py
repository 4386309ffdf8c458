"""From a recipe to the objects of a run."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from equipoise.config import parameters_of
from equipoise.correction import Correction, Estimator
from equipoise.data import Folder, FolderLoader, Images, Loader, ResizedCrop, Splits, load
from equipoise.data.order import Order
from equipoise.errors import UserError
from equipoise.kernels import library as kernels
from equipoise.models import MODELS, Normalize
from equipoise.seeds import derive
from equipoise.topology import Topology
from equipoise.topology.ema import EMA
from equipoise.topology.initial import plan_layers
from equipoise.topology.packing import pack, why_not
from equipoise.training.recipe import Recipe
from equipoise.training.sync_batchnorm import synchronise
from equipoise.world import ALONE, World

AnyLoader = Loader | FolderLoader


@dataclass
class Parts:
    """All that training holds, made in one place so that a fresh run and a resumed one are made alike."""

    device: torch.device
    model: nn.Module
    optimizer: torch.optim.Optimizer
    topology: Topology
    correction: Correction
    average: EMA | None
    train: AnyLoader  # shuffled and augmented
    loaders: dict[str, AnyLoader]  # every split as it is, to score on

    @property
    def judged_on(self) -> str:
        """The split that epochs are judged on: the held-out images where there are any, else the test images."""
        return "validation" if "validation" in self.loaders else "test"


def make_parts(recipe: Recipe, world: World = ALONE) -> Parts:
    device = find_device(recipe.device) if world.alone else world.device
    splits = load(recipe.data.name, recipe.data.root, recipe.data.validation, recipe.seed)
    torch.manual_seed(derive(recipe.seed, "model"))
    prepare_gpu(recipe, device)
    model = synchronise(make_model(recipe, splits), world).to(device)
    world.broadcast(chain(model.parameters(), model.buffers()))  # processors may round differently
    if device.type == "cuda":
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    train = training_loader(recipe, splits.train, device, world)
    check_fit(model, train, len(splits.classes), device)
    if choose_storage(recipe, model, device) == "packed":
        model = pack(model, recipe.topology)
    optimizer = recipe.optimizer.build(model)
    total = recipe.epochs * len(train)
    topology = recipe.topology.attach(model, optimizer, total)
    topology.join(world)
    correction = attach_correction(recipe, model, topology, len(train), world)
    average = EMA(model, recipe.ema, topology) if recipe.ema else None
    loaders = scoring_loaders(recipe, splits, device, world)
    return Parts(device, model, optimizer, topology, correction, average, train, loaders)


PACKED_FROM = 0.9  # sparsity


def choose_storage(recipe: Recipe, model: nn.Module, device: torch.device) -> str:
    """What the recipe says or, where it leaves it open, packed on a CPU where that is the faster one."""
    algorithm = recipe.topology
    if recipe.storage == "masked" or algorithm.sparsity == 0:
        return "masked"
    if obstacle := _unpackable(recipe, model, device):
        if recipe.storage == "packed":
            raise UserError(f"storage=packed: {obstacle}; use storage=masked")
        return "masked"
    if recipe.storage == "packed":
        return "packed"
    layers = plan_layers(algorithm, model)
    density = sum(layer.initial for layer in layers) / sum(layer.weight.numel() for layer in layers)
    if density > 1 - PACKED_FROM + 1e-3:  # counts are rounded
        return "masked"
    if not kernels.available():
        warnings.warn(f"weights are stored masked, which is slower: {kernels.reason()}", stacklevel=2)
        return "masked"
    return "packed"


def _unpackable(recipe: Recipe, model: nn.Module, device: torch.device) -> str | None:
    if device.type != "cpu":
        return f"the kernels are for a CPU, and the device is {device}"
    if recipe.precision == "bf16":
        return "the kernels are for float32, and the precision is bf16"
    if getattr(recipe.topology, "growth", "batch") == "corrected":
        return 'growth="corrected" needs old gradients of inactive weights'
    return why_not(model, recipe.topology)


def attach_correction(
    recipe: Recipe, model: nn.Module, topology: Topology, batches: int, world: World = ALONE
) -> Correction:
    """The recipe's correction; where it leaves the way open, by the cheapest that gives the same estimate.

    That is `replay` if batches are known ahead and it fits, and `running` where an attack makes them at their step,
    unless the recipe asks for a full pass by naming what it is computed on.
    """
    estimator, named = recipe.correction, recipe.raw.get("correction")
    said = isinstance(named, Mapping) and "mode" in named
    possible = (
        estimator.corrects
        and estimator.mode == "recompute"
        and estimator.batch_fraction == estimator.step_fraction == 1
    )

    def attach(chosen: Estimator) -> Correction:
        cost = relative_cost(recipe, chosen)
        return chosen.attach(model, topology, recipe.epochs * batches, recipe.seed, world=world, cost=cost)

    if possible and not said and recipe.objective.attack_passes:
        if "full_pass" not in recipe.raw:
            estimator = replace(estimator, mode="running")
    elif possible and not said:
        replaying = attach(replace(estimator, mode="replay"))
        if topology.world.all(replaying.estimate_cost(batches).fits(replaying.device)):
            return replaying
    return attach(estimator)


def relative_cost(recipe: Recipe, estimator: Estimator) -> float:
    """Passes of an epoch as a multiple of those without correction, attacks included.

    A forward pass counts 1, a backward pass 2, and one to the images alone, as an attack makes it, 1.
    """
    own = 3 * recipe.objective.loss_passes
    attack = 2 * recipe.objective.attack_passes
    extra = own * (estimator.cost - 1)
    if recipe.full_pass == "adversarial" and estimator.mode == "recompute":
        extra += attack
    return 1 + extra / (own + attack)


def find_device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    kind, _, number = name.partition(":")
    if name != "cpu" and (kind != "cuda" or (number and not number.isdecimal()) or name.endswith(":")):
        raise UserError(f'no device is called "{name}"; there is auto, cpu, cuda, cuda:0, ...')
    if kind == "cuda" and int(number or 0) >= torch.cuda.device_count():
        raise UserError(f"device={name}, but torch finds {torch.cuda.device_count()} GPUs here; use device=cpu")
    return torch.device(name)


def make_model(recipe: Recipe, splits: Splits) -> nn.Module:
    """The model for the dataset's classes, channels and image size, normalising by its statistics if it is to."""
    factory = MODELS[recipe.model]
    known = parameters_of(factory)
    options = {"classes": len(splits.classes), "channels": len(splits.mean), **recipe.model_options}
    if "size" in known and isinstance(splits.train, Images):
        options.setdefault("size", splits.train.images.shape[-1])
    try:
        model = factory(**options)
    except (UserError, RuntimeError, TypeError, MemoryError) as error:
        raise UserError(f"model: {' '.join(str(error).split())[:200]}") from None
    normalize = getattr(model, "normalize", None)
    if isinstance(normalize, Normalize) and recipe.data.normalize:
        normalize.set(splits.mean, splits.std)
    return model


@torch.no_grad()
def check_fit(model: nn.Module, loader: AnyLoader, classes: int, device: torch.device) -> None:
    """Show the model one image: one that it cannot take is found before the run begins, not at its first step."""
    shape = (3, loader.size, loader.size) if isinstance(loader, FolderLoader) else loader.batch(0, 0)[0].shape[1:]
    model.eval()
    try:
        logits = model(torch.zeros(1, *shape, device=device))
    except RuntimeError as error:
        size = "x".join(map(str, shape))
        raise UserError(f"model: it does not take images of {size}: {' '.join(str(error).split())[:200]}") from None
    model.train()
    if logits.shape[1] < classes:
        raise UserError(f"model: classes={logits.shape[1]}, and the data has {classes}")
    if _has_single_image(loader.order) and any(isinstance(module, _BatchNorm) for module in model.modules()):
        raise UserError("data: a batch has one image, which BatchNorm cannot normalise; set data.drop_last=true")


def _has_single_image(order: Order) -> bool:
    return order.batch == 1 or (order.count % order.batch == 1 and not order.drop_last)


def training_loader(recipe: Recipe, part: Images | Folder, device: torch.device, world: World = ALONE) -> AnyLoader:
    """The training images, in a new order and augmented anew in every epoch; this process's share of each batch."""
    data = recipe.data
    common: dict[str, Any] = {
        "batch": data.batch,
        "seed": derive(recipe.seed, "data"),
        "drop_last": data.drop_last,
        "device": device,
        "fixed_batches": recipe.correction.fixed_batches,
        "rank": world.rank,
        "ranks": world.size,
    }
    if isinstance(part, Folder):
        return FolderLoader(part, augment=ResizedCrop(), size=data.size, workers=data.workers, **common)
    return Loader(part, augment=data.augment, **common)


def scoring_loaders(
    recipe: Recipe, splits: Splits, device: torch.device, world: World = ALONE
) -> dict[str, AnyLoader]:
    """`train`, `test` and, where images are held out, `validation`: all images in order, none augmented.

    Of several processes each has its share of the images: every so-many-th, so that the shares of the first n images
    are the first of each share.
    """
    data = recipe.data
    common: dict[str, Any] = {"batch": data.test_batch, "shuffle": False, "device": device}
    parts = {"train": splits.train, "validation": splits.validation, "test": splits.test}
    loaders: dict[str, AnyLoader] = {}
    for name, part in parts.items():
        if part is None:
            continue
        own = part if world.alone else part.subset(torch.arange(world.rank, len(part), world.size))
        if isinstance(own, Folder):
            loaders[name] = FolderLoader(own, size=data.size, workers=data.workers, **common)
        else:
            loaders[name] = Loader(own, **common)
    return loaders


def autocast(recipe: Recipe, device: torch.device) -> AbstractContextManager[None]:
    """bf16 where the recipe asks for it or leaves it open on a GPU."""
    if recipe.precision == "bf16" or (recipe.precision == "auto" and device.type == "cuda"):
        return torch.autocast(device.type, torch.bfloat16)
    return nullcontext()


def prepare_gpu(recipe: Recipe, device: torch.device) -> None:
    """Settings of the process: TF32 unless float32 was asked for, and convolutions by measured speed."""
    if device.type != "cuda":
        return
    exact = recipe.precision == "float32"
    torch.set_float32_matmul_precision("highest" if exact else "high")
    torch.backends.cudnn.allow_tf32 = not exact
    torch.backends.cudnn.benchmark = True
