"""`firecaffe.compress`: a trained network in one small file, and the accuracy that is lost."""

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import log
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import RenderableType
from rich.table import Table

from firecaffe.api.answer import (
    PLAIN,
    SUFFIXES,
    Answer,
    check_picture,
    load_figure,
    make_console,
    numbers_table,
    write_picture,
)
from firecaffe.api.argument_checks import check_count, check_target, path_of, refuse_beside
from firecaffe.api.recipe_argument import recipe_of
from firecaffe.api.run_argument import open_run
from firecaffe.cluster.from_script import from_script
from firecaffe.cluster.groups import check_alone
from firecaffe.cluster.world import join
from firecaffe.files import finite, write_json
from firecaffe.generators import generators_kept
from firecaffe.models.weights import FCZ
from firecaffe.recipe.sections import Recipe
from firecaffe.resume_advice import option
from firecaffe.runs.measure import Measure
from firecaffe.shrink.attempt import check_weights, recipe_of_run
from firecaffe.shrink.compress_network import CompressRequest, as_record
from firecaffe.shrink.compress_network import compress as make_small
from firecaffe.shrink.layer_sizes import LayerSensitivity
from firecaffe.shrink.pruning_rounds import parse_target
from firecaffe.shrink.scheme import find_scheme
from firecaffe.training.load import run_of

BARS = " ▁▂▃▄▅▆▇█"
MIN_BAR, MAX_BAR = 0.1, 100.0
"""Losses at which a bar begins and is full, on a logarithmic scale."""


Record = Mapping[str, Any]


def sensitivity_charts(layers: Sequence[LayerSensitivity], measure: Measure) -> list[Table]:
    """Return tables of the loss if only one layer is pruned, or only one shares few-bit values."""
    return [
        _chart([layer for layer in layers if layer.keeps], measure, "keeps", "{:.3g} %", 100),
        _chart([layer for layer in layers if layer.bits], measure, "bits", "{} bits", 1),
    ]


def _chart(
    layers: Sequence[LayerSensitivity], measure: Measure, what: str, header: str, scale: int
) -> Table:
    """Return a table of the layers' field `what`; `header` formats a level times `scale`."""
    levels = sorted(getattr(layers[0], what), reverse=True)
    unit = "points of " if measure.is_share else ""
    said = "keeps" if what == "keeps" else "shares values of"
    title = f"{unit}{measure.words} lost on held-out samples if a layer alone {said} …"
    headers = ("layer", "weights", *(header.format(scale * level) for level in levels))
    style: dict[str, Any] = {"title": title, "title_justify": "left", **PLAIN}
    table = numbers_table(*headers, texts=("layer",), no_wrap=False, **style)
    for layer in layers:
        lost = [getattr(layer, what)[level] for level in levels]
        table.add_row(layer.name, f"{layer.weights:,}", *(f"{bar(x)}{x:.1f}" for x in lost))
    return table


def bar(lost: float) -> str:
    if lost < MIN_BAR:
        return BARS[0]
    part = log(lost / MIN_BAR) / log(MAX_BAR / MIN_BAR)
    return BARS[min(1 + int(part * (len(BARS) - 1)), len(BARS) - 1)]


def _tensors(record: Record) -> Table:
    table = Table(box=SIMPLE_HEAD, show_footer=True, **PLAIN)
    rows = record["tensors"]
    sums = {
        word: sum(row[word] for row in rows)
        for word in ("size", "mask_bytes", "symbol_bytes", "codebook_bytes", "bytes", "floor_bytes")
    }
    kept = sum(row["kept_share"] * row["size"] for row in rows)
    table.add_column("tensor", "all")
    for header, total in (
        ("elements", f"{sums['size']:,}"),
        ("kept", f"{kept / sums['size']:.1%}"),
        ("values", ""),
        ("bits", ""),
        ("where, B", f"{sums['mask_bytes']:,.0f}"),
        ("which, B", f"{sums['symbol_bytes']:,.0f}"),
        ("values, B", f"{sums['codebook_bytes']:,.0f}"),
        ("bytes", f"{sums['bytes']:,.0f}"),
        ("entropy, B", f"{sums['floor_bytes']:,.0f}"),
        ("above it", f"{sums['bytes'] / sums['floor_bytes'] - 1:+.1%}"),
    ):
        table.add_column(header, total, justify="right")
    for row in rows:
        table.add_row(
            row["name"],
            f"{row['size']:,}",
            f"{row['kept_share']:.1%}",
            str(row["values"] or ""),
            str(row["bits"] or ""),
            *(f"{row[word]:,.0f}" for word in ("mask_bytes", "symbol_bytes", "codebook_bytes")),
            f"{row['bytes']:,.0f}",
            f"{row['floor_bytes']:,.0f}",
            f"{row['above_floor']:+.1%}" if row["floor_bytes"] else "",
        )
    return table


