"""Explains a plan's layout of each layer by numbers: its weights against its activations."""

from dataclasses import dataclass
from itertools import pairwise

from firecaffe.exchange.choose import BYTES_PER_ELEMENT
from firecaffe.parallel.volumes import sum_numbers
from firecaffe.plan.layouts import Layout, words_of
from firecaffe.plan.split_plans import SplitPlan
from firecaffe.plan.split_step import SplitCost, weights_bytes


@dataclass(frozen=True)
class Reason:
    """A layer's cost if all workers shared its batch, and its cost in the plan."""

    name: str
    words: str
    weights_bytes: int
    """Bytes of its gradients, |W|."""
    data_bytes: float
    """Bytes of its input and output for the whole batch, |D|."""
    by_data_bytes: float
    """Bytes that each worker would send in a step, if all shared the batch."""
    by_data_s: float
    sent_bytes: float
    """Bytes that each worker sends of its gradients, and between it and the layer before."""
    sent_s: float


def reasons(plan: SplitPlan, cost: SplitCost) -> list[Reason]:
    by_data = Layout(cost.workers)
    pairs = [*enumerate(pairwise(plan.layouts))]
    between = [(0.0, 0.0), *(cost.between(at, *pair) for at, pair in pairs)]
    found = []
    rows = zip(cost.chain, plan.layouts, between, strict=True)
    for unit, layout, (seconds, sent) in rows:
        if not unit.weights:
            continue
        if layout.rows * layout.paths > 1:  # sums of its gradients and its input's are inside it
            own_s, own_sent = cost.inside(unit, layout, layout.batch)
            seconds, sent = seconds + own_s, sent + own_sent
        whole = BYTES_PER_ELEMENT * unit.weights
        numbers = unit.inputs + unit.outputs
        found.append(
            Reason(
                unit.name,
                words_of(unit, layout),
                whole,
                cost.itemsize * numbers * cost.work.global_batch_size,
                sum_numbers(cost.workers, whole),
                cost.gradients_s(unit, by_data),
                sum_numbers(layout.batch, weights_bytes(unit, layout)) + sent,
                cost.gradients_s(unit, layout) + seconds,
            )
        )
    return found
