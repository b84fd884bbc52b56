"""The part of `firecaffe explain` for a run with a server."""

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from firecaffe.cli.explain_words import sentence
from firecaffe.runs.explain_served import ServedExplanation, ServedRank

HEADERS = ("rank", "micro-batches", "one takes", "idle", "pulled", "pushed")


def show_served(console: Console, found: ServedExplanation) -> list[str]:
    """Print the table of ranks, and return the remarks, one per line."""
    table = Table(box=SIMPLE_HEAD)
    for header in HEADERS:
        table.add_column(header, justify="right", no_wrap=True)
    for rank in found.ranks:
        table.add_row(*_cells(rank))
    console.print(table)
    step = (
        f"{found.steps:,} steps of {found.step_s * 1e3:,.1f} ms; the server's updates take "
        f"{found.update_s * 1e3:,.1f} ms of each"
    )
    slow = [sentence(each, "a micro-batch takes") for each in found.slow]
    if not slow and not found.not_tested:
        slow.append("no rank is shown to be slow: none beyond the noise")
    return [step, *found.lines, *slow, *(f"not tested: {why}" for why in found.not_tested)]


def _cells(rank: ServedRank) -> list[str]:
    return [
        str(rank.rank),
        f"{rank.micro_batches:,}",
        f"{rank.seconds * 1e3:,.1f} ms",
        "-" if rank.idle is None else f"{rank.idle:.0%}",
        _megabytes(rank.pulled_bytes),
        _megabytes(rank.pushed_bytes),
    ]


def _megabytes(count: int | None) -> str:
    return "-" if count is None else f"{count / 1e6:,.1f} MB"
