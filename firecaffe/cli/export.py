"""`firecaffe export RUN --to FORMAT`: write a run's network as a file for other programs."""

from firecaffe.cli.arguments import Parser


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


def main(argv: list[str]) -> int:
    from firecaffe.api.export import export
    from firecaffe.cli.show import show
    from firecaffe.cli.typed_run import parse_run

    typed = parse_run(make_parser(), argv)
    options = typed.options
    answer = export(
        typed.where,
        options.to or "",
        best=options.best,
        trust_code=options.trust_code,
        out=options.out,
        overwrite=options.overwrite,
        replace=typed.replaced,
    )
    show(answer)
    return 0
