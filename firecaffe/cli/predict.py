"""`firecaffe predict RUN IMAGES…`: the predictions of a run's network for images."""

import sys

from firecaffe.cli.arguments import Parser
from firecaffe.errors import DataError

NOTES = (
    "Images are decoded, scaled, cropped and normalized as in the run's evaluations.",
    "A .npy file holds one sample, or rows of samples, as the run's data set gives them. Use it, "
    "or --data.…, if your own data set makes the network's inputs.",
    "Without files, the run's test samples are used, or those of --data.…, by number.",
    "Classification gives the --top classes with their probabilities, multilabel a probability for "
    "each label, regression and your own tasks the values. A segmentation writes a PNG for each "
    "image into --out; its gray values are the labels.",
    "Files in a folder that are not images are skipped and counted on stderr. An image that cannot "
    "be read has a line on stderr and no row; the command then ends with exit code 3.",
)


def make_parser() -> Parser:
    parser = Parser(
        "predict",
        "RUN [IMAGE|FOLDER …] [--best] [--top 5] [--csv FILE|-] [--out FOLDER] [--overwrite]",
        "Predict images with a run's network; without images, the run's test samples.",
        takes_recipe=True,
        notes=NOTES,
    )
    add = parser.add
    parser.add_best()
    parser.add_trust()
    add("--top", default=5, metavar="K", help="number of classes to show for each image")
    add("--csv", metavar="FILE", help="write a table of all predictions; -: print it")
    add("--out", metavar="FOLDER", help="folder for the masks of a segmentation")
    parser.add_overwrite()
    return parser


def main(argv: list[str]) -> int:
    from firecaffe.api.use_a_run import predict
    from firecaffe.cli.typed_run import parse_run
    from firecaffe.cluster.groups import check_alone

    check_alone("predict")
    parser = make_parser()
    typed = parse_run(parser, argv, takes_files=True)
    options = typed.options
    given = {**parser.arguments(options), "csv": "" if options.csv == "-" else options.csv}
    answer = predict(typed.where, typed.others or None, **given, replace=typed.replaced)
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
