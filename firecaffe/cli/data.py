"""`firecaffe data get NAME`: put a data set where the recipes look for it."""

from collections.abc import Callable
from difflib import get_close_matches
from pathlib import Path

from firecaffe.data import data_home
from firecaffe.data.get import get_fashion_mnist
from firecaffe.errors import RecipeError

GETTERS: dict[str, Callable[[Path, Callable[[str], None]], Path]] = {
    "fashion-mnist": get_fashion_mnist,
}


def get(name: str, dest: str | None = None) -> int:
    """Obtain a data set, printing what is tried; returns the exit code.

    `dest` is the folder for its files, by default the one in the data home in which recipes look.

    Raises:
        RecipeError: no way to obtain `name` is known.
        DataError: none of the ways worked.
    """
    if name not in GETTERS:
        close = get_close_matches(name, GETTERS, n=1)
        raise RecipeError(
            f"data get: there is no way to fetch {name!r}, expected one of {', '.join(GETTERS)}"
            + (f"; did you mean {close[0]!r}?" if close else "")
        )
    GETTERS[name](Path(dest).expanduser() if dest else data_home() / name, print)
    return 0
