"""Errors for people: the exception for wrong input, and the one line that is printed of it."""

LONGEST = 2000  # characters in a printed line; a message may quote a wrong word of any length


class UserError(ValueError):
    """Wrong input. The message is one line that says what is wrong and what would be right.

    The command line prints the message without a traceback and exits with status 2.
    """


class NonFiniteLoss(UserError):
    """A loss, a gradient or a weight is NaN or infinite."""


def one_line(text: str, longest: int = LONGEST) -> str:
    """Return text as one line that is safe to print in a terminal.

    Control characters are escaped, and the middle of a text of more than `longest` characters is left out.
    """
    line = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in " ".join(text.split()))
    if len(line) > longest:
        line = f"{line[: longest // 2]} ... {line[-longest // 2 :]}"
    return line