def _tried(record: Record, measure: Measure) -> Table:
    headers = ("tried", "bytes", "ratio", f"held-out {measure.words}", "lost", "test", "lost")
    table = numbers_table(*headers, texts=("tried",), no_wrap=False, **PLAIN)
    for size in record["tried"]:
        cells = []
        for part in ("held_out", "test"):
            cells += [measure.shown(size["decoded"][part]), f"{size['lost'][part]:.2f}"]
        table.add_row(size["file"], f"{size['bytes']:,}", f"{size['ratio']:.1f}x", *cells)
    return table


def metric_line(what: str, worth: Record, measure: Measure) -> str:
    line = f"{what}: test {measure.words} {measure.shown(worth['test'])}"
    if worth["held_out"] is None:
        return line
    return f"{line}, held-out {measure.shown(worth['held_out'])}"


def loss_text(record: Record) -> str:
    unit = " points" if record["is_share"] else ""
    lost = record["lost"]
    line = f"lost {lost['test']:.2f}{unit} of test"
    return line if lost["held_out"] is None else f"{line}, {lost['held_out']:.2f} of held-out"


def size_line(record: Record) -> str:
    return (
        f"{record['file']}: {record['bytes']:,} bytes, {record['ratio']:.1f}x "
        f"(the whole file against 4 bytes for each of {record['weights']:,} weights)"
    )


def plot_sizes(path: Path, record: Mapping[str, Any]) -> None:
    """Draw all sizes tried, for any target. Raises RecipeError if matplotlib is missing."""
    figure = load_figure()(figsize=(7, 4.2))
    axes = figure.subplots()
    ratios = [size["ratio"] for size in record["sizes"]]
    for part, words in (("held_out", "held-out samples"), ("test", "test samples")):
        lost = [size["lost"][part] for size in record["sizes"]]
        if None not in lost:
            axes.plot(ratios, lost, marker="o", label=words)
    axes.axhline(0, color="gray", linestyle=":", label="float network")
    unit = "points of " if record["is_share"] else ""
    axes.set(
        xscale="log",
        xlabel="4 bytes a weight / bytes of the whole file",
        ylabel=f"{unit}{record['metric']} lost",
        title=f"{record['network']}, {record['scheme']}",
    )
    axes.legend()
    write_picture(path, figure, "firecaffe compress", "what is lost against the ratio")


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
        """The size that is nearest to the target, in words; empty if the target is reached."""
        record = self.record
        if self.is_reached:
            return ""
        return (
            f"{option('target')} {record['target']}: none of {len(record['tried'])} sizes reaches "
            f"it; the nearest is {size_line(record)}, {loss_text(record)}"
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the record."""
        finite_record: dict[str, Any] = finite(dict(self.record))
        return finite_record

    def _parts(self) -> Iterator[RenderableType]:
        record = self.record
        # Its direction is already in the record's losses.
        measure = Measure(record["metric"], is_share=record["is_share"])
        yield _tensors(record)
        if record["tried"]:
            yield _tried(record, measure)
        for training in record["rounds"]:
            test = measure.shown(training["test"])
            yield f"{training['folder']}: test {measure.words} {test}"
        yield metric_line("float network", record["float"], measure)
        yield metric_line("decoded file", record["decoded"], measure) + f"; {loss_text(record)}"
        times = record["seconds_over_10_mbit_per_s"]
        yield f"over 10 Mbit/s: {times['file']:.3g} s instead of {times['float']:.3g} s, as float32"
        yield size_line(record)


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

    A line on stderr reports each round as it ends.

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
    check_target(option("out"), str(path), overwrite, (FCZ,))
    record_to = path.with_suffix(".json")
    is_ours = overwrite and path.exists()  # otherwise the record belongs to another file
    check_target(f"{option('out')} {path} with the record", str(record_to), is_ours)
    check_picture(option("plot"), str(plot), overwrite, SUFFIXES)
    goal = parse_target(str(target)) if target else None
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
        used.check_named()
        of_run = recipe_of_run(used.where, used.recipe, best)
        return of_run, path_of("out", out or (run_of(used.where) or used.where) / f"model{FCZ}")
    refuse_beside("a recipe", replace=replace, best=best, trust_code=trust_code)
    recipe = recipe_of(run)
    name = Path(run) if is_file else Path("recipe.toml")
    check_weights(recipe, name)
    return recipe, path_of("out", out or name.with_suffix(FCZ).name)
