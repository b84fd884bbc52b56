"""Data sets that a user's function returns: `data.name = "package.module:function"`."""

from collections.abc import Mapping
from typing import Any

from firecaffe.data.config import DataConfig
from firecaffe.data.own import check_own
from firecaffe.data.source import DataParts
from firecaffe.errors import DataError
from firecaffe.reference import call, find, shown

PARTS = ("train", "test", "validation")
BY_PLACE = {2: ("train", "test"), 3: ("train", "validation", "test")}


def open_by_name(config: DataConfig) -> DataParts:
    """Call the user's function that `data.name` names, and check the data sets that it returns.

    It returns a dict with train, test and optionally validation, or a tuple of them (see BY_PLACE).
    Raises RecipeError if there is no such function, OwnCodeError if it raises, and DataError if it
    returns anything else.
    """
    function = find("data.name", config.name)
    given = call("data.name", config.name, function, config.args)
    named = _parts(config.name, given)
    parts = {
        name: check_own(f"{config.name} {name}", part)
        for name, part in named.items()
        if part is not None
    }
    return DataParts(parts["train"], parts["test"], parts.get("validation"))


def _parts(name: str, given: Any) -> dict[str, Any]:
    if isinstance(given, tuple | list) and len(given) in BY_PLACE:
        return dict(zip(BY_PLACE[len(given)], given, strict=True))
    if isinstance(given, Mapping) and {"train", "test"} <= given.keys() <= set(PARTS):
        return dict(given)
    found = (
        f"a dict with {', '.join(map(str, given))}" if isinstance(given, Mapping) else shown(given)
    )
    raise DataError(
        f"data.name {name!r} returned {found}; expected a dict with train, test and perhaps "
        "validation, or (train, test), or (train, validation, test)"
    )
