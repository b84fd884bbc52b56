"""A plan's output: the table of forecasts with its notes, the modes, the epochs, a plot."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import Any

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from firecaffe.api.answer import load_figure, numbers_table, time_text, write_picture
from firecaffe.api.argument_checks import check_number, wrong
from firecaffe.errors import RecipeError
from firecaffe.gradients.config import NO_COMPRESSOR
from firecaffe.planner.cluster import Cluster, crowding
from firecaffe.planner.compute_time import contradictions, doubts_of
from firecaffe.planner.epochs_law import BatchPoint, EpochsLaw
from firecaffe.planner.forecast import Forecast, by_workers, fastest, is_own
from firecaffe.planner.memory import remedy
from firecaffe.planner.modes import PlannedMode, hidden_s, modes_of, slowed_s
from firecaffe.planner.workload import Workload
from firecaffe.resume_advice import option
from firecaffe.runs.noise_scale import MAX_SAMPLES
from firecaffe.synchrony.config import EVERY_STEP, SynchronyConfig
from firecaffe.user_code import shown
from firecaffe.value_checks import count_of, digits_of

MIN_SLOWED = 0.01
"""The least slow-down of backward that is reported, as a share of a step."""


class Modes:
    """The modes on the largest planned number of workers, with its fastest exchange."""

    def __init__(
        self, work: Workload, cluster: Cluster, rows: Sequence[Forecast], synchrony: SynchronyConfig
    ) -> None:
        self.row = fastest(rows)[-1]
        self.synchrony = synchrony
        self.rows: list[PlannedMode] = modes_of(work, cluster, self.row, synchrony)
        self._hidden_s = hidden_s(work, cluster)
        self._slowed_s = slowed_s(work, cluster, self.row)

    @property
    def notes(self) -> list[str]:
        if self.synchrony.mode == EVERY_STEP:
            return []
        return [
            f"the table and its hours are those of synchrony.mode {EVERY_STEP}; what "
            f"{self.synchrony.mode} makes of the rate is in the table of modes"
        ]

    def as_dicts(self) -> list[dict[str, Any]]:
        return [{"workers": self.row.workers, **asdict(mode)} for mode in self.rows]

    def parts(self) -> Iterator[RenderableType]:
        first = f"mode, on {count_of(self.row.workers, 'worker', 'workers')}"
        headers = ("step", "samples/s", "gain", "staleness", "given up", "idle", "MB a step")
        table = numbers_table(first, *headers, texts=(first,))
        for mode in self.rows:
            table.add_row(
                mode.words,
                time_text(mode.step_s),
                f"{mode.images_per_s:,.0f}",
                f"{mode.gain:.2f}",
                f"{mode.staleness:.2f}",
                f"{mode.dropped:.1%}",
                f"{mode.idle:.0%}",
                f"{mode.bytes_per_step / 1e6:,.1f}",
            )
        yield table
        yield self.paragraph()
        yield Text()

    def paragraph(self) -> str:
        said = ["All rows are rates; what late gradients cost in accuracy, no plan knows."]
        same = [mode for mode in self.rows[1:] if mode.words.startswith("every_step")]
        if same and same[0].gain >= 1.02:
            said.append(
                f"Measured shares bring {same[0].gain - 1:+.0%} samples/s to the same bits "
                "(synchrony.shares measured)."
            )
        best = max(self.rows, key=lambda mode: mode.gain)
        if best.gain < 1.02:
            said.append("No mode brings 2 %: stay with every_step.")
        elif best not in same:
            said.append(f"The fastest is {best.words}: {best.gain:.2f} times equal shares.")
        saved_s = self.row.exchange_s * (1 - 1 / self.synchrony.local_steps)
        pays = "more than" if saved_s > self._hidden_s else "less than"
        if self.row.workers > 1:
            slowed = ""
            if self._slowed_s > MIN_SLOWED * self.row.step_s:
                slowed = f", which it slows down by {time_text(self._slowed_s)}"
            said.append(
                f"Local steps save {time_text(saved_s)} of exchange a step, {pays} the "
                f"{time_text(self._hidden_s)} of backward that can hide it{slowed}."
            )
        return " ".join(said)


def plan_table(work: Workload, cluster: Cluster, rows: Sequence[Forecast], is_long: bool) -> Table:
    """Return the rows of `shown_rows` as a table."""
    table = numbers_table(
        *("workers", "exchange", "step", "low - high", "compute", "exposed"),
        *("data", "update", "samples/s", "speedup", "eff.", "memory"),
        texts=("exchange",),
    )
    for workers, own in groupby(shown_rows(work, cluster, rows, is_long), lambda row: row.workers):
        for row in own:
            way = row.exchange if row.compressor == NO_COMPRESSOR else row.compressor
            own_sign = " (own)" if is_own(row, work, cluster) else ""
            way = "-" if workers == 1 else way + own_sign
            table.add_row(str(workers), way, *_cells(row, cluster.device.memory_bytes))
        table.add_section()
    return table


def shown_rows(
    work: Workload, cluster: Cluster, rows: Sequence[Forecast], is_long: bool
) -> list[Forecast]:
    """Return each number of workers' three fastest, the advised and the own; or all."""
    shown = []
    for workers, own in by_workers(rows):
        first = own if is_long else [*own[: 1 if workers == 1 else 3], *fastest(own)]
        shown += [row for row in own if row in first or is_own(row, work, cluster)]
    return shown


