"""The answer of `plan --device` for a buyer: which link, for how many workers, and why."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from itertools import groupby
from typing import Any

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from firecaffe.api.answer import numbers_table
from firecaffe.api.plan_tables import assumptions, hours_text
from firecaffe.gradients.config import NO_COMPRESSOR
from firecaffe.planner.advice import ACCURACY_CAVEAT, Gain, folded, gain_of
from firecaffe.planner.cluster import PRECISIONS, Cluster
from firecaffe.planner.compute_time import error_of
from firecaffe.planner.forecast import Forecast, fastest, forecasts, most_useful
from firecaffe.planner.workload import Workload, in_precision, precision_text
from firecaffe.value_checks import count_of, digits_of

MIN_GAIN = 0.05
"""The least gain in samples/s, as a share, that a faster link must be sure to bring."""

Offer = tuple[Cluster, Sequence[Forecast]]
"""A link as a cluster, and the fastest forecast for each number of workers."""


@dataclass(frozen=True)
class LinkChoice:
    """Which of several links one training needs, on one kind of device."""

    name: str
    work: Workload
    offers: Sequence[Offer]
    """The slowest link first."""
    exchanges: Sequence[str] | None
    """The exchanges that may be used; None for all."""

    @classmethod
    def of(
        cls,
        name: str,
        work: Workload,
        rows: Sequence[tuple[Cluster, Sequence[Forecast]]],
        exchanges: Sequence[str] | None,
    ) -> "LinkChoice":
        best = [(cluster, fastest(own)) for cluster, own in rows]
        by_all = set.intersection(*({row.workers for row in own} for _, own in best))
        offers = [(on, [row for row in own if row.workers in by_all]) for on, own in best]
        return cls(name, work, offers, exchanges)

    @property
    def workers(self) -> list[int]:
        return [row.workers for row in self.offers[0][1]]

    def as_dict(self) -> dict[str, Any]:
        number = self.number_for(len(self.workers) - 1)
        return {
            "link": self.offers[number][0].links[-1].name,
            "workers": self.workers[-1],
            "gains": [asdict(self._gain(later, number)) for later in self._faster(number)],
            "sentences": self.sentences,
            "assumptions": self.assumptions,
        }

    def parts(self) -> Iterator[RenderableType]:
        yield self.heading
        yield Text()
        yield from self.sentences
        yield self.table()
        for line in self.assumptions:
            yield f"note: {line}"

    @property
    def heading(self) -> str:
        work, devices = self.work, dict.fromkeys(on.device.name for on, _ in self.offers)
        name = "" if self.name == work.model else f"{self.name}: "
        return (
            f"{name}{work.model}, batch {work.global_batch_size} in micro-batches of "
            f"{work.micro_batch_size} {precision_text(work)}, {work.parameter_bytes / 1e6:,.1f} "
            f"MB of gradients, on {' or '.join(devices)}"
        )

    def number_for(self, place: int) -> int:
        """The number of the link that `workers[place]` workers need."""
        return chosen(self.work, [(cluster, rows[place]) for cluster, rows in self.offers])

    def _faster(self, number: int) -> range:
        return range(number + 1, len(self.offers))

    def _gain(self, other: int, over: int) -> Gain:
        """The gain on the largest number of workers."""
        (on, rows), (over_on, over_rows) = self.offers[other], self.offers[over]
        return gain_of(self.work, (on, rows[-1]), (over_on, over_rows[-1]))

    @cached_property
    def sentences(self) -> list[str]:
        number = self.number_for(len(self.workers) - 1)
        sentences = [self._to_buy(number), *self._beyond(number)]
        sentences += [*self._fewer(number), self._how_many(number)]
        sentences += [*self._a_tenth_more(number), *self._in_half_precision(number)]
        return [sentence for sentence in sentences if sentence]

    def _to_buy(self, number: int) -> str:
        (cluster, rows), (_, slow_rows) = self.offers[number], self.offers[0]
        link, on_workers = cluster.links[-1].name, _count(self.workers[-1])
        if len(self.offers) == 1:
            return f"On {on_workers} {link} gives {_rate(rows[-1], in_full=True)}."
        if number == 0:
            return (
                f"Buy the {link}: on {on_workers} it gives {_rate(rows[-1], in_full=True)}, and "
                f"no faster link is sure to bring {MIN_GAIN:.0%} more."
            )
        return (
            f"Buy the {link}: on {on_workers} it gives {_rate(rows[-1], in_full=True)} instead of "
            f"{_rate(slow_rows[-1])} at {self.offers[0][0].name} "
            f"({_gain_text(self._gain(number, 0))})."
        )

    def _beyond(self, number: int) -> Iterator[str]:
        for later in self._faster(number):
            yield (
                f"{self.offers[later][0].links[-1].name} brings "
                f"{_gain_text(self._gain(later, number))}: not sure to be {MIN_GAIN:.0%}."
            )

    def _fewer(self, number: int) -> Iterator[str]:
        several = [(self.number_for(place), n) for place, n in enumerate(self.workers) if n > 1]
        for link, group in groupby(several, key=lambda pair: pair[0]):
            counts = [str(workers) for _, workers in group]
            if link != number:
                yield f"For {_listed(counts)} workers {self.offers[link][0].name} is enough."

    def _how_many(self, number: int) -> str:
        cluster, rows = self.offers[number]
        useful = most_useful(rows)
        if useful == 1 or rows[0].workers != 1:
            return ""
        row = next(row for row in rows if row.workers == useful)
        speedup = gain_of(self.work, (cluster, row), (cluster, rows[0]))
        more = "" if useful == rows[-1].workers else " More bring less than half a worker each."
        return (
            f"At {cluster.name} {_count(useful)} are {digits_of(row.speedup)} times as fast as one "
            f"({digits_of(1 + speedup.low)} to {digits_of(1 + speedup.high)}).{more}"
        )

    def _a_tenth_more(self, number: int) -> Iterator[str]:
        """Say what a tenth more workers bring, with as many micro-batches on each."""
        work, (cluster, rows), workers = self.work, self.offers[number], self.workers[-1]
        more = round(1.1 * workers)
        per_worker, left = divmod(work.num_micro_batches, workers)
        is_a_tenth = abs(more / workers - 1.1) < 0.05
        if not is_a_tenth or left or (cluster.most_devices or more) < more:
            return
        batch = more * per_worker * work.micro_batch_size
        larger, codecs = replace(work, global_batch_size=batch), [rows[-1].compressor]
        row = fastest(forecasts(larger, cluster, [more], self.exchanges, codecs))[-1]
        gain = row.images_per_s / rows[-1].images_per_s - 1
        yield (
            f"A tenth more workers ({more}, with a batch of {batch:,}) bring {gain:+.0%} samples/s."
        )

    def _in_half_precision(self, number: int) -> Iterator[str]:
        """Say which link the device's half precision needs, if other arithmetic is planned."""
        half = next((word for word in ("bf16", "fp16") if self._has(word)), "")
        if not half or self.work.autocast != "none" or len(self.offers) == 1:
            return
        work, workers = in_precision(self.work, half), self.workers[-1:]
        rows = []
        for cluster, own in self.offers:
            codecs = dict.fromkeys([NO_COMPRESSOR, own[-1].compressor])
            all_rows = forecasts(work, cluster, workers, [own[-1].exchange], [*codecs])
            rows.append((cluster, fastest(all_rows)[-1]))
        other = chosen(work, rows)
        needs = "the same link" if other == number else rows[other][0].links[-1].name
        yield (
            f"In {half} {_count(workers[0])} {'needs' if workers[0] == 1 else 'need'} {needs}: it "
            f"gives {_rate(rows[other][1])} "
            f"(--precision {half})."
        )

    def _has(self, word: str) -> bool:
        return PRECISIONS[word] in self.offers[0][0].device.peak_flops

    def table(self) -> Table:
        """Links by workers: samples/s, efficiency, and hours if they are known."""
        counts = map(_count, self.workers)
        table = numbers_table("link", *counts, texts=("link",), show_lines=True)
        for name, cells in self.cells():
            table.add_row(name, *("\n".join(cell) for cell in cells))
        return table

    def cells(self) -> Iterator[tuple[str, list[list[str]]]]:
        """Yield each link's name and its cells, each of two or three short lines."""
        for cluster, rows in self.offers:
            yield cluster.name, [_cell(row) for row in rows]

    @cached_property
    def assumptions(self) -> list[str]:
        work, (cluster, rows) = self.work, self.offers[0]
        link, hours = cluster.links[-1], " and hours" if rows[-1].whole_hours else ""
        keeps = all(row.keeps_bits for _, own in self.offers for row in own)
        lines = [
            f"precision {work.precision}; computing may be off by "
            f"{error_of(work, cluster.device):.0%}, which is the same at all links, and each link "
            f"by {link.error:.0%}",
            f"a cell has samples/s, efficiency{hours}, by the fastest exchange"
            f"{' that keeps the bits' * keeps}{' of its codec' * bool(_coded(self.offers))}",
            *_coded(self.offers),
            "Ethernet by TCP: its payload is 0.956 of the rate; a message takes "
            + ", ".join(
                f"{on.links[-1].latency_s * 1e6:.3g} us at {on.name}" for on, _ in self.offers
            ),
        ]
        if cluster.devices_per_node > 1:
            inside = cluster.links[0]
            lines.append(
                f"{inside.name} joins {inside.group} in a node, at "
                f"{inside.bandwidth_bytes_per_s / 1e9:.3g} GB/s"
            )
        law, epochs = work.law, rows[-1].epochs_to_accuracy
        if rows[-1].hours is None and law is not None and epochs is not None:
            least = "at least " * epochs.is_at_least
            lines.append(f"hours: {least}{epochs.epochs:.3g} epochs to {law.target} ({law.source})")
        lines += folded(work, cluster, rows)
        if not all(row.fits for row in rows):
            lines.append("! means that it does not fit in the device's memory")
        return lines + assumptions(work, cluster, rows, None)


