"""`firecaffe profile MODEL`: parameters, activations, FLOPs and traffic, layer by layer."""

from firecaffe.cli.arguments import NETWORK, Parser, add_network_options, show

NOTES = (
    "|W| is the bytes of the weights. D is the bytes of the inputs of convolutions and fully "
    "connected layers, as in FireCaffe. MB are 10^6 bytes.",
    "Of a .fcz file, it also shows its bytes next to those of float32, and the time of a transfer "
    "over 10 Mbit/s, 100 Mbit/s and 1 Gbit/s.",
    "--parallel shows what each of N workers sends in a step of B samples, all workers together, "
    "for each layer with trained weights: by data, and with that layer split.",
)


def make_parser() -> Parser:
    parser = Parser(
        "profile",
        "MODEL|NET.fcz [--args TABLE] [--batch-size B] [--input 3x224x224] "
        "[--parallel [--workers N]] [--json]",
        "Show the shapes, parameters, activations and FLOPs of a network, layer by layer. It takes "
        "no memory.",
        notes=NOTES,
    )
    add, flag = parser.add, parser.flag
    add("model", help=f"{NETWORK}; or a file of firecaffe compress", type=str)
    add("--batch-size", "B", "samples of the batch", default=1)
    add_network_options(add)
    flag("--parallel", "show what each worker sends, by data and with layers split")
    add("--workers", "N", "with --parallel: number of workers; else 8", type=int)
    parser.add_trust()
    flag("--json", "print JSON")
    return parser


def main(argv: list[str]) -> None:
    from firecaffe.api.network_profile import profile

    parser = make_parser()
    options = parser.parse_args(argv)
    show(profile(**parser.arguments(options)), options.json)
