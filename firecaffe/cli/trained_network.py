"""`firecaffe evaluate`, `predict`, `export` and `unpack`: commands that use a trained network."""

import sys

from firecaffe.cli.arguments import Parser, check_launched, show
from firecaffe.errors import DataError
from firecaffe.output import harmless

EVALUATE_NOTES = (
    "The numbers are those that the run has at its end, bit for bit, on any number of ranks.",
    "--data.… options take other data, whose test part is evaluated; --task.metrics takes other "
    "metrics.",
    "Classes are matched by name. Other data may have some of the run's classes, in any order; a "
    "class that the run does not know is an error. Classes without names are matched by number.",
    "What the run was given in Python must be named: --model.name path/file.py:function, "
    "--data.name, --task.name. One line lists what is missing.",
)


def make_parser_evaluate() -> Parser:
    parser = Parser(
        "evaluate",
        "RUN [--best] [--nproc-per-node N] [--data.name NAME] [--data.path FOLDER] [--json]",
        "Measure the loss and the metrics of a run's network on its test data, or on other data.",
        takes_recipe=True,
        notes=EVALUATE_NOTES,
    )
    add, flag = parser.add, parser.flag
    parser.add_best()
    parser.add_trust()
    add("--nproc-per-node", "N", "ranks to start on this host", default=1)
    flag("--json", "print one JSON object instead")
    return parser


def main_evaluate(argv: list[str]) -> None:
    from firecaffe.api.evaluate_and_predict import evaluate
    from firecaffe.cli.typed_recipe import parse_run
    from firecaffe.cluster.groups import rank_and_size
    from firecaffe.cluster.world import is_launched

    parser = make_parser_evaluate()
    typed = parse_run(parser, argv)
    options = typed.options
    if is_launched():
        check_launched(parser, argv, options.nproc_per_node)
    answer = evaluate(typed.where, **parser.arguments(options), replace=typed.replaced)
    if rank_and_size()[0] == 0:
        show(answer, options.json)


PREDICT_NOTES = (
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


def make_parser_predict() -> Parser:
    parser = Parser(
        "predict",
        "RUN [IMAGE|FOLDER …] [--best] [--top 5] [--csv FILE|-] [--out FOLDER] [--overwrite]",
        "Predict images with a run's network; without images, the run's test samples.",
        takes_recipe=True,
        notes=PREDICT_NOTES,
    )
    add = parser.add
    parser.add_best()
    parser.add_trust()
    add("--top", "K", "number of classes to show for each image", default=5)
    add("--csv", "FILE", "write a table of all predictions; -: print it")
    add("--out", "FOLDER", "folder for the masks of a segmentation")
    parser.add_overwrite()
    return parser


def main_predict(argv: list[str]) -> None:
    from firecaffe.api.evaluate_and_predict import predict
    from firecaffe.cli.typed_recipe import parse_run
    from firecaffe.cluster.groups import check_alone

    check_alone("predict")
    parser = make_parser_predict()
    typed = parse_run(parser, argv, takes_files=True)
    options = typed.options
    given = {**parser.arguments(options), "csv": "" if options.csv == "-" else options.csv}
    answer = predict(typed.where, typed.others or None, **given, replace=typed.replaced)
    warnings = [f"warning: {note}" for note in answer.notes]
    for line in (*warnings, *(f"note: {note}" for note in answer.skipped), *answer.broken):
        print(harmless(line), file=sys.stderr)
    if options.csv == "-":
        print(answer.to_csv(), end="")
    elif not options.csv:
        print(*map(harmless, answer.lines), sep="\n")
    if broken := len(answer.broken):
        raise DataError(
            f"could not read {broken} of the files, which are named above; {len(answer.rows)} "
            "samples are predicted"
        )


EXPORT_NOTES = (
    "safetensors: the state_dict with the network's own names. onnx: the whole network (pip "
    "install 'firecaffe[onnx]'). torch_export: the whole network, for torch.export.load. "
    "caffemodel: the weights of an imported net for Caffe, with the prototxt next to it.",
    "Before the file gets its name, it is read again and compared. Weights must be the same bits. "
    "onnx and torch_export must give the network's outputs on the first 8 test samples and on one "
    "alone, to 1e-4 of the largest output plus 1e-3 of each.",
    "A whole network takes `inputs`, a batch of any size, and gives `outputs`. Images must be "
    "cropped and normalized before (data.crop, data.mean, data.std). Outputs of a classification "
    "are logits: softmax makes the probabilities that `predict` prints.",
    "The file has the moving average of the weights if the run's evaluations use it. It computes "
    "in the types of its weights, without train.autocast.",
)


def make_parser_export() -> Parser:
    parser = Parser(
        "export",
        "RUN --to safetensors|onnx|torch_export|caffemodel [--best] [--out FILE] [--overwrite]",
        "Write a run's network as a file for other programs, and compare the two.",
        takes_recipe=True,
        notes=EXPORT_NOTES,
    )
    add = parser.add
    add(
        "--to",
        help="format of the file",
        choices=["safetensors", "onnx", "torch_export", "caffemodel"],
    )
    parser.add_best()
    parser.add_trust()
    add("--out", "FILE", "the file; else model.SUFFIX in the run's folder")
    parser.add_overwrite()
    return parser


def main_export(argv: list[str]) -> None:
    from firecaffe.api.weight_files import export
    from firecaffe.cli.typed_recipe import parse_run

    parser = make_parser_export()
    typed = parse_run(parser, argv)
    given = parser.arguments(typed.options)
    show(export(typed.where, **{**given, "to": given["to"] or ""}, replace=typed.replaced))


def make_parser_unpack() -> Parser:
    parser = Parser(
        "unpack",
        "NET.fcz [--to NET.safetensors] [--overwrite]",
        "Write the weights of a .fcz file as safetensors, bit for bit, and print what the file "
        "says about its network.",
        notes=(
            "No network is built and no code is run, so the file may come from a stranger. "
            "Decoding takes less than 1 MB in addition to the largest tensor.",
        ),
    )
    add = parser.add
    add("paths", "NET.fcz", "the file", nargs="*")
    add("--to", "FILE", "the file to write; else the same name with .safetensors")
    parser.add_overwrite()
    return parser


def main_unpack(argv: list[str]) -> None:
    from firecaffe.api.weight_files import unpack

    parser = make_parser_unpack()
    options = parser.parse_args(argv)
    file = parser.only("file", options.paths)
    show(unpack(file, to=options.to, overwrite=options.overwrite))
