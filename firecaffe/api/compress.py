"""`firecaffe.compress`: a trained network made small, in one file, with what is lost."""

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import RenderableType

from firecaffe.api.answer import Answer
from firecaffe.api.argument_checks import check_count, refuse_beside
from firecaffe.api.compress_report import not_reached, plot_sizes, report, sensitivity_charts
from firecaffe.api.console import check_target, make_console
from firecaffe.api.picture import SUFFIXES, check_picture
from firecaffe.api.recipe_argument import recipe_of
from firecaffe.api.run_argument import open_run
from firecaffe.cluster.from_script import from_script
from firecaffe.cluster.groups import check_alone
from firecaffe.cluster.world import join
from firecaffe.files import finite, write_json
from firecaffe.generators import generators_kept
from firecaffe.recipe.sections import Recipe
from firecaffe.resume_advice import option
from firecaffe.runs.measure import Measure
from firecaffe.shrink.compress_network import CompressRequest
from firecaffe.shrink.compress_network import compress as make_small
from firecaffe.shrink.compression_record import as_record
from firecaffe.shrink.layer_sizes import LayerSensitivity
from firecaffe.shrink.scheme import find_scheme
from firecaffe.shrink.start_network import check_weights, parse_target, recipe_of_run
from firecaffe.training.load import run_of
from firecaffe.training.named import check_named

SUFFIX = ".fcz"


@dataclass(frozen=True, repr=False)
class Compressed(Answer):
    """A network in a small file, with its size and its accuracy."""

    record: Mapping[str, Any]
    """The sizes, the accuracies, each tensor and each size that was tried."""

    @property
    def path(self) -> Path:
        """The file; if no size reaches the target, the nearest one."""
        return Path(self.record["file"])

    @property
    def is_reached(self) -> bool:
        """Whether the target is reached; true without one."""
        return bool(self.record["reached"])

    @property
    def why_not(self) -> str:
        """What is nearest to the target, if none reaches it; else empty."""
        return "" if self.is_reached else not_reached(self.record)

    def to_dict(self) -> dict[str, Any]:
        """Return the record."""
        finite_record: dict[str, Any] = finite(dict(self.record))
        return finite_record

    def _parts(self) -> Iterator[RenderableType]:
        yield from report(self.record)


@from_script
def compress(
    run: Recipe | str | Path,
    *,
    scheme: str | Path = "best",
    target: str = "",
    best: bool = False,
    trust_code: bool = False,
    nproc_per_node: int = 1,
    out: str | Path = "",
    plot: str | Path = "",
    overwrite: bool = False,
    replace: Mapping[str, Any] | None = None,
) -> Compressed:
    """Make a trained network small: prune, retrain, share values, retrain, code; one file.

    Lines on stderr tell of each round as it ends.

    Args:
        run: A finished run, or a recipe (or its file's path) whose model.weights are trained.
        scheme: How: a scheme's name, or FILE.toml.
        target: "40x", "27KB" or "0.1points": search what each layer keeps, by held-out samples.
        best: Take the best checkpoint, not the newest.
        trust_code: Run code that the run's folder names.
        nproc_per_node: The ranks of each training.
        out: The file; without it model.fcz in the run's folder, or RECIPE.fcz here.
        plot: A file for a picture of size against error: FILE.png or FILE.html.
        overwrite: Replace files that exist.
        replace: Words of the run's recipe with other values, as {"data.path": "new"}.

    Raises: RecipeError, RunError, CheckpointError. A target that no size reaches raises nothing:
    see `is_reached`.
    """
    check_alone("compress")
    recipe, path = _open(run, out, best, trust_code, replace)
    check_count("nproc_per_node", nproc_per_node, 1)
    check_target(option("out"), str(path), overwrite, (SUFFIX,))
    record_to = path.with_suffix(".json")
    is_ours = overwrite and path.exists()  # otherwise the record belongs to another file
    check_target(f"{option('out')} {path} with the record", str(record_to), is_ours)
    check_picture(option("plot"), str(plot), overwrite, SUFFIXES)
    goal = parse_target(target) if target else None
    asked = CompressRequest(recipe, find_scheme(str(scheme)), goal, path, nproc_per_node)
    with join(recipe.train.device) as world, generators_kept():
        result = make_small(asked, world, _say, _say_layers)
    record = as_record(result)
    if result.reached:
        write_json(record_to, record)
    if plot:
        plot_sizes(Path(plot), record)
    return Compressed(record)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _say_layers(layers: Sequence[LayerSensitivity], measure: Measure) -> None:
    console = make_console(stderr=True)
    for chart in sensitivity_charts(layers, measure):
        console.print(chart)


def _open(
    run: Any, out: str | Path, best: bool, trust_code: bool, replace: Mapping[str, Any] | None
) -> tuple[Recipe, Path]:
    """Return the recipe with the network's weights, and the path of the file."""
    is_file = isinstance(run, str | Path) and str(run).endswith(".toml")
    if not is_file and not isinstance(run, Recipe):
        used = open_run(run, replace, trust_code)
        check_named(used.where, used.recipe, ("model", "data", "task"))
        of_run = recipe_of_run(used.where, used.recipe, best)
        return of_run, Path(out or (run_of(used.where) or used.where) / f"model{SUFFIX}")
    refuse_beside("a recipe", replace=replace, best=best, trust_code=trust_code)
    recipe = recipe_of(run)
    name = Path(run) if is_file else Path("recipe.toml")
    check_weights(recipe, name)
    return recipe, Path(out or name.with_suffix(SUFFIX).name)
