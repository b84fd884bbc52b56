"""`firecaffe predict RUN IMAGES…`: the predictions of a run's network for images."""

import sys

from firecaffe.cli.arguments import Parser
from firecaffe.errors import DataError


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


def main(argv: list[str]) -> int:
    from firecaffe.api.predict import predict
    from firecaffe.cli.typed_run import parse_run
    from firecaffe.cluster.groups import check_alone

    check_alone("predict")
    typed = parse_run(make_parser(), argv, takes_files=True)
    options = typed.options
    answer = predict(
        typed.where,
        typed.others,
        best=options.best,
        trust_code=options.trust_code,
        top=options.top,
        csv="" if options.csv == "-" else options.csv,
        out=options.out,
        overwrite=options.overwrite,
        replace=typed.replaced,
    )
    warnings = [f"warning: {note}" for note in answer.notes]
    for line in (*warnings, *(f"note: {note}" for note in answer.skipped), *answer.broken):
        print(line, file=sys.stderr)
    if options.csv == "-":
        print(answer.to_csv(), end="")
    elif not options.csv:
        print(*answer.lines, sep="\n")
    if broken := len(answer.broken):
        count = broken + len(answer.rows)
        raise DataError(f"{broken} of {count} images could not be read; they are named above")
    return 0
