"""`firecaffe unpack NET.fcz`: write the weights of a .fcz file as safetensors."""

import json
import os
from pathlib import Path

from firecaffe.cli.console import check_target
from firecaffe.cli.options.unpack import make_parser
from firecaffe.compression import fcz
from firecaffe.errors import RecipeError
from firecaffe.training.records import say
from firecaffe.training.unpack_fcz import unpack


def main(argv: list[str]) -> int:
    parser = make_parser()
    options = parser.parse_args(argv)
    if len(options.paths) != 1:
        found = " and ".join(options.paths) or "none"
        raise RecipeError(f"unpack takes one file, found {found}; usage: {parser.usage}")
    path = Path(options.paths[0])
    target = Path(options.to) if options.to else path.with_suffix(".safetensors")
    with fcz.read(path) as file:
        check_target("--to", str(target), options.overwrite, (".safetensors",))
        unpack(file, target)
        network, count = file.network, len(file.outlines)
    before, after = os.path.getsize(path), os.path.getsize(target)
    say(f"{target}: {count} tensors, {after:,} bytes; as .fcz {before:,}")
    say(f"network: {json.dumps(network)}")
    return 0
