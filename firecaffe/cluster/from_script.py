"""A decorator for functions that scripts call: mistakes and errors are reported in one line."""

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import wraps
from typing import Any, ParamSpec, TypeVar

from firecaffe.cluster.handover import report_uncaught
from firecaffe.errors import RecipeError, file_error
from firecaffe.value_checks import did_you_mean

Given = ParamSpec("Given")
Value = TypeVar("Value")

_REST = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


class CallError(RecipeError, TypeError):
    """Arguments that a function does not take, or one that it lacks; a TypeError, as in Python."""


def from_script(function: Callable[Given, Value]) -> Callable[Given, Value]:
    """Make a function report wrong calls, and uncaught errors (`report_uncaught`), in one line."""
    signature = inspect.signature(function)

    @wraps(function)
    def call(*args: Given.args, **kwargs: Given.kwargs) -> Value:
        report_uncaught()
        bind(function.__name__, signature, args, kwargs)
        try:
            return function(*args, **kwargs)
        except OSError as error:
            if (of_file := file_error(error, f"{function.__name__}: ")) is None:
                raise
            raise of_file from error

    return call


def bind(
    name: str,
    signature: inspect.Signature,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    others: Sequence[str] = (),
) -> inspect.BoundArguments:
    """Bind a call's arguments to names; `others` are names taken out before. Raises: CallError."""
    try:
        return signature.bind(*args, **kwargs)
    except TypeError as error:
        named = signature.parameters.values()
        known = [entry.name for entry in named if entry.kind not in _REST] + list(others)
        wrong = next((word for word in kwargs if word not in known), "")
        raise CallError(f"{name}: {error}{_meant(wrong, known)}") from None


def check_known(name: str, words: Iterable[str], known: Sequence[str]) -> None:
    """Check that all keyword arguments to be passed on are in `known`. Raises: CallError."""
    for word in words:
        if word not in known:
            said = f"got an unexpected keyword argument {word!r}"
            raise CallError(f"{name}: {said}{_meant(word, known)}")


def _meant(word: str, known: Sequence[str]) -> str:
    return did_you_mean(word, known) or f"; it takes {', '.join(known)}"