def slower_codecs(
    work: Workload, cluster: Cluster, rows: Sequence[Forecast], is_long: bool
) -> Iterator[str]:
    """Yield a line that names codecs which the table leaves out, if any."""
    shown = {row.compressor for row in shown_rows(work, cluster, rows, is_long)}
    slower = sorted({row.compressor for row in rows} - shown - {NO_COMPRESSOR})
    if slower:
        said = f"compressors that are not among the fastest: {', '.join(slower)}"
        yield f"{said}; {option('all')} shows them"


def assumptions(
    work: Workload, cluster: Cluster, rows: Sequence[Forecast], modes: Modes | None
) -> list[str]:
    said = [work.assumption] if work.assumption else []
    measured = cluster.measured_devices
    if 0 < measured < max(row.workers for row in rows):
        said.append(
            f"{cluster.name} was measured on {measured} workers; more of them are forecast as if "
            "there were further hosts like these"
        )
    crowded = [r.workers for r in rows if crowding(cluster, r.workers, work.threads) > 1]
    if crowded:
        said.append(
            f"from {min(crowded)} workers on, those of a node share its {cluster.cores_per_node} "
            "cores, and compute the slower"
        )
    said += doubts_of(work, cluster.device) + contradictions(work, cluster.device)
    return said if modes is None else said + modes.notes


def _cells(row: Forecast, device_bytes: float) -> list[str]:
    return [
        time_text(row.step_s),
        _band(row.step_low_s, row.step_high_s),
        time_text(row.compute_s),
        time_text(row.exposed_communication_s),
        time_text(row.data_s),
        time_text(row.update_s),
        f"{row.images_per_s:,.0f}",
        digits_of(row.speedup),
        f"{row.efficiency:.0%}",
        _memory(row, device_bytes),
    ]


def _memory(row: Forecast, device_bytes: float) -> str:
    """Format the memory's band, with ! if it does not fit and ? if it may not."""
    low, high = row.memory_low_bytes, row.memory_high_bytes
    sign = "!" if not row.fits else "?" if high > device_bytes else ""
    return f"{low / 1e9:.2f} - {high / 1e9:.2f} GB{sign}"


def totals(row: Forecast, cluster: Cluster) -> str:
    said, whole_node = [], cluster.prices.power_w > 0
    if row.hours is not None:
        said.append(f"the recipe's steps take {_hours_band(row, row.hours)}")
    if row.hours_to_accuracy is not None:
        said.append(_to_accuracy(row, row.hours_to_accuracy))
    least = "at least " * row.is_at_least
    if row.kwh is not None:
        alone = "" if whole_node else " by the devices alone"
        said.append(f"{least}{digits_of(row.kwh)} kWh{alone}")
    if row.usd is not None:
        said.append(f"{least}{digits_of(row.usd, 4)} USD")
    if row.goodput < 1:
        said.append(f"{row.goodput:.1%} of the time, after failures and checkpoints")
    who = f"{row.workers} workers" if row.workers > 1 else "one worker"
    return f"On {who}: {'; '.join(said)}."


