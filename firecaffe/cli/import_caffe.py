"""`firecaffe import SOLVER_OR_NET.prototxt`: convert Caffe's files to a folder with a recipe."""

from pathlib import Path

from firecaffe.cli.network import parse_input
from firecaffe.cli.options.import_caffe import make_parser
from firecaffe.errors import LeftOutError, RecipeError, RunError
from firecaffe.from_caffe.recipe import NET, Asked, Imported, read
from firecaffe.from_caffe.write import RECIPE, REPORT, check_folder, files_of, write_folder
from firecaffe.training.records import say
from firecaffe.value_checks import count_of


def main(argv: list[str]) -> int:
    parser = make_parser()
    options = parser.parse_args(argv)
    if len(options.paths) != 1:
        found = " and ".join(options.paths) or "none"
        raise RecipeError(f"import takes one file, found {found}; usage: {parser.usage}")
    path = Path(options.paths[0])
    folder = Path(options.out or path.stem)
    if options.root and not Path(options.root).is_dir():
        raise RunError(f"--root {options.root}: there is no such folder")
    shape = parse_input(options.input_shape, "--input-shape") if options.input_shape else ()
    check_folder(folder, options.overwrite)
    imported = read(path, Asked(str(folder), options.root, shape, options.weights))
    write_folder(folder, files_of(imported, path))
    for line in imported.report.lines():
        say(line)
    say(f"written: {folder / RECIPE}, with {NET} and {REPORT} beside it")
    _end(imported, folder)
    return 0


def _end(imported: Imported, folder: Path) -> None:
    left = imported.report.left_out
    if left:
        first = f"{left[0].place}: {left[0].what}"
        raise LeftOutError(
            f"{count_of(len(left), 'thing', 'things')} left out of {folder / RECIPE}, as {first}"
        )
    say(f"next: firecaffe train {folder / RECIPE}")
