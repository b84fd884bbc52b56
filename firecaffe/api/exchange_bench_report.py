"""The answer of `firecaffe.bench_exchange`, as a JSON object and as a table."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from rich.console import RenderableType
from rich.table import Table

from firecaffe.api.answer import Answer
from firecaffe.exchange import NATIVE
from firecaffe.exchange.route import Choice
from firecaffe.exchange.schedule import BYTES_PER_ELEMENT
from firecaffe.measure.exchange_times import WARM_UP, Timing
from firecaffe.measure.known_sum import is_small
from firecaffe.transport.auto_exchange import SHARED_MEMORY
from firecaffe.transport.link import MeasuredLink

MIN_WIDTH_OF_EXCHANGES = 140
"""Least width. A narrower terminal breaks the lines, which reads better than folded cells."""

HEADERS = (
    *("size (B)", "count", "exchange", "through", "wire (B)", "time (us)", "min", "max"),
    *("algbw (GB/s)", "busbw (GB/s)", "/ native", "of bound"),
)
LEGEND = (
    "time: of the slowest rank, median of {n} in turns (min, max); algbw, busbw: as nccl-tests "
    "defines them\n"
    "/ native: its time over native's, median of the same {n} turns; "
    "of bound: 2 (p - 1) / p · size / link, over its time\n"
    "through: the backend's process group, the memory that ranks of one host share, or both: "
    "memory in a host, the group between hosts; wire: bytes one way through the busiest rank\n"
    "every sum was right in every repetition; bits of the tree checked up to {bits} bytes: {who}"
)
LEGEND_OF_ENCODED = (
    "{who}: compressed; the first sum as near as the codec says, every one the same bits on all "
    "ranks, up to {bits} bytes those of one process"
)


@dataclass(frozen=True, repr=False)
class ExchangeTimes(Answer):
    """Times of exchanges beside the backend's all_reduce, in turns, and the link."""

    report: dict[str, Any]
    """World, link, nodes, and each exchange at each size."""

    least_width = MIN_WIDTH_OF_EXCHANGES

    def to_dict(self) -> dict[str, Any]:
        """Return the report."""
        return self.report

    def _parts(self) -> Iterator[RenderableType]:
        report = self.report
        yield from _head(report)
        table = Table(box=None, show_edge=False, pad_edge=False)
        for header in HEADERS:
            is_word = header in ("exchange", "through")
            table.add_column(header, justify="left" if is_word else "right")
        for row in report["results"]:
            table.add_row(*_cells(row))
        yield from ("", table, "")
        checked = [row for row in report["results"] if row["tree_bits_checked"]]
        yield LEGEND.format(
            n=report["repetitions"],
            bits=max((row["size_bytes"] for row in checked), default=0),
            who=_names(checked) or "none",
        )
        encoded = [row for row in report["results"] if row["is_compressed"]]
        if encoded:
            small = [row for row in encoded if is_small(report["world_size"], row["count"])]
            yield LEGEND_OF_ENCODED.format(
                who=_names(encoded),
                bits=max((row["size_bytes"] for row in small), default=0),
            )
        yield _auto(report)


def _names(rows: Sequence[dict[str, Any]]) -> str:
    return ", ".join(dict.fromkeys(row["algorithm"] for row in rows))


def make_report(
    timings: Sequence[Timing],
    link: MeasuredLink,
    link_bits_per_s: float | None,
    *,
    device: str,
    threads: int,
    nodes: Sequence[tuple[str, str]],
    environments: Sequence[dict[str, Any]],
    conditions: Sequence[dict[str, Any]],
    choices: Sequence[Choice],
) -> dict[str, Any]:
    """Make the JSON object. `choices` is by size; nodes, environments and conditions by rank."""
    used = link.bandwidth_bytes_per_s if link_bits_per_s is None else link_bits_per_s / 8
    return {
        "bench": "exchange",
        "world_size": timings[0].world_size,
        "device": device,
        "dtype": "float32",
        "threads_per_rank": threads,
        "repetitions": len(timings[0].samples_s),
        "warm_up": WARM_UP,
        "nodes": _by_node(nodes, environments, conditions),
        "link": {
            "between_ranks": [link.first, link.second],
            "between_nodes": nodes[link.first] != nodes[link.second],
            "latency_s": link.latency_s,
            "bandwidth_bytes_per_s": link.bandwidth_bytes_per_s,
            "latency_samples_s": list(link.latency_samples_s),
            "bandwidth_samples_bytes_per_s": list(link.bandwidth_samples_bytes_per_s),
            "bound_uses": "measured" if link_bits_per_s is None else "given",
            "bound_bandwidth_bytes_per_s": used,
        },
        "results": [_result(timing, _control(timing, timings), used) for timing in timings],
        "auto": [
            {
                "size_bytes": size_bytes,
                "algorithm": choice.algorithm,
                "predicted_s": choice.by_algorithm,
            }
            for size_bytes, choice in zip(
                dict.fromkeys(timing.size_bytes for timing in timings), choices, strict=True
            )
        ],
    }


