"""The printed line of an error."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from equipoise.errors import LONGEST, one_line


@given(st.text(max_size=50) | st.text("\x1b[2J\r\n\x85\u2028\u202e\udcff", max_size=3 * LONGEST))
def test_any_text_becomes_one_line_that_a_terminal_shows_as_it_is(text: str) -> None:
    line = one_line(text)
    assert line.isprintable()
    assert len(line) <= LONGEST + len(" ... ")


def test_control_characters_are_written_out_and_letters_of_any_language_kept() -> None:
    assert one_line("no file\n  grün/模型 \x1b[31mred") == "no file grün/模型 \\x1b[31mred"


def test_of_a_long_text_the_ends_are_kept() -> None:
    long = "no recipe is called " + "x" * 10_000 + "; choose from digits"
    line = one_line(long)
    assert line.startswith("no recipe is called xxx")
    assert line.endswith("xxx; choose from digits")
    assert " ... " in line
    assert one_line("y" * LONGEST) == "y" * LONGEST
