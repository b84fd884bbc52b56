"""The checklist of a comparison.

Source: Iandola et al. 2016, section 5 (the same data, the same accuracy, all hyperparameters, a
baseline of the same work). Its table 2 lacks the code, repeats, equal epochs and a tuned baseline.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf

from firecaffe.runs.measure import has_learned, of_band, of_difference
from firecaffe.runs.run_table import TableRun, other_epochs
from firecaffe.runs.seed_groups import GroupRow, RunGroup, band_of, code_of, lettered
from firecaffe.runs.statistics import EQUIVALENT, FEWEST, ROUNDING


@dataclass(frozen=True)
class Item:
    what: str
    is_met: bool
    why: str
    """The values seen, or the reason why the item is not met."""


def checklist(
    groups: Sequence[RunGroup], rows: Sequence[GroupRow], band: float | None = None
) -> list[Item]:
    """Return each item, met or missing. A difference up to `band` of the metric counts as none."""
    data = {str(group.first.result["data"]) for group in groups}
    seeds = min(row.seeds for row in rows)
    unequal = [f"{name}: {', '.join(row.unequal)}" for name, row in lettered(rows) if row.unequal]
    hardware = {row.hardware.split(" x ", 1)[1] for row in rows}
    tuned = str(groups[0].first.result.get("tuned", ""))
    alone = "" if len(groups) > 1 else "one group alone has nothing to be compared with"
    return [
        Item("the same data", len(data) == 1, "; ".join(sorted(data))),
        _learned(groups, rows),
        _accuracy(rows, alone, band_of(groups, band)),
        _hyperparameters(groups),
        _code(groups),
        _epochs(groups, rows),
        Item(
            "a baseline of the same work",
            not unequal and not alone,
            alone or "; ".join(unequal) or "the first group",
        ),
        Item("the same kind of hardware", len(hardware) == 1, ", ".join(sorted(hardware))),
        Item(
            "repeats with other seeds",
            seeds >= FEWEST,
            f"{seeds} of at least {FEWEST} seeds in the smallest group",
        ),
        Item(
            "a tuned baseline",
            bool(tuned),
            tuned or "its rate was not searched for; `firecaffe tune` at its own batch size does",
        ),
    ]


def _learned(groups: Sequence[RunGroup], rows: Sequence[GroupRow]) -> Item:
    # A network that learned nothing is as fast, and as good, as any other such network.
    lost = [f"{name}: {row.failure}" for name, row in lettered(rows) if row.failure]
    unknown = [
        name
        for name, group in lettered(groups)
        if any(has_learned(run.result) is None for run in group.runs)
    ]
    if unknown:
        lost.append(f"the records of {', '.join(unknown)} do not say what guessing comes to")
    return Item("every run has learned", not lost, "; ".join(lost) or "above guessing")


def _accuracy(rows: Sequence[GroupRow], alone: str, band: float) -> Item:
    # A speedup at a lower accuracy is none. A higher accuracy is as good as an equal one.
    measure = rows[0].measure
    side = "above" if measure.higher_is_better else "below"
    points = f"within {of_band(band, measure)} of the first group, or {side}"
    doubts = []
    for name, row in lettered(rows):
        difference, gain = row.against, row.gain
        if row.failure:
            doubts.append(f"{name} has failed")
        elif difference is None or gain is None:
            if row is not rows[0]:
                doubts.append(f"{name} has nothing to be compared with")
        elif gain.verdict != EQUIVALENT and not gain.low >= -band - ROUNDING:  # nor if it is NaN
            alone_value = replace(difference, low=-inf, high=inf)
            doubts.append(f"{name} {of_difference(alone_value, measure)}: {difference.verdict}")
    return Item("the same accuracy", not doubts and not alone, alone or "; ".join(doubts) or points)


def _hyperparameters(groups: Sequence[RunGroup]) -> Item:
    runs = [run for group in groups for run in group.runs]
    codes = [_named_code(run) for run in runs]
    if "" in codes:
        doubt = "the record of a run has neither a commit nor a digest of its source"
    elif any(code.endswith("+") for code in codes):
        doubt = "code changed since its commit"
    else:
        doubt = ""
    why = f"recipe.toml in every run's folder; {', '.join(sorted(set(codes)))}"
    return Item("all hyperparameters, and the code", not doubt, doubt or why)


def _named_code(run: TableRun) -> str:
    source = run.words.get("environment.source")
    version = run.words.get("environment.firecaffe")
    installed = f"firecaffe {version}, source {source[:12]}" if source and version else ""
    return str(run.words.get("environment.commit") or installed)


def _code(groups: Sequence[RunGroup]) -> Item:
    runs = [run for group in groups for run in group.runs]
    codes = sorted({code_of(run) for run in runs})
    versions = sorted({str(run.words.get("environment.torch")) for run in runs})
    is_one = len(codes) == len(versions) == 1
    shown = "; ".join(f"source {_short(code)}" for code in codes)
    return Item("the same code", is_one, f"{shown}; torch {', '.join(versions)}")


def _short(code: str) -> str:
    return " ".join(word.rstrip(",")[:12] + "," * word.endswith(",") for word in code.split())


def _epochs(groups: Sequence[RunGroup], rows: Sequence[GroupRow]) -> Item:
    known = [row.epochs for row in rows if row.epochs is not None]
    is_met = len(known) == len(rows) and not any(
        other_epochs(groups[0].first, group.first) for group in groups
    )
    shown = ", ".join(dict.fromkeys(f"{epochs:.4g}" for epochs in known)) or "unknown"
    return Item("equal epochs", is_met, shown)
