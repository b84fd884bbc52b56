"""The options of `firecaffe pack`."""

from firecaffe.cli.parser import Parser

USAGE = (
    "SOURCE DEST [--resize S] [--quality Q] [--raw] [--hold-out SHARE] [--shard-size 256MB] "
    "[--threads N]"
)


def make_parser() -> Parser:
    parser = Parser(
        "pack",
        f"{USAGE} | --verify DEST | --info DEST",
        "Pack images into shards: a folder of images, tar files, idx or CIFAR-10 files, Caffe's "
        "LMDBs. A packing that was ended goes on where it was.",
    )
    add = parser.add
    add("paths", nargs="*", help="what is packed, and the folder for the shards")
    add(
        "--resize",
        type=int,
        default=0,
        metavar="S",
        help="shorter side of larger images; 0: as they are",
    )
    add(
        "--quality",
        type=int,
        default=0,
        metavar="Q",
        help="JPEG quality; 0: 90 if resized, else as it was",
    )
    add("--raw", action="store_true", help="keep pixels: all of one size, or --resize x --resize")
    add(
        "--hold-out",
        type=float,
        default=None,
        metavar="SHARE",
        help="of the images of a source without a test part, that become one; else 0.1",
    )
    add(
        "--shard-size",
        type=str,
        default="256MB",
        metavar="SIZE",
        help="of the source's bytes in a shard",
    )
    add("--threads", type=int, default=0, metavar="N", help="0: one for each core")
    add("--channel-order", choices=["bgr", "rgb"], help="of raw color LMDBs; else bgr")
    add(
        "--verify",
        type=str,
        default="",
        metavar="DEST",
        help="compare a packed data set with its checksums",
    )
    add("--info", type=str, default="", metavar="DEST", help="say what a packed data set holds")
    return parser
