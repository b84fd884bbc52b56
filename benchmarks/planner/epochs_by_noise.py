"""Epochs at all batches from one training: forecasts of `plan --epochs B=E --noise-scale S`.

    python -m benchmarks.planner.epochs_by_noise --page benchmarks/results/epochs_by_noise.md

The trainings are those that `benchmarks.training.noise_scale` kept: two networks at five batches
each, from 16 to 4,096, until a loss of held-out images is reached.
"""

import argparse
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.training.noise_scale import NETS, BatchRow, critical_batch, read_kept
from firecaffe.planner.epochs_law import NOISE_FACTOR, REACH_BY_NOISE, BatchPoint, EpochsLaw

KEPT = Path(__file__).parents[1] / "results" / "noise_scale.jsonl"

PAGE = """# Epochs from one training and its noise scale

    python -m benchmarks.planner.epochs_by_noise --page benchmarks/results/epochs_by_noise.md

From each batch of [these trainings](noise_scale.md) the samples of every other one are forecast, up
to {reach:g} times as large or as small. *One batch*: `plan`'s law with that batch's noise scale.
*Two*: the law with that batch and the next, without a noise scale; *all three*: with both. *Null*:
the same samples at any batch. The law's factor, B_crit over the noise scale, is {factor:g}. It was
chosen with these networks in view; *other's* takes that of the other network in its place. Cells
are median errors.

| network | n | one batch | ninth decile | in the band | other's | two | all three | null |
|---|---|---|---|---|---|---|---|---|
{rows}

{factors}
"""


@dataclass(frozen=True)
class Miss:
    """A batch that was forecast. Errors are relative; None where it is among the two given."""

    one: float
    in_band: bool
    null: float
    two: float | None
    three: float | None


def factor_of(rows: Sequence[BatchRow]) -> float:
    """B_crit, fitted to all batches, over the median noise scale."""
    needed = {row.batch: samples for row, samples, _ in known(rows)}
    return critical_batch(needed)[1] / statistics.median(scale for *_, scale in known(rows))


def known(rows: Sequence[BatchRow]) -> Iterator[tuple[BatchRow, int, float]]:
    """Yield the rows that reached the target, with their samples and noise scale."""
    for row in rows:
        if row.middle and row.scale and row.scale[0]:
            yield row, row.middle, row.scale[0]


def misses(rows: Sequence[BatchRow], factor: float = NOISE_FACTOR) -> Iterator[Miss]:
    """Forecast each batch from each other one, as if `factor` were the law's."""
    all_known = list(known(rows))
    for place, (row, samples, own) in enumerate(all_known):
        point, noise = BatchPoint(row.batch, samples), own * factor / NOISE_FACTOR
        one = law([point], noise)
        beside = all_known[place + 1 : place + 2]
        two = [point, *(BatchPoint(other.batch, needed) for other, needed, _ in beside)]
        least, most = one.range
        for other, needed, _ in all_known:
            if other is row or not least <= other.batch <= most:
                continue
            low, middle, high = one.band_at(other.batch)
            is_given = not beside or other is beside[0][0]
            pair = [
                None if is_given else law(two, n).band_at(other.batch)[1] for n in (None, noise)
            ]
            by_two, by_three = (None if p is None else abs(p / needed - 1) for p in pair)
            is_held = low <= needed <= high
            yield Miss(
                abs(middle / needed - 1), is_held, abs(samples / needed - 1), by_two, by_three
            )


def law(points: Sequence[BatchPoint], noise_scale: float | None) -> EpochsLaw:
    return EpochsLaw("", tuple(points), "", noise_scale=noise_scale)


def make_page(rows: Sequence[BatchRow]) -> str:
    by_name = {name: [row for row in rows if row.network == name] for name in NETS}
    factors = {name: factor_of(of_name) for name, of_name in by_name.items()}
    lines = []
    for name, of_name in by_name.items():
        (other,) = (factor for of, factor in factors.items() if of != name)
        usual = list(misses(of_name))
        errors = [miss.one for miss in usual]
        cells = [
            *(name, str(len(usual)), f"{statistics.median(errors):.0%}"),
            f"{statistics.quantiles(errors, n=10)[-1]:.0%}",
            f"{sum(miss.in_band for miss in usual) / len(usual):.0%}",
            *(
                f"{statistics.median(some):.0%}"
                for some in (
                    [miss.one for miss in misses(of_name, other)],
                    [miss.two for miss in usual if miss.two is not None],
                    [miss.three for miss in usual if miss.three is not None],
                    [miss.null for miss in usual],
                )
            ),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    said = ", ".join(f"{factor:.2g} ({name})" for name, factor in factors.items())
    return PAGE.format(
        reach=REACH_BY_NOISE,
        factor=NOISE_FACTOR,
        rows="\n".join(lines),
        factors=f"Fitted factors: {said}.",
    )


def main() -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False, description=__doc__.splitlines()[0])
    parser.add_argument("--kept", type=Path, default=KEPT)
    parser.add_argument("--page", type=Path, help="where the result page goes")
    given = parser.parse_args()
    text = make_page(read_kept(given.kept))
    print(text)
    if given.page is not None:
        given.page.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
