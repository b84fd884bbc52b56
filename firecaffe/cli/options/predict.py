"""The options of `firecaffe predict`."""

from firecaffe.cli.parser import Parser


def make_parser() -> Parser:
    parser = Parser(
        "predict",
        "RUN [IMAGE|FOLDER …] [--best] [--top 5] [--csv FILE|-] [--out FOLDER] [--overwrite]",
        "What a run's network says of images, or, without any, of the run's test samples.",
        takes_recipe=True,
    )
    add = parser.add
    parser.add_best()
    parser.add_trust()
    add("--top", type=int, default=5, metavar="K", help="classes of each image")
    add("--csv", type=str, default="", metavar="FILE", help="a table of all; -: printed")
    add("--out", type=str, default="", metavar="FOLDER", help="for masks of a segmentation")
    parser.add_overwrite()
    return parser
