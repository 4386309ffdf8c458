"""Checks of option values."""

import pytest

from equipoise.checks import require_whole
from equipoise.errors import UserError


def test_whole_numbers_pass() -> None:
    require_whole(width=1, depth=2**70)
    require_whole(least=0, pad=0)


@pytest.mark.parametrize("value", [0, -1, True, 1.0, "1", None])
def test_the_wrong_value_is_named(value: object) -> None:
    with pytest.raises(UserError) as error:
        require_whole(width=3, depth=value)
    assert str(error.value) == f"depth={value!r} must be a whole number of at least 1"
