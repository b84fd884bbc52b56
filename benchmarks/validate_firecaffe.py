"""FireCaffe's own runs, from one fitted bandwidth; and what today's exchanges would have given.

The time of a run is its steps, each (b / p) images and the paper's exchange after them: a tree of
whole vectors, 2 lg p of them one after the other, nothing overlapped. One bandwidth is fitted, to
NiN on 32 workers with batch 1024; the rates of one worker are those of the paper's own baselines.

Source: Iandola et al. 2016 (arXiv 1511.00175), its tables of NiN and GoogLeNet.
"""

from dataclasses import dataclass, replace

from firecaffe.exchange import ALGORITHMS
from firecaffe.plan.accuracy import IMAGENET_IMAGES
from firecaffe.plan.cluster import load_cluster
from firecaffe.plan.network import Network
from firecaffe.plan.price import Prices, rounds_only_s
from firecaffe.plan.workload import layers_of


@dataclass(frozen=True)
class Run:
    """One row of the paper."""

    net: str
    workers: int
    batch: int
    epochs: int
    hours: float

    @property
    def steps(self) -> float:
        return self.epochs * IMAGENET_IMAGES / self.batch


ALONE = {"nin": Run("nin", 1, 256, 47, 5.8 * 24), "googlenet": Run("googlenet", 1, 32, 64, 21 * 24)}
RUNS = [
    Run("nin", 32, 1024, 47, 6.0),
    Run("nin", 32, 256, 47, 11.0),
    Run("nin", 128, 1024, 47, 3.6),
    Run("googlenet", 32, 1024, 72, 23.4),
    Run("googlenet", 128, 1024, 72, 10.5),
]
"""The first is fitted."""


def weights(net: str) -> int:
    return layers_of(net, None, None)[1].parameters


def image_s(net: str) -> float:
    """One worker's time for an image."""
    alone = ALONE[net]
    return alone.hours * 3600 / (alone.epochs * IMAGENET_IMAGES)


def compute_s(run: Run) -> float:
    return run.batch / run.workers * image_s(run.net)


def network(workers: int, bandwidth_bytes_per_s: float) -> Network:
    (link,) = load_cluster("titan").links
    fitted = replace(link, latency_s=0.0, bandwidth_bytes_per_s=bandwidth_bytes_per_s)
    return Network((fitted,), workers)


def fitted_bandwidth() -> float:
    """Bytes a second that make the first run's time."""
    run = RUNS[0]
    exchange_s = run.hours * 3600 / run.steps - compute_s(run)
    one_s = rounds_only_s("tree", network(run.workers, 1.0), weights(run.net))
    return one_s / exchange_s


def predicted_hours(run: Run, bandwidth: float) -> float:
    exchange_s = rounds_only_s("tree", network(run.workers, bandwidth), weights(run.net))
    return run.steps * (compute_s(run) + exchange_s) / 3600


def today_hours(run: Run, algorithm: str, bandwidth: float) -> float:
    """With an exchange of today, after the same computing; nothing overlapped either."""
    prices = Prices(algorithm, network(run.workers, bandwidth))
    exchange_s = prices.seconds([weights(run.net)])[0]
    return run.steps * (compute_s(run) + exchange_s) / 3600


def page() -> tuple[str, list[float]]:
    """The section of the page, and the errors of what was not fitted."""
    bandwidth = fitted_bandwidth()
    lines = [
        "## FireCaffe on Titan, 2016",
        "",
        f"One bandwidth is fitted, to the first row: {bandwidth / 1e9:.2f} GB/s. The paper's own",
        "exchange: a binomial tree of whole vectors, nothing overlapped.",
        "",
        "| net | workers | batch | published, h | predicted, h | error |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    errors = []
    for index, run in enumerate(RUNS):
        hours = predicted_hours(run, bandwidth)
        error = hours / run.hours - 1
        said = "fitted" if index == 0 else f"{error:+.1%}"
        if index:
            errors.append(error)
        lines.append(
            f"| {run.net} | {run.workers} | {run.batch} | {run.hours:g} | {hours:.2f} | {said} |"
        )
    last = RUNS[-1]
    lines += [
        "",
        f"What today's exchanges would have given there, on the same links: {last.net} on "
        f"{last.workers}",
        "workers, in pieces, not overlapped with backward either:",
        "",
        "| exchange | hours | speedup over one worker |",
        "| --- | --- | --- |",
    ]
    alone = ALONE[last.net].hours
    lines.append(f"| tree of 2016, whole vectors | {last.hours:g} | {alone / last.hours:.0f} |")
    for algorithm in ALGORITHMS:
        hours = today_hours(last, algorithm, bandwidth)
        lines.append(f"| {algorithm} | {hours:.1f} | {alone / hours:.0f} |")
    return "\n".join(lines), errors
