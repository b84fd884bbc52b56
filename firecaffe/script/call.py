"""The files by which `firecaffe.launch` and its workers communicate, in a folder for each call."""

from typing import NamedTuple

CALLER, CALL, RETURNED = "caller", "call", "returned"
"""A pickled `Caller`; the function with its arguments; what it returned on rank 0."""


class Caller(NamedTuple):
    """The facts of the caller that a worker needs before it can load the function."""

    function: str
    path: list[str]
    argv: list[str]
