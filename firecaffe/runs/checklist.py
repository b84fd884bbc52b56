"""What a comparison must have to be believed: FireCaffe's own list, and what it lacked itself.

Source: Iandola et al. 2016, section 5 (best practices: the same data, the same accuracy, all
hyperparameters, a baseline of the same work); the code, repeats, equal epochs and a tuned baseline
are what its table 2 does not have.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from firecaffe.runs.compare import other_epochs
from firecaffe.runs.groups import Group, GroupRow, letters
from firecaffe.runs.statistics import FEWEST, TOLD


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
    seeds = min(row.seeds for row in rows)
    unequal = [
        f"{name}: {', '.join(row.unequal)}"
        for name, row in zip(letters(len(rows)), rows, strict=True)
        if row.unequal
    ]
    hardware = {row.hardware.split(" x ", 1)[1] for row in rows}
    tuned = str(groups[0].first.result.get("tuned", ""))
    alone = "" if len(groups) > 1 else "one group alone has nothing to be compared with"
    return [
        Item("the same data", len(data) == 1, "; ".join(sorted(data))),
        _accuracy(rows, alone),
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


def _accuracy(rows: Sequence[GroupRow], alone: str) -> Item:
    """A speedup to a lower accuracy is none."""
    doubts = [
        f"{name} {100 * row.against.value:+.2f} points: {row.against.verdict}"
        for name, row in zip(letters(len(rows)), rows, strict=True)
        if row.against is not None and (row.is_worse or row.against.verdict not in TOLD)
    ]
    met = "no group is shown to be below the first"
    return Item("the same accuracy", not doubts and not alone, alone or "; ".join(doubts) or met)


def _code(groups: Sequence[Group]) -> Item:
    """Of the words every run has all; of the code it has the commit, where there is one."""
    commits = {str(run.words["environment.commit"] or "") for g in groups for run in g.runs}
    why = f"recipe.toml in every run's folder; {', '.join(sorted(commits))}"
    if "" in commits:
        doubt = "the code of a run has no commit"
    elif any(commit.endswith("+") for commit in commits):
        doubt = "code changed since its commit"
    else:
        doubt = ""
    return Item("all hyperparameters, and the code", not doubt, doubt or why)


def _epochs(groups: Sequence[Group], rows: Sequence[GroupRow]) -> Item:
    known = [row.epochs for row in rows if row.epochs is not None]
    is_met = len(known) == len(rows) and not any(
        other_epochs(groups[0].first, group.first) for group in groups
    )
    shown = ", ".join(dict.fromkeys(f"{each:.4g}" for each in known)) or "unknown"
    return Item("equal epochs", is_met, shown)