def _by_node(
    nodes: Sequence[tuple[str, str]],
    environments: Sequence[dict[str, Any]],
    conditions: Sequence[dict[str, Any]],
) -> list[dict[str, Any]]:
    by_node = []
    for node in dict.fromkeys(nodes):
        ranks = [rank for rank, other in enumerate(nodes) if other == node]
        stated = conditions[ranks[0]]
        own_share = sum(conditions[rank]["process_cpu_share"] for rank in ranks)
        by_node.append(
            {
                "host": node[0],
                "ranks": ranks,
                "environment": environments[ranks[0]],
                "conditions": {
                    "congestion_control": stated["congestion_control"],
                    "retransmitted_segments": stated["retransmitted_segments"],
                    "cpu_busy_share": stated["cpu_busy_share"],
                    "cpu_own_share": own_share,
                },
            }
        )
    return by_node


def _control(timing: Timing, timings: Sequence[Timing]) -> Timing:
    return next(t for t in timings if t.algorithm == NATIVE and t.size_bytes == timing.size_bytes)


def _result(timing: Timing, control: Timing, link_bytes_per_s: float) -> dict[str, Any]:
    count = timing.size_bytes // BYTES_PER_ELEMENT
    return {
        "algorithm": timing.algorithm,
        "is_compressed": timing.is_encoded,
        "through": timing.through,
        "wire_bytes": timing.wire_bytes,
        "size_bytes": timing.size_bytes,
        "count": count,
        "time_s": timing.time_s,
        "min_s": min(timing.samples_s),
        "max_s": max(timing.samples_s),
        "algbw_bytes_per_s": timing.algbw_bytes_per_s,
        "busbw_bytes_per_s": timing.busbw_bytes_per_s,
        "ratio_to_native": timing.ratio_to(control),
        "share_of_bound": timing.share_of_bound(link_bytes_per_s),
        "tree_bits_checked": timing.bits_checked,
        "samples_s": list(timing.samples_s),
    }


def _auto(report: dict[str, Any]) -> str:
    choices = report["auto"]
    if all(value == 0 for choice in choices for value in choice["predicted_s"].values()):
        return f"auto: tree ({SHARED_MEMORY})"
    parts = []
    for name, same in groupby(choices, key=lambda choice: choice["algorithm"]):
        sizes = [choice["size_bytes"] for choice in same]
        parts.append(f"{name} {sizes[0]} B" + (f" to {sizes[-1]} B" if sizes[1:] else ""))
    return f"auto, by the measured α and β: {', '.join(parts)}"


def _cells(row: dict[str, Any]) -> list[str]:
    return [
        str(row["size_bytes"]),
        str(row["count"]),
        row["algorithm"],
        row["through"],
        _or_unknown(row["wire_bytes"]),
        *(f"{row[name] * 1e6:.1f}" for name in ("time_s", "min_s", "max_s")),
        *(f"{row[name] / 1e9:.3f}" for name in ("algbw_bytes_per_s", "busbw_bytes_per_s")),
        f"{row['ratio_to_native']:.2f}",
        f"{row['share_of_bound']:.3f}",
    ]


def _head(report: dict[str, Any]) -> list[str]:
    nodes, link = report["nodes"], report["link"]
    environment = nodes[0]["environment"]
    spread = "1 node" if len(nodes) == 1 else f"{len(nodes)} nodes"
    processor = environment["gpus"][0] if report["device"] == "cuda" else environment["cpu"]
    measured_bits_per_s = link["bandwidth_bytes_per_s"] * 8
    where = "different nodes" if link["between_nodes"] else "the same node"
    used_bits_per_s = link["bound_bandwidth_bytes_per_s"] * 8
    source = "as measured" if link["bound_uses"] == "measured" else "as given (--link)"
    first, second = link["between_ranks"]
    lines = [
        f"{report['world_size']} ranks on {spread}, {report['device']}, {processor}, "
        f"{environment['cores']} cores, torch {environment['torch']}",
        f"link       measured between rank {first} and rank {second} on {where}: "
        f"α {link['latency_s'] * 1e6:.1f} us, β {1e9 / link['bandwidth_bytes_per_s']:.3f} ns/B, "
        f"that is {_rate(measured_bits_per_s)}",
        f"bound      uses {_rate(used_bits_per_s)}, {source}",
    ]
    for node in nodes:
        conditions = node["conditions"]
        lines.append(
            f"conditions {node['host']} from rank {node['ranks'][0]} on: "
            f"congestion control {conditions['congestion_control'] or '?'}, "
            f"retransmitted segments {_or_unknown(conditions['retransmitted_segments'])}, "
            f"processors {conditions['cpu_busy_share']:.0%} busy, "
            f"{conditions['cpu_own_share']:.0%} by these ranks"
        )
    return lines


def _rate(bits_per_s: float) -> str:
    return f"{bits_per_s / 1e9:.3f} Gbit/s"


def _or_unknown(value: int | None) -> str:
    return "?" if value is None else str(value)
