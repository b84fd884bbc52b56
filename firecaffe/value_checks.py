"""Checks of the types of a recipe's values before their use, also of recipes made in Python."""

import dataclasses
from collections.abc import Collection, Iterable, Mapping, Sequence
from difflib import get_close_matches
from functools import cache
from math import inf, nextafter
from sys import float_info
from typing import Any, Literal, get_args, get_origin, get_type_hints

from firecaffe.errors import RecipeError

INT64 = 2**63
"""Limit of samples, steps and bytes, which are counted in 64 bits."""

LARGEST = 3.4028234663852886e38
"""The largest float32, the type in which a network computes."""

MAX_THREADS = 1024

MAX_STEPS = 10_000_000
"""Most steps of a training: some plans visit them one by one."""

MAX_SAMPLES = 1 << 24

MAX_MICRO_BATCHES = 1 << 20
"""Most micro-batches of one step: the leaves of the sum's tree are visited one by one."""

KINDS = {
    "int": "a whole number",
    "float": "a finite number",
    "bool": "true or false",
    "str": "text",
    "list": 'a list, as ["a", "b"]',
    "dict": "a table: { NAME = VALUE, … }",
}


def count_of(number: int, one: str, many: str) -> str:
    """Return a number with its noun: "1 rank", "2 ranks"."""
    return f"{number} {one if number == 1 else many}"


def digits_of(value: float, digits: int = 3) -> str:
    """Format with so many significant digits, commas between thousands, and no large exponent."""
    near = float(f"{value:.{digits}g}")
    return f"{near:,.0f}" if abs(near) >= 10**digits else f"{near:,.{digits}g}"


def did_you_mean(name: object, known: Iterable[str]) -> str:
    """Return `; did you mean …?` with the known name that is closest; empty if none is close."""
    close = get_close_matches(str(name), list(known), n=1)
    return f"; did you mean {close[0]}?" if close else ""


def check_choice(word: str, value: str, known: Collection[str], others: str = "") -> None:
    """Raise RecipeError, with the closest known value, if a value is not known."""
    if value not in known:
        wanted = f"one of {', '.join(known)}{others}{did_you_mean(value, known)}"
        raise RecipeError(f"{word} is {value!r}; it must be {wanted}")


MAX_NAMED = 3


def some_of(names: Sequence[str]) -> str:
    return ", ".join(names[:MAX_NAMED]) + (" …" if len(names) > MAX_NAMED else "")


Limits = tuple[float, float] | tuple[float, float, str]
"""The least and the most of a number, and how they are described if not as "LEAST to MOST"."""

FINITE = (-float_info.max, float_info.max, "finite")
NOT_NEGATIVE = (0, float_info.max, "0 or more")
FROM_1 = (1, float_info.max, "at least 1")
UP_TO_1 = (0, 1, "from 0 to 1")
BELOW_1 = (0, nextafter(1, 0), "from 0 up to, not including, 1")


def check_limits(section: str, config: Any, limits: Mapping[str, Limits]) -> None:
    """Raise RecipeError if a field of a section is outside its limits."""
    for word, (least, most, *described) in limits.items():
        value = getattr(config, word)
        if not least <= value <= most:
            limit = f"{most:g}" if most < 100_000 else f"{most:,}"
            plain = f"at least {least:g}" if most == inf else f"{least:g} to {limit}"
            wanted = described[0] if described else plain
            raise RecipeError(f"{section}.{word} is {value}; it must be {wanted}")


def check_types(recipe: Any) -> None:
    """Raise RecipeError, with field, value and expected type, if a value does not fit its type."""
    for section, kind in _hints(recipe.__class__).items():
        config = getattr(recipe, section)
        if not isinstance(config, kind):
            raise RecipeError(
                f"{section} is {config!r}; it is a section of the recipe: firecaffe."
                f"{kind.__name__}(WORD=VALUE, …)"
            )
        check_section_types(section, config)


def check_section_types(section: str, config: Any) -> None:
    for word, annotation in _hints(config.__class__).items():
        value = getattr(config, word)
        wanted = _wanted(value, annotation)
        if wanted:
            raise RecipeError(f"{section}.{word} is {value!r}; it must be {wanted}")


@cache
def _hints(kind: type) -> dict[str, Any]:
    names = [field.name for field in dataclasses.fields(kind)]
    hints = get_type_hints(kind)
    return {name: hints[name] for name in names}


def _wanted(value: Any, annotation: Any) -> str:
    """Return what the value must be; empty if it fits."""
    if annotation is Any:
        return "" if _is_toml(value) else "text, a number, true or false, a list or a table"
    origin = get_origin(annotation) or annotation
    if origin is Literal:
        choices = get_args(annotation)
        return "" if value in choices else f"one of {', '.join(map(repr, choices))}"
    if isinstance(value, bool) and origin is not bool:
        return KINDS[origin.__name__]
    if origin is int:
        if not isinstance(value, int):
            return KINDS["int"]
        return "" if -INT64 <= value < INT64 else "a whole number of 64 bits at most"
    if origin is float:
        if not isinstance(value, int | float) or not -inf < value < inf:
            return KINDS["float"]
        return "" if abs(value) <= LARGEST else f"at most {LARGEST:.2g}, the largest float32"
    if not isinstance(value, origin):
        return KINDS[origin.__name__]
    parts: list[Any] = []
    if origin is list:
        parts = [_wanted(item, get_args(annotation)[0]) for item in value]
    elif origin is dict:
        kinds = get_args(annotation)
        parts = [_wanted(key, kinds[0]) or _wanted(item, kinds[1]) for key, item in value.items()]
    wrong = next(filter(None, parts), "")
    return f"{KINDS[origin.__name__]}, each of its values {wrong}" if wrong else ""


def _is_toml(value: Any) -> bool:
    """Whether a recipe file can contain the value."""
    if isinstance(value, dict):
        return all(isinstance(name, str) and _is_toml(item) for name, item in value.items())
    if isinstance(value, list):
        return all(map(_is_toml, value))
    return isinstance(value, str | bool | int | float)
