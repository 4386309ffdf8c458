"""The one exception that is meant to be read by a person."""


class UserError(ValueError):
    """Wrong input: one line that says what is wrong and what would be right.

    The command line prints it without a traceback and exits with status 2.
    """