def _coded(offers: Sequence[Offer]) -> list[str]:
    """Say which codecs the cells are forecast with, if any."""
    used = {row.compressor for _, rows in offers for row in rows} - {NO_COMPRESSOR}
    if not used:
        return []
    return [f"gradients are encoded by {', '.join(sorted(used))}, {ACCURACY_CAVEAT}"]


def chosen(work: Workload, offers: Sequence[tuple[Cluster, Forecast]]) -> int:
    """The number of the slowest link that no faster one is sure to beat by MIN_GAIN."""

    def is_beaten(number: int) -> bool:
        faster = offers[number + 1 :]
        return any(gain_of(work, other, offers[number]).low >= MIN_GAIN for other in faster)

    return next(number for number in range(len(offers)) if not is_beaten(number))


def _cell(row: Forecast) -> list[str]:
    hours = row.whole_hours
    cell = [f"{row.images_per_s:,.0f}/s{'' if row.fits else '!'}", f"{row.efficiency:.0%}"]
    return cell if hours is None else [*cell, "at least " * row.is_at_least + hours_text(hours)]


def _rate(row: Forecast, in_full: bool = False) -> str:
    """Say the hours, or else samples/s. In full: to which accuracy, and with which codec."""
    hours, epochs = row.whole_hours, row.epochs_to_accuracy
    said = f"{row.images_per_s:,.0f} samples/s"
    if hours is not None:
        said = "at least " * row.is_at_least + hours_text(hours)
        if in_full and row.hours is None and epochs is not None:
            said += f" to {epochs.target}"
    is_coded = in_full and row.compressor != NO_COMPRESSOR
    return f"{said} (gradients by {row.compressor})" if is_coded else said


def _gain_text(gain: Gain) -> str:
    low, middle, high = gain.low, gain.middle, gain.high
    if middle >= 1:
        times, least, most = (digits_of(1 + share) for share in (middle, low, high))
        return f"{times} times as fast, {least} to {most}"
    return f"{middle:+.0%} samples/s, {low:+.0%} to {high:+.0%}"


def _count(workers: int) -> str:
    return count_of(workers, "worker", "workers")


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
