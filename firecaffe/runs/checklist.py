"""What a comparison must have to be believed: FireCaffe's own list, and what it lacked itself.

Source: Iandola et al. 2016, section 5 (best practices: the same data and its accuracy beside the
time, all hyperparameters, a baseline of the same work); repeats, equal epochs and a tuned baseline
are what its table 2 does not have.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from firecaffe.runs.groups import Group, GroupRow
from firecaffe.runs.statistics import FEWEST


@dataclass(frozen=True)
class Item:
    """One thing that is asked for."""

    what: str
    is_met: bool
    why: str
    """What was found; of what is missing, what would do."""


def checklist(groups: Sequence[Group], rows: Sequence[GroupRow]) -> list[Item]:
    """Each item, met or named as missing."""
    data = {str(group.first.result["data"]) for group in groups}
    epochs = {None if row.epochs is None else round(row.epochs, 2) for row in rows}
    seeds = min(row.seeds for row in rows)
    unequal = [each for row in rows for each in row.unequal]
    hardware = {row.hardware.split(" x ", 1)[1] for row in rows}
    tuned = str(groups[0].first.result.get("tuned", ""))
    listed = ", ".join(f"{each:g}" for each in sorted(e for e in epochs if e is not None))
    return [
        Item("the same data", len(data) == 1, f"{len(data)} data sets"),
        Item("accuracy beside the time", True, "top-1 of every run"),
        Item("all hyperparameters", True, "recipe.toml in every run's folder"),
        Item("equal epochs", len(epochs) == 1 and None not in epochs, f"epochs: {listed or '?'}"),
        Item(
            "a baseline of the same work", not unequal, unequal[0] if unequal else "the first group"
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