def _to_accuracy(row: Forecast, hours: float) -> str:
    """Format the hours to a target, with the bands of a step and of the epochs to one side."""
    epochs = row.epochs_to_accuracy
    assert epochs is not None
    if epochs.high is None:
        return f"at least {hours_text(hours)} to {epochs.target}"
    low = hours * row.step_low_s / row.step_s * epochs.low / epochs.epochs
    high = hours * row.step_high_s / row.step_s * epochs.high / epochs.epochs
    return f"{hours_text(hours)} ({hours_text(low)} to {hours_text(high)}) to {epochs.target}"


def _hours_band(row: Forecast, hours: float) -> str:
    """Format hours with the relative band of a step: the number of steps is exact."""
    low, high = (hours * step_s / row.step_s for step_s in (row.step_low_s, row.step_high_s))
    return f"{hours_text(hours)} ({hours_text(low)} to {hours_text(high)})"


def hours_text(hours: float) -> str:
    if hours >= 48:
        return f"{digits_of(hours / 24)} days"
    if hours >= 1:
        return f"{hours:.3g} hours"
    return f"{hours * 60:.3g} minutes" if hours >= 1 / 60 else f"{hours * 3600:.3g} seconds"


def _band(low_s: float, high_s: float) -> str:
    scale, unit = (1.0, "s") if high_s >= 1 else (1e3, "ms")
    return f"{digits_of(low_s * scale)} - {digits_of(high_s * scale)} {unit}"


def plot(path: Path, plans: Sequence[tuple[str, Sequence[Forecast]]]) -> None:
    """Draw plans, given by name. Raises RecipeError if matplotlib is missing."""
    figure = load_figure()(figsize=(11, 4.2))
    left, right = figure.subplots(1, 2)
    most = 1
    for name, rows in plans:
        best = fastest(rows)
        workers = [row.workers for row in best]
        most = max(most, *workers)
        (line,) = left.plot(workers, [row.speedup for row in best], marker="o", label=name)
        alone_s = best[0].step_s * best[0].speedup
        lowest = [alone_s / row.step_high_s for row in best]
        highest = [alone_s / row.step_low_s for row in best]
        left.fill_between(workers, lowest, highest, alpha=0.15, color=line.get_color())
    left.plot([1, most], [1, most], color="gray", linestyle=":", label="as many times as workers")
    left.set(xscale="log", yscale="log", xlabel="workers", ylabel="speedup")
    left.legend()
    best = fastest(plans[0][1])
    place = range(len(best))
    floor = [0.0] * len(best)
    for part in ("compute_s", "exposed_communication_s", "data_s", "update_s"):
        heights = [getattr(row, part) for row in best]
        right.bar(place, heights, bottom=floor, label=part.removesuffix("_s").replace("_", " "))
        floor = [a + b for a, b in zip(floor, heights, strict=True)]
    right.set_xticks(list(place), [str(row.workers) for row in best])
    right.set(xlabel="workers", ylabel="seconds of a step", title=plans[0][0])
    right.legend()
    write_picture(path, figure, "firecaffe plan", "speedup and step time against workers")


def does_not_fit(work: Workload, cluster: Cluster, rows: Sequence[Forecast]) -> str:
    least = min(rows, key=lambda row: sum(row.memory_bytes.values())).memory_bytes
    largest = max(least, key=least.__getitem__)
    return (
        f"{work.model} in micro-batches of {work.micro_batch_size} needs "
        f"{sum(least.values()) / 1e9:.3g} GB a worker (the most for {largest}), and "
        f"{cluster.device.name} has {cluster.device.memory_bytes / 1e9:.3g} GB; {remedy(least)}"
    )


