"""`firecaffe data get NAME`: put a data set where the recipes look for it."""

from collections.abc import Callable
from difflib import get_close_matches
from pathlib import Path

from firecaffe.cli.options.data import make_parser
from firecaffe.data import data_home
from firecaffe.data.get import get_fashion_mnist, get_mnist
from firecaffe.errors import RecipeError

GETTERS: dict[str, Callable[[Path, Callable[[str], None]], Path]] = {
    "fashion-mnist": get_fashion_mnist,
    "mnist": get_mnist,
}


def main(argv: list[str]) -> int:
    options = make_parser().parse_args(argv)
    get(options.name, options.dest)
    return 0


def get(name: str, dest: str = "") -> Path:
    """Obtains a data set, printing what is tried; returns the folder of its files.

    dest: the folder for them, by default the one in the data home in which recipes look.

    Raises: RecipeError if no way to obtain `name` is known; DataError if none worked.
    """
    if name not in GETTERS:
        close = get_close_matches(name, GETTERS, n=1)
        raise RecipeError(
            f"data get: there is no way to fetch {name!r}, expected one of {', '.join(GETTERS)}"
            + (f"; did you mean {close[0]!r}?" if close else "")
        )
    return GETTERS[name](Path(dest).expanduser() if dest else data_home() / name, print)
