"""What reference/figures.md says of the README's picture, from the record of `speedup`.

python -m benchmarks.training.speedup_words     # prints it
"""

import json
from statistics import median
from typing import Any

from benchmarks.training.speedup import CHECKED_HOSTS, EXCHANGES, RECORD

TEXT = """\
The picture in the README: {model} on emulated hosts of {cores:.3g} cores each, with links of
{rate:g} Mbit/s ([record](../../benchmarks/results/speedup.json)). A cell is the speedup over one
worker, the median of {runs} runs.

| exchange | {hosts} |
|---|{bars}
{rows}

Each step was forecast from one `check` of {checked} hosts. The forecasts are off by at most
{largest:.1f} %, in the median by {middle:.1f} %. {inside} of {forecasts} measured steps lie inside
the band. {same} of {trainings} trainings ended in the same weights."""


def main() -> None:
    print(words(json.loads(RECORD.read_text(encoding="utf-8"))))


def words(record: dict[str, Any]) -> str:
    """Its paragraphs and its table."""
    rows = [{**row, "measured_s": median(row["runs_s"])} for row in record["rows"]]
    alone_s = next(row["measured_s"] for row in rows if row["hosts"] == 1)
    several = {
        name: [row for row in rows if row["exchange"] == name and row["hosts"] > 1]
        for name in EXCHANGES
    }
    hosts = [f"{row['hosts']} hosts" for row in several[EXCHANGES[0]]]
    times = {
        name: " | ".join(f"{alone_s / row['measured_s']:.2f}" for row in own)
        for name, own in several.items()
    }
    errors = [100 * abs(row["forecast_s"] / row["measured_s"] - 1) for row in rows]
    digests = [digest for row in rows for digest in row["weights_sha256"]]
    return TEXT.format(
        model=record["model"],
        cores=record["processors_of_a_host"],
        rate=record["rate_bits_per_s"] / 1e6,
        runs=record["runs"],
        hosts=" | ".join(hosts),
        bars="---|" * len(hosts),
        rows="\n".join(f"| `{name}` | {own} |" for name, own in times.items()),
        checked=CHECKED_HOSTS,
        largest=max(errors),
        middle=median(errors),
        inside=sum(row["low_s"] <= row["measured_s"] <= row["high_s"] for row in rows),
        forecasts=len(rows),
        trainings=len(digests),
        same=max(map(digests.count, digests)),
    )


if __name__ == "__main__":
    main()
