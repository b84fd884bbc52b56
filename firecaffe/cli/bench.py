"""`firecaffe bench PART`: each part is a separate command, in `bench_PART`."""

from importlib import import_module

from firecaffe.errors import RecipeError

PARTS = ("exchange", "step", "data")


def main(argv: list[str]) -> int:
    if not argv or argv[0] not in PARTS:
        given = repr(argv[0]) if argv else "nothing"
        raise RecipeError(
            f"bench measures `exchange`, `step` or `data`, as in `bench exchange`; found {given}"
        )
    module = import_module(f"firecaffe.cli.bench_{argv[0]}")
    exit_code: int = module.main(argv[1:])
    return exit_code
