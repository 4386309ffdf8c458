"""Numbers of the report."""

from equipoise.report.words import difference, gain_of, number, p_value, value_of
from equipoise.studies.compare import Spread
from equipoise.studies.inference import Effect


def test_numbers_are_formatted_for_people() -> None:
    assert value_of("epochs-to", Spread(21.0, 7.0711, 2)) == "21 ± 7.1"
    assert value_of("epochs-to", Spread(2.0, 0.0, 3, 1)) == "2, never in 1 of 3"
    assert value_of("accuracy", Spread(0.81044, 0.0012, 2)) == "81.04 ± 0.12 %"
    assert value_of("accuracy", Spread(0.5, None, 1)) == "50.00 %"
    assert value_of("epochs-to", Spread(12.5, 0.70711, 2)) == "12.5 ± 0.71"
    assert value_of("epochs-to", Spread(float("inf"), None, 2)) == "never"
    assert value_of("accuracy", None) == "–"
    assert gain_of("accuracy", Spread(-0.0123, None, 1)) == "−1.23 points"
    assert gain_of("accuracy", Spread(-1e-9, None, 1)) == "0.00 points"
    assert [number(x) for x in (0, 3, 0.12345, 1234.5, 1e-9, None)] == ["0", "3", "0.123", "1234", "1.00e-09", "–"]
    assert [p_value(p) for p in (1e-5, 0.0123, 0.5)] == ["< 0.001", "0.012", "0.50"]


def test_differences_are_worded_by_their_sign() -> None:
    effect = Effect(0.0035, 0.001, 10)
    assert difference("accuracy", 0.0035, effect) == "+0.35 points, 95 % CI +0.13 to +0.57"
    assert difference("accuracy", -0.0123) == "−1.23 points"
    assert difference("variance", 0.0035, effect) == "0.00350 lower, 95 % CI −0.00573 to −0.00127"
    assert difference("variance", -0.00348) == "0.00348 higher"  # a variance that rose is not "less"
    assert difference("epochs-to", 2.5) == "2.50 epochs fewer"
    assert difference("epochs-to", -2.0) == "2.00 epochs more"
    assert difference("epochs-to", 0.0) == "no difference"
    assert difference("accuracy", None) == "–"
