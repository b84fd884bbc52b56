"""`firecaffe data get NAME`: obtain a data set and store it where the recipes look for it."""

from pathlib import Path

from firecaffe.cli.options.data import make_parser
from firecaffe.cli.suggest import did_you_mean
from firecaffe.data import data_home
from firecaffe.data.published import PUBLISHED
from firecaffe.data.published import get as get_published
from firecaffe.errors import RecipeError


def main(argv: list[str]) -> int:
    options = make_parser().parse_args(argv)
    get(options.name, options.dest)
    return 0


def get(name: str, dest: str = "") -> Path:
    """Obtain a data set. Raises RecipeError for an unknown name; DataError if no way works."""
    if name not in PUBLISHED:
        raise RecipeError(
            f"data get: there is no way to fetch {name!r}, expected one of {', '.join(PUBLISHED)}"
            + did_you_mean(name, PUBLISHED)
        )
    return get_published(name, Path(dest).expanduser() if dest else data_home() / name, print)
