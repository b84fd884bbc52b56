"""What docs/figures.md says of the README's picture, from the record of benchmarks.speedup.

python -m benchmarks.speedup_words     # prints it
"""

import json
from statistics import median
from typing import Any

from benchmarks.speedup import CHECKED_HOSTS, EXCHANGES, RECORD

PARAGRAPH = """\
The README's picture ([record](../benchmarks/results/speedup.json)): {model} on emulated hosts of
{cores:.3g} cores each, {rate:g} Mbit/s, forecast from one `check` of {checked} of them. Times one
worker on {hosts} hosts: {times} (n = {runs}, medians). The forecast of a step differs from the
measured one by {largest:.1f} % at most, median {middle:.1f} %; {inside} of {forecasts} measured
ones are inside the forecast's band. Of {trainings} trainings {same} ended in the same weights."""


def main() -> None:
    print(words(json.loads(RECORD.read_text(encoding="utf-8"))))


def words(record: dict[str, Any]) -> str:
    """The paragraph."""
    rows = [{**row, "measured_s": median(row["runs_s"])} for row in record["rows"]]
    alone_s = next(row["measured_s"] for row in rows if row["hosts"] == 1)
    several = {
        name: [row for row in rows if row["exchange"] == name and row["hosts"] > 1]
        for name in EXCHANGES
    }
    times = {
        name: ", ".join(f"{alone_s / row['measured_s']:.2f}" for row in own)
        for name, own in several.items()
    }
    errors = [100 * abs(row["forecast_s"] / row["measured_s"] - 1) for row in rows]
    digests = [digest for row in rows for digest in row["weights_sha256"]]
    return PARAGRAPH.format(
        model=record["model"],
        cores=record["processors_of_a_host"],
        rate=record["rate_bits_per_s"] / 1e6,
        checked=CHECKED_HOSTS,
        hosts=", ".join(str(row["hosts"]) for row in several[EXCHANGES[0]]),
        times="; ".join(f"{name} {own}" for name, own in times.items()),
        runs=record["runs"],
        largest=max(errors),
        middle=median(errors),
        inside=sum(row["low_s"] <= row["measured_s"] <= row["high_s"] for row in rows),
        forecasts=len(rows),
        trainings=len(digests),
        same=max(map(digests.count, digests)),
    )


if __name__ == "__main__":
    main()
