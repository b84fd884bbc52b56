"""`firecaffe pack SOURCE DEST`: pack many small files, or another format, into shards."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from firecaffe.cli.arguments import Parser
from firecaffe.errors import RecipeError

USAGE = (
    "SOURCE DEST [--resize S] [--quality Q] [--raw] [--hold-out SHARE] [--shard-size 256MB] "
    "[--threads N]"
)

NOTES = (
    "SOURCE is a folder of images (train/CLASS/*.jpg, test or val; or CLASS/*.jpg alone), a tar of "
    "one, WebDataset's tar files (KEY.jpg and KEY.cls), idx files, CIFAR-10's binary files, or "
    "Caffe's LMDBs (pip install 'firecaffe[lmdb]').",
    "Images are kept byte by byte, unless --resize, --quality or --raw changes them. Broken images "
    "are left out, counted and listed, also in dataset.json.",
    "Of a source without a test part, a tenth of each class is held out as one, always the same "
    "images.",
    "The same source and options give the same bytes. A packing that was stopped continues when it "
    "is started again.",
    "Train with data.name = packed and data.path = DEST. --verify ends with exit code 3 if a "
    "sample differs from its checksum.",
)


def make_parser() -> Parser:
    parser = Parser(
        "pack",
        f"{USAGE} | --verify DEST | --info DEST",
        "Pack images into shards, which are read at random as fast as large files.",
        notes=NOTES,
    )
    add = parser.add
    add("paths", nargs="*", help="SOURCE, what is packed, and DEST, the folder for the shards")
    add(
        "--resize",
        default=0,
        metavar="S",
        help="shrink the shorter side of larger images to S; 0: keep them",
    )
    add("--quality", default=0, metavar="Q", help="JPEG quality; 0: 90 if resized, else unchanged")
    add(
        "--raw",
        action="store_true",
        help="store pixels, of images of one size or of --resize x --resize",
    )
    add(
        "--hold-out",
        type=float,
        default=None,
        metavar="SHARE",
        help="share that becomes the test part, if the source has none; else 0.1",
    )
    add("--shard-size", default="256MB", metavar="SIZE", help="bytes of the source in a shard")
    add("--threads", default=0, metavar="N", help="threads; 0: one for each core")
    add(
        "--channel-order", choices=["bgr", "rgb"], help="channel order of raw color LMDBs; else bgr"
    )
    add("--verify", metavar="DEST", help="only compare a packed data set with its checksums")
    add("--info", metavar="DEST", help="only show what a packed data set holds")
    return parser


def main(argv: list[str]) -> int:
    from firecaffe.api.take_in import PackedFolder, pack
    from firecaffe.cli.arguments import show

    parser = make_parser()
    options = parser.parse_args(argv)
    if options.verify or options.info:
        if options.paths or len(parser.read(argv).options) > 1:
            raise RecipeError("pack takes SOURCE and DEST; or --verify DEST alone; or --info DEST")
        packed = PackedFolder.read(options.verify or options.info)
        if options.info:
            show(packed.counted())
            return 0
        with _progress("verifying") as progress:
            said = packed.verify(progress)
        print(said)
        return 0
    if len(options.paths) != 2:
        paths = " ".join(options.paths) or "nothing"
        raise RecipeError(
            f"pack takes SOURCE and DEST; found {paths}; usage: firecaffe pack {USAGE}"
        )
    given = parser.arguments(options)
    del given["paths"], given["verify"], given["info"]
    with _progress("packing") as progress:
        packed = pack(*options.paths, **given, progress=progress)
    show(packed)
    return 0


@contextmanager
def _progress(title: str) -> Iterator[Callable[[int, int], None]]:
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    from firecaffe.api.answer import make_console

    console = make_console()
    columns = (TextColumn(title), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task(title)

        def advance(done: int, total: int) -> None:
            bar.update(task, advance=done, total=total)

        yield advance