MIN_SCALE = 0.001
MAX_BATCH = 1_000_000_000
MIN_EPOCHS, MAX_EPOCHS = 0.001, 1_000_000
PAIR = re.compile(r"(\d+)=(\d+\.?\d*)")


def parse_epochs(given: str | Mapping[int, float], noise_scale: float | None) -> EpochsLaw | None:
    """Return the law through the user's batches and epochs; None for none. Raises: RecipeError."""
    if noise_scale is not None:
        check_number("noise_scale", noise_scale)
        if not MIN_SCALE <= noise_scale <= MAX_SAMPLES:
            right = f"samples, from {MIN_SCALE:g} to {MAX_SAMPLES:g}"
            raise wrong("noise_scale", f"{noise_scale:g}", right)
        if not given:
            raise RecipeError(
                f"{option('noise_scale')} goes with {option('epochs')}, at least one batch's"
            )
    if not given:
        return None
    if isinstance(given, Mapping):
        texts = [f"{batch}={epochs}" for batch, epochs in given.items()]
    else:
        texts = str(given).split(",")
    pairs = [PAIR.fullmatch(text) for text in texts]
    if None in pairs:
        right = "batches and their epochs to your target accuracy, as 128=30,1024=36"
        raise wrong("epochs", shown(given), right)
    beyond = next((pair for pair in pairs if pair and not _is_bounded(pair)), None)
    if beyond is not None:
        raise RecipeError(
            f"{option('epochs')} has {shown(beyond[0])}; batches must be 1 to {MAX_BATCH:,}, and "
            f"epochs {MIN_EPOCHS:g} to {MAX_EPOCHS:,}"
        )
    points = tuple(BatchPoint(int(pair[1]), float(pair[2])) for pair in pairs if pair)
    try:
        return EpochsLaw("your target accuracy", points, option("epochs"), noise_scale=noise_scale)
    except RecipeError as error:
        raise RecipeError(f"{option('epochs')}: {error}") from None


def _is_bounded(pair: re.Match[str]) -> bool:
    batch, epochs = float(pair[1]), float(pair[2])
    return 1 <= batch <= MAX_BATCH and MIN_EPOCHS <= epochs <= MAX_EPOCHS


def epochs_sentences(work: Workload, rows: Sequence[Forecast]) -> Iterator[str]:
    """Yield sentences on the epochs of the workload's batch; none if no law is known."""
    law = work.law
    if law is None:
        return
    at = law.epochs_at(work.global_batch_size)
    least, most = law.range
    known = f"{at.epochs:.3g} ({at.low:.3g} to {at.high:.3g})" if at.high else f"{at.epochs:.3g}"
    yield (
        f"To {law.target}: {'at least ' * at.is_at_least}{known} epochs at batch "
        f"{work.global_batch_size:,}, from {_known_by(law)} ({law.source})."
        + f" Nothing is known beyond {least:,.0f} to {most:,.0f}."
        * at.is_at_least
    )
    yield _largest_useful(law)
    hours = [(row.workers, row.hours_to_accuracy) for row in fastest(rows)]
    said = [f"{workers}: {hours_text(hour)}" for workers, hour in hours if hour is not None]
    if said:
        least_word = " (at least)" * at.is_at_least
        yield f"Time to {law.target}{least_word}, by workers: {', '.join(said)}."


def _known_by(law: EpochsLaw) -> str:
    known = count_of(len(law.points), "batch", "batches")
    return known if law.noise_scale is None else f"{known} and the noise scale"


def _largest_useful(law: EpochsLaw) -> str:
    least, most = law.range
    if law.b_crit > most:
        return (
            f"Largest useful batch: above {most:,.0f}, which needs less than twice the epochs of a "
            f"small one ({law.e_min:.3g})."
        )
    if law.b_crit < least:
        return (
            f"Largest useful batch: below {least:,.0f}. From there on epochs grow with the batch, "
            "so that a larger one saves little time."
        )
    low, high = law.b_crit_band
    return (
        f"Largest useful batch: about {law.b_crit:,.0f} ({low:,.0f} to {high:,.0f}), which needs "
        f"twice the epochs of a small one ({law.e_min:.3g})."
    )
