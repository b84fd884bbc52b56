"""`firecaffe export RUN --to FORMAT`: write a run's network as a file for other programs."""

from firecaffe.cli.arguments import Parser

NOTES = (
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


def make_parser() -> Parser:
    parser = Parser(
        "export",
        "RUN --to safetensors|onnx|torch_export|caffemodel [--best] [--out FILE] [--overwrite]",
        "Write a run's network as a file for other programs, and compare the two.",
        takes_recipe=True,
        notes=NOTES,
    )
    add = parser.add
    add(
        "--to",
        choices=["safetensors", "onnx", "torch_export", "caffemodel"],
        default=None,
        help="format of the file",
    )
    parser.add_best()
    parser.add_trust()
    add("--out", metavar="FILE", help="the file; else model.SUFFIX in the run's folder")
    parser.add_overwrite()
    return parser


def main(argv: list[str]) -> int:
    from firecaffe.api.files_of_weights import export
    from firecaffe.cli.arguments import show
    from firecaffe.cli.typed_run import parse_run

    parser = make_parser()
    typed = parse_run(parser, argv)
    given = parser.arguments(typed.options)
    show(export(typed.where, **{**given, "to": given["to"] or ""}, replace=typed.replaced))
    return 0
