"""The one exception that is meant to be read by a person, and the one line that a person sees of it."""

LONGEST = 2000  # characters of a line; a wrong word of any length may be quoted in it


class UserError(ValueError):
    """Wrong input: one line that says what is wrong and what would be right.

    The command line prints it without a traceback and exits with status 2.
    """


class NonFiniteLoss(UserError):
    """A loss, a gradient or a weight is NaN or infinite."""


def one_line(text: str, longest: int = LONGEST) -> str:
    """Text as one line that means nothing to a terminal: control characters written out, a long middle left out."""
    line = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in " ".join(text.split()))
    if len(line) > longest:
        line = f"{line[: longest // 2]} ... {line[-longest // 2 :]}"
    return line
