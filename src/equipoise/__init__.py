"""Train neural networks that are sparse from the first step to the last, with adaptive gradient correction.

import equipoise as eq

topology = eq.RigL(sparsity=0.9).attach(model, optimizer, total_steps=steps)
agent = eq.Agent(gamma=0.1).attach(model, topology)
topology, schedule = eq.fast(model, optimizer, sparsity=0.99, steps=steps)
network = eq.load("exported.safetensors")
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from equipoise.api import *  # noqa: F403

__version__ = "0.1.0.dev0"


def __getattr__(name: str) -> Any:
    """Load the public names at the first use of one, so that the command line starts before torch is imported."""
    api = import_module("equipoise.api")
    if hasattr(api, name):
        return getattr(api, name)
    if name in globals():  # a subpackage that `api` has imported
        return globals()[name]
    raise AttributeError(f"module 'equipoise' has no attribute '{name}'")


def __dir__() -> list[str]:
    api = import_module("equipoise.api")
    return sorted({*globals(), *api.__all__})
