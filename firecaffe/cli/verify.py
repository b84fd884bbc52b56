"""`firecaffe verify RECIPE.toml`: compare the bits of trainings. For a RUN, see `verify_run`."""

import dataclasses
import tempfile
from pathlib import Path

from firecaffe.cli.layouts import layouts_of
from firecaffe.cli.options.verify import make_parser
from firecaffe.cli.parse import parse_recipe
from firecaffe.cli.twin import by_workers, check_twins, train_twin
from firecaffe.cli.verify_run import main as verify_run
from firecaffe.errors import NotIdenticalError, RecipeError
from firecaffe.runs.recorded import first_difference
from firecaffe.runs.run_folder import read_run_file


def main(argv: list[str]) -> int:
    parser = make_parser()
    if any(Path(positional).is_dir() for positional in parser.read(argv).positionals):
        return verify_run(argv)
    recipe, options = parse_recipe(parser, argv)
    if options.steps < 1:
        raise RecipeError(f"--steps is {options.steps}; it must be at least 1")
    recipe = dataclasses.replace(
        recipe, train=dataclasses.replace(recipe.train, steps=options.steps, epochs=0)
    )
    if options.layouts:
        twins = layouts_of(options.layouts, recipe)
    else:
        twins = by_workers(recipe, _numbers(options.nproc_per_node))
    check_twins(twins)
    with tempfile.TemporaryDirectory(prefix="firecaffe-verify-") as folder:
        runs = {twin.name: train_twin(twin, Path(folder), digests=True) for twin in twins}
        return _report(runs, options.steps, "layouts" if options.layouts else "workers")


def _report(runs: dict[str, Path], steps: int, what: str) -> int:
    first, *others = runs
    for number in others:
        difference = first_difference(runs[first], runs[number])
        if difference is not None:
            doubts = dict.fromkeys(
                doubt
                for run in (runs[first], runs[number])
                for doubt in read_run_file(run, "result.json")["identity_doubts"]
            )
            why = f"; {'; '.join(doubts)}" if doubts else ""
            raise NotIdenticalError(
                f"{first} and {number} {what} differ from step {difference.step} on, "
                f"first in {difference.tensor}{why}"
            )
    results = [read_run_file(run, "result.json") for run in runs.values()]
    result = results[0]
    for doubt in dict.fromkeys(doubt for each in results for doubt in each["identity_doubts"]):
        print(f"note: {doubt}")
    counts = ", ".join(runs)
    print(
        f"identical: {counts} {what}, every tensor after each of {steps} steps; "
        f"weights {result['weights_sha256'][:12]}, state {result['state_sha256'][:12]}"
    )
    return 0


def _numbers(text: str) -> list[int]:
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if len(set(numbers)) < 2 or min(numbers) < 1:
        raise RecipeError(
            f"--nproc-per-node is {text!r}; verify needs two or more numbers, as in 1,2,4"
        )
    return list(dict.fromkeys(numbers))
