"""`firecaffe plan RECIPE --draw`: a drawing of which rank holds which part of a network."""

from collections.abc import Iterator, Sequence
from itertools import groupby, pairwise

from firecaffe.errors import RecipeError
from firecaffe.parallel.find_paths import PATHS
from firecaffe.parallel.slide import ROWS
from firecaffe.plan.layouts import Layout
from firecaffe.plan.recipe_stages import works_of
from firecaffe.plan.split_plans import SplitPlan
from firecaffe.plan.split_step import SplitCost
from firecaffe.plan.workload import LayerWork

MOST_RANKS = 16

OWN, OTHERS = "█", "·"

HEADERS = ("layers", "by", "samples", "gradients")


INSIDE = {ROWS: "halos and sums of gradients", PATHS: "sums of gradients"}
"""Names of the data exchanged within a layer, by the word of its split."""


def draw(plan: SplitPlan, cost: SplitCost) -> str:
    """Draw a line for each run of layers in one layout, and for each exchange between them.

    A layer's line shows the parts that each rank holds. An exchange's line shows the MB of
    activations that each worker sends in a step. Raises RecipeError if there are too many ranks.
    """
    _check(plan.workers)
    rows: list[tuple[str, str, list[str], str, str] | str] = []
    names: list[str] = []
    pairs = [*zip(cost.chain, plan.layouts, strict=True)]
    sent = [0.0, *(cost.between(at, *pair)[1] for at, pair in enumerate(pairwise(plan.layouts)))]
    most = max(each.batch for each in plan.layouts)
    for at, (unit, layout) in enumerate(pairs):
        if sent[at]:
            rows += [*_run(names, pairs[at - 1][1]), f"↕ activations, {sent[at] / 1e6:,.1f} MB"]
            names = []
        elif names and (layout != pairs[at - 1][1] or layout.parts > 1):
            rows += _run(names, pairs[at - 1][1])
            names = []
        if unit.weights:
            names.append(_called(unit.name, unit.words, layout))
        inside = cost.inside(unit, layout, most)[1]
        if inside:
            what = INSIDE.get(_called("", unit.words, layout).strip(), "halos and masks")
            rows += [*_run(names, layout), f"↕ {what}, {inside / 1e6:,.1f} MB"]
            names = []
    rows += _run(names, pairs[-1][1])
    return _lines(rows, plan.workers)


def _called(name: str, words: tuple[str, str], layout: Layout) -> str:
    """Return the layer's name and the word of its split, separated by a tab."""
    shared = layout.in_parts
    if shared.rows > 1:
        return f"{name}\t{ROWS}"
    word = words[1] if shared.inputs > 1 else words[0] if shared.parts > 1 else "-"
    return f"{name}\t{word}"


def _run(names: Sequence[str], layout: Layout) -> Iterator[tuple[str, str, list[str], str, str]]:
    for word, own in groupby(names, lambda each: each.partition("\t")[2]):
        first, *rest = (each.partition("\t")[0] for each in own)
        name = f"{first} … {rest[-1]}" if rest else first
        cells = [held(layout, rank) for rank in range(layout.workers)]
        together = layout.workers // layout.batch
        samples = "own" if together == 1 else f"of {together}"
        yield name, word, cells, samples, f"{layout.batch} workers" if layout.batch > 1 else "-"


def held(layout: Layout, rank: int) -> str:
    """Draw the parts of a layer's weights, with those of this rank filled."""
    place = 0
    for stride, size in (layout.output_digit, layout.input_digit, (1, layout.groups)):
        place = place * size + rank // stride % size
    own = layout.held
    parts = layout.parts * own
    if parts == 1:
        return OWN
    return OTHERS * (place * own) + OWN * own + OTHERS * (parts - (place + 1) * own)


def _lines(rows: Sequence[tuple[str, str, list[str], str, str] | str], workers: int) -> str:
    widest = max(len(row[2][0]) for row in rows if not isinstance(row, str))
    shown = [row if isinstance(row, str) else _whole(row, widest) for row in rows]
    ranks = [f"rank {rank}" for rank in range(workers)]
    table = [(HEADERS[0], HEADERS[1], *ranks, *HEADERS[2:])]
    table += [each for each in shown if not isinstance(each, str)]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    body = (f"  {row}" if isinstance(row, str) else _line(row, widths) for row in shown)
    return "\n".join([_line(table[0], widths), *body])


def _whole(row: tuple[str, str, list[str], str, str], widest: int) -> tuple[str, ...]:
    name, word, cells, *rest = row
    return (name, word, *(cell if len(cell) > 1 else cell * widest for cell in cells), *rest)


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    return "  ".join(each.ljust(width) for each, width in zip(cells, widths, strict=True)).rstrip()


def draw_stages(plan: SplitPlan, layers: Sequence[LayerWork]) -> str:
    """Draw each stage with its ranks, and each cut. Raises RecipeError for too many ranks."""
    _check(plan.workers)
    assert plan.words is not None
    names = plan.words.stages
    works = works_of(layers, names)
    batch, size = plan.workers // plan.model, plan.words.num_stages
    each = plan.model // size
    rows: list[tuple[str, str, list[str], str, str] | str] = []
    for stage, calls in enumerate(works):
        own = [rank % plan.model // each for rank in range(plan.workers)]
        cells = [OWN if number == stage else OTHERS for number in own]
        called = f"{calls[0].name} … {calls[-1].name}" if len(calls) > 1 else calls[0].name
        gradients = f"{batch} workers" if batch > 1 else "-"
        rows.append((called, f"stage {stage}", cells, f"of {size}" * (size > 1), gradients))
        if stage < size - 1:
            crossing = plan.crossings[stage]
            rows.append(
                f"↕ {crossing.forward:,.0f} numbers a sample, {crossing.backward:,.0f} back"
            )
    return _lines(rows, plan.workers)


def _check(workers: int) -> None:
    if workers > MOST_RANKS:
        raise RecipeError(f"--draw shows at most {MOST_RANKS} workers; found {workers}")
