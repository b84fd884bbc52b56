"""The options of `firecaffe export`."""

from firecaffe.cli.parser import Parser


def make_parser() -> Parser:
    parser = Parser(
        "export",
        "RUN --to safetensors|onnx|torch_export|caffemodel [--best] [--out FILE] [--overwrite]",
        "A run's network as a file for other programs, compared with the network before it has "
        "its name.",
        takes_recipe=True,
    )
    add = parser.add
    add(
        "--to",
        choices=["safetensors", "onnx", "torch_export", "caffemodel"],
        default=None,
        help="weights alone, the whole network, or files for Caffe",
    )
    parser.add_best()
    parser.add_trust()
    add("--out", type=str, default="", metavar="FILE", help="else model.SUFFIX in the run's folder")
    parser.add_overwrite()
    return parser
