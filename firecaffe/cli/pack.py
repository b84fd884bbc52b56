"""`firecaffe pack SOURCE DEST`: pack many small files, or another format, into shards."""

from __future__ import annotations

import re
from collections import Counter
from math import isqrt
from pathlib import Path
from typing import TYPE_CHECKING

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from firecaffe.api.console import make_console
from firecaffe.cli.arguments import Parser
from firecaffe.data.packing.part import Source
from firecaffe.errors import RecipeError
from firecaffe.value_checks import MOST_THREADS

if TYPE_CHECKING:
    from firecaffe.data.packed import PackedSet
    from firecaffe.data.packing.pack_images import PackOptions

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
        type=int,
        default=0,
        metavar="S",
        help="shrink the shorter side of larger images to S; 0: keep them",
    )
    add(
        "--quality",
        type=int,
        default=0,
        metavar="Q",
        help="JPEG quality; 0: 90 if resized, else unchanged",
    )
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
    add(
        "--shard-size",
        type=str,
        default="256MB",
        metavar="SIZE",
        help="bytes of the source in a shard",
    )
    add("--threads", type=int, default=0, metavar="N", help="threads; 0: one for each core")
    add(
        "--channel-order", choices=["bgr", "rgb"], help="channel order of raw color LMDBs; else bgr"
    )
    add(
        "--verify",
        type=str,
        default="",
        metavar="DEST",
        help="only compare a packed data set with its checksums",
    )
    add(
        "--info",
        type=str,
        default="",
        metavar="DEST",
        help="only show what a packed data set holds",
    )
    return parser


MOST_BROKEN = 20
UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9}


def main(argv: list[str]) -> int:
    from firecaffe.data.decode import MOST_PIXELS, cores
    from firecaffe.data.packing.pack_images import PackOptions
    from firecaffe.data.packing.source import open_source, with_test_part

    parser = make_parser()
    options = parser.parse_args(argv)
    if options.verify or options.info:
        if options.paths or len(parser.read(argv).options) > 1:
            raise RecipeError("pack takes SOURCE and DEST; or --verify DEST alone; or --info DEST")
        return _verify(options.verify) if options.verify else _info(options.info)
    if len(options.paths) != 2:
        given = " ".join(options.paths) or "nothing"
        raise RecipeError(
            f"pack takes SOURCE and DEST; found {given}; usage: firecaffe pack {USAGE}"
        )
    limits = {"resize": isqrt(MOST_PIXELS), "quality": 100, "threads": MOST_THREADS}
    for word, most in limits.items():
        if not 0 <= getattr(options, word) <= most:
            given = getattr(options, word)
            raise RecipeError(f"--{word} is {given}; it must be 1 to {most}, or 0")
    packing = PackOptions(options.resize, options.quality, options.raw, _bytes(options.shard_size))
    path, dest = (Path(path).expanduser() for path in options.paths)
    if options.hold_out is not None and not 0 <= options.hold_out < 1:
        raise RecipeError(
            f"--hold-out is {options.hold_out:g}; it must be a share, from 0 up to 1, as 0.1"
        )
    source, said = with_test_part(open_source(path, options.channel_order), options.hold_out)
    return _pack(source, dest, packing, options.threads or cores(), said)


def _bytes(typed: str) -> int:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMG]?)B?", typed.strip(), re.IGNORECASE)
    size = int(float(match[1]) * UNITS[match[2].upper()]) if match else 0
    if size < 1:
        raise RecipeError(f"--shard-size is {typed!r}; it must be as 256MB or 1GB")
    return size


def _pack(source: Source, dest: Path, options: PackOptions, threads: int, said: str) -> int:
    import torch

    from firecaffe.data.packing.pack_images import Packing

    torch.set_num_threads(1)  # the packing threads share the cores
    total = sum(len(part) for part in source.parts.values())
    with _progress("packing") as progress:
        task = progress.add_task("packing", total=total)

        def done(images: int) -> None:
            progress.advance(task, images)

        packing = Packing(source, dest, options, threads, done)
        packed = packing.run()
    console = make_console()
    notes = *source.notes, *packing.seen.notes
    for line in [*([said] if said else []), *describe(packed, str(dest)), *notes]:
        console.print(line, markup=False, soft_wrap=True)
    least, most = packing.seen.least, packing.seen.most
    if most[0]:
        words = f"sizes: from {least[0]} to {most[0]} rows, from {least[1]} to {most[1]} columns"
        console.print(words)
    return 0


def _progress(title: str) -> Progress:
    console = make_console()
    columns = (TextColumn(title), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)


def _verify(root: str) -> int:
    from firecaffe.data.packed import read_list
    from firecaffe.data.packing.pack_images import verify

    packed = read_list(root)
    with _progress("verifying") as progress:
        task = progress.add_task("verifying", total=sum(map(packed.count, packed.parts)))
        verify(root, lambda images: progress.advance(task, images))
    shards = sum(map(len, packed.parts.values()))
    print(f"{root}: {shards} shards are what was packed")
    return 0


def _info(root: str) -> int:
    import torch

    from firecaffe.data.packed import PackedPart, read_list
    from firecaffe.data.shard_files import open_files

    packed = read_list(root)
    console = make_console()
    for line in describe(packed, root):
        console.print(line, markup=False, soft_wrap=True)
    files = open_files(root)
    for name in packed.parts:
        part = PackedPart(packed, name, files)
        counts = Counter(part.labels(torch.arange(len(part))).tolist())
        by_class = ", ".join(f"{packed.classes[label]} {counts[label]}" for label in sorted(counts))
        console.print(f"{name}: {by_class[:2000]}", markup=False, soft_wrap=True)
    return 0


def describe(packed: PackedSet, root: str) -> list[str]:
    lines = [f"{root}: {packed.kind} images of {packed.source}, {len(packed.classes)} classes"]
    if packed.shape:
        lines[0] += f", {' x '.join(map(str, packed.shape))}"
    for name, infos in packed.parts.items():
        held = sum(info.num_bytes for info in infos)
        count = packed.count(name)
        lines.append(
            f"{name}: {count:,} images in {len(infos)} shards, {held / 1e6:,.1f} MB"
            + (f", {held / count / 1e3:.3g} kB each" if count else "")
        )
    if packed.skipped:
        lines.append(f"broken and left out: {len(packed.skipped)}")
        lines += [f"  {line}" for line in packed.skipped[:MOST_BROKEN]]
        if len(packed.skipped) > MOST_BROKEN:
            lines.append(f"  and {len(packed.skipped) - MOST_BROKEN} more, in dataset.json")
    return lines
