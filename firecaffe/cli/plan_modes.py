"""The table of `firecaffe plan --modes`: the rate in each mode of synchrony."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from firecaffe.plan.cluster import Cluster
from firecaffe.plan.forecast import Forecast, fastest
from firecaffe.plan.modes import Mode, hidden_s, modes_of
from firecaffe.plan.workload import Workload
from firecaffe.synchrony.config import EVERY_STEP, SynchronyConfig

HEADERS = ("step", "samples/s", "gain", "staleness", "given up", "idle", "MB a step")


class Modes:
    """The modes on the largest planned number of workers, with its fastest exchange."""

    def __init__(
        self, work: Workload, cluster: Cluster, rows: Sequence[Forecast], words: SynchronyConfig
    ) -> None:
        self.row = fastest(rows)[-1]
        self.words = words
        self.rows: list[Mode] = modes_of(work, cluster, self.row, words)
        self._hidden_s = hidden_s(work, cluster)

    @property
    def notes(self) -> list[str]:
        if self.words.mode == EVERY_STEP:
            return []
        return [
            f"the table and its hours are those of synchrony.mode {EVERY_STEP}; what "
            f"{self.words.mode} makes of the rate is in the table of modes"
        ]

    def as_dicts(self) -> list[dict[str, Any]]:
        return [{"workers": self.row.workers, **asdict(row)} for row in self.rows]

    def show(self, console: Console) -> None:
        table = Table(box=SIMPLE_HEAD)
        workers = "1 worker" if self.row.workers == 1 else f"{self.row.workers} workers"
        table.add_column(f"mode, on {workers}", no_wrap=True)
        for header in HEADERS:
            table.add_column(header, justify="right", no_wrap=True)
        for row in self.rows:
            table.add_row(
                row.words,
                f"{row.step_s * 1e3:.3g} ms",
                f"{row.images_per_s:,.0f}",
                f"{row.gain:.2f}",
                f"{row.staleness:.2f}",
                f"{row.dropped:.1%}",
                f"{row.idle:.0%}",
                f"{row.bytes_per_step / 1e6:,.1f}",
            )
        console.print(table)
        console.print(self.paragraph(), markup=False, soft_wrap=True)
        console.print()

    def paragraph(self) -> str:
        said = ["All rows are rates; what late gradients cost in accuracy, no plan knows."]
        same = [row for row in self.rows[1:] if row.words.startswith("every_step")]
        if same and same[0].gain >= 1.02:
            said.append(
                f"Measured shares bring {same[0].gain - 1:+.0%} samples/s to the same bits "
                "(synchrony.shares measured)."
            )
        best = max(self.rows, key=lambda each: each.gain)
        if best.gain < 1.02:
            said.append("No mode brings 2 %: stay with every_step.")
        elif best not in same:
            said.append(f"The fastest is {best.words}: {best.gain:.2f} times equal shares.")
        saved_s = self.row.exchange_s * (1 - 1 / self.words.local_steps)
        pays = "more than" if saved_s > self._hidden_s else "less than"
        if self.row.workers > 1:
            said.append(
                f"Local steps save {saved_s * 1e3:.3g} ms of exchange a step, {pays} the "
                f"{self._hidden_s * 1e3:.3g} ms of backward that can hide it."
            )
        return " ".join(said)
