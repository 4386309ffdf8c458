"""Helpers for modules."""

import pytest
from torch import nn

from equipoise.modules import preserved_modes


@pytest.mark.parametrize("fails", [False, True])
def test_each_module_gets_its_own_mode_back(fails: bool) -> None:
    model = nn.Sequential(nn.Linear(1, 1), nn.BatchNorm1d(1), nn.Sequential(nn.Dropout()))
    model[1].eval()
    before = [module.training for module in model.modules()]
    for change in (model.eval, model.train):
        try:
            with preserved_modes(model):
                change()
                assert len({module.training for module in model.modules()}) == 1
                if fails:
                    raise RuntimeError
        except RuntimeError:
            assert fails
        assert [module.training for module in model.modules()] == before
