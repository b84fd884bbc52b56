"""What can go wrong, each kind with the exit code that the shell sees.

A message is one line for the user: what is wrong, what was found, what would be right, with
the dotted recipe name where there is one. docs/usage.md lists the codes.
"""


class FirecaffeError(Exception):
    """A fault that is explained in one line instead of a traceback."""

    exit_code = 1


class RecipeError(FirecaffeError):
    """The recipe or the command line asks for something that cannot be."""

    exit_code = 2


class DataError(FirecaffeError):
    """A data set is missing, truncated or not what its name says."""

    exit_code = 3


class CheckpointError(FirecaffeError):
    """A checkpoint is missing, damaged or belongs to another recipe."""

    exit_code = 4


class AgreementError(FirecaffeError):
    """The ranks do not run the same recipe, code or model."""

    exit_code = 5


class LaunchError(FirecaffeError):
    """The ranks could not be started or could not find each other."""

    exit_code = 6


class PeerLostError(FirecaffeError):
    """Another rank went away or did not answer in time."""

    exit_code = 9


class NotIdenticalError(FirecaffeError):
    """Runs that should end in the same bits do not."""

    exit_code = 7


class RunError(FirecaffeError):
    """A run folder cannot be written, or is not one."""

    exit_code = 8
