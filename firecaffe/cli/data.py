"""`firecaffe data get NAME`: put a data set where the recipes look for it."""

from pathlib import Path

from firecaffe.cli.options.data import make_parser
from firecaffe.cli.suggest import did_you_mean
from firecaffe.data import data_home
from firecaffe.data.get import get as get_published
from firecaffe.data.published import PUBLISHED
from firecaffe.errors import RecipeError


def main(argv: list[str]) -> int:
    options = make_parser().parse_args(argv)
    get(options.name, options.dest)
    return 0


def get(name: str, dest: str = "") -> Path:
    """Obtains a data set, printing what is tried; returns the folder of its files.

    dest: the folder for them, by default the one in the data home in which recipes look.

    Raises: RecipeError if no way to obtain `name` is known; DataError if none worked.
    """
    if name not in PUBLISHED:
        raise RecipeError(
            f"data get: there is no way to fetch {name!r}, expected one of {', '.join(PUBLISHED)}"
            + did_you_mean(name, PUBLISHED)
        )
    return get_published(name, Path(dest).expanduser() if dest else data_home() / name, print)
