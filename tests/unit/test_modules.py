"""Helpers for modules."""

import pytest
import torch
from torch import nn

from equipoise.modules import preserved_modes, preserved_values


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


def test_values_are_restored_in_place_also_after_an_error() -> None:
    norm = nn.BatchNorm1d(3)
    mean = norm.running_mean
    assert mean is not None

    def change_and_fail() -> None:
        with preserved_values(norm.buffers()):
            norm(torch.randn(4, 3))
            assert mean.any()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        change_and_fail()
    assert norm.running_mean is mean
    assert not mean.any()
    assert norm.num_batches_tracked == 0
