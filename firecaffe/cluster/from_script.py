"""A function that scripts call: a mistake in the call, or an error of ours, is told in one line."""

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from difflib import get_close_matches
from functools import wraps
from typing import Any, ParamSpec, TypeVar

from firecaffe.cluster.last_word import tell_uncaught
from firecaffe.errors import RecipeError

Given = ParamSpec("Given")
Value = TypeVar("Value")

_REST = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


class CallError(RecipeError, TypeError):
    """Arguments that a function does not take, or one that it lacks. A TypeError, as Python's."""


def from_script(function: Callable[Given, Value]) -> Callable[Given, Value]:
    """The function, which says in one line what it does not take, and whose errors that a script
    does not catch end it with their line and exit code.
    """
    signature = inspect.signature(function)

    @wraps(function)
    def call(*args: Given.args, **kwargs: Given.kwargs) -> Value:
        tell_uncaught()
        bind(function.__name__, signature, args, kwargs)
        return function(*args, **kwargs)

    return call


def bind(
    name: str,
    signature: inspect.Signature,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    others: Sequence[str] = (),
) -> inspect.BoundArguments:
    """The arguments of a call, by the signature's names. others: names that were taken out before.

    Raises: CallError if they do not fit it.
    """
    try:
        return signature.bind(*args, **kwargs)
    except TypeError as error:
        named = signature.parameters.values()
        known = [each.name for each in named if each.kind not in _REST] + list(others)
        wrong = next((word for word in kwargs if word not in known), "")
        raise CallError(f"{name}: {error}{_meant(wrong, known)}") from None


def check_known(name: str, words: Iterable[str], known: Sequence[str]) -> None:
    """Raises: CallError if one of the words, which are handed on, is none of those known."""
    for word in words:
        if word not in known:
            said = f"got an unexpected keyword argument {word!r}"
            raise CallError(f"{name}: {said}{_meant(word, known)}")


def _meant(word: str, known: Sequence[str]) -> str:
    close = get_close_matches(word, known, n=1)
    return f"; did you mean {close[0]}?" if close else f"; it takes {', '.join(known)}"
