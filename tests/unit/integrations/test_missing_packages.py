"""The integrations without the packages they are for."""

from __future__ import annotations

import importlib
import sys

import pytest


@pytest.mark.parametrize("name", ["lightning", "transformers"])
def test_a_missing_package_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    for package in ("lightning", "pytorch_lightning", "transformers"):
        for module in [m for m in sys.modules if m.partition(".")[0] == package]:
            monkeypatch.delitem(sys.modules, module)
        monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.delitem(sys.modules, f"equipoise.integrations.{name}", raising=False)
    with pytest.raises(ModuleNotFoundError, match=rf"is not installed; pip install 'equipoise\[{name}\]'"):
        importlib.import_module(f"equipoise.integrations.{name}")
