"""What goes between `firecaffe.launch` and its workers: files in a folder of the call's own."""

from typing import NamedTuple

CALLER, CALL, RETURNED = "caller", "call", "returned"
"""A pickled `Caller`; the function with its arguments; what it returned on rank 0."""


class Caller(NamedTuple):
    """What a worker must have of the process that called, before it can load the function."""

    function: str
    """Its name."""
    path: list[str]
    argv: list[str]
