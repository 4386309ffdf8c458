"""Helpers that import whole frameworks, for the tests that use them: an import takes seconds."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest

from torchvision_stub import stubbed_torchvision


@pytest.fixture(scope="session")
def lit() -> Any:
    """`lightning_helpers`."""
    return import_module("lightning_helpers")


@pytest.fixture(scope="session")
def hf() -> Any:
    """`transformers_helpers`."""
    return import_module("transformers_helpers")


@pytest.fixture(scope="session")
def timm() -> Any:
    """The package timm."""
    with stubbed_torchvision():
        return pytest.importorskip("timm")
