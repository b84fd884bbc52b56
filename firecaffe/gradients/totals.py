"""The totals of a step's tree, and their times."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from firecaffe.gradients.threads import Span
from firecaffe.transport.queue import Mark


@dataclass(frozen=True)
class Totals:
    """The sums of a step over all workers. Times can be told once `summed` is over."""

    tail: tuple[Tensor, ...]
    """The sums of all tails."""
    counts: Tensor
    """The sum of all workers' counts."""
    computed: Mark
    """The end of backward."""
    summed: Mark
    """The end of backward and of the last exchange."""
    spans: tuple[Span, ...]
    """The marks at the beginning and end of each exchange."""

    @property
    def exposed_s(self) -> float:
        """Seconds that the step waited for communication after its backward."""
        return self.summed.seconds_after(self.computed)

    @property
    def exchange_s(self) -> float:
        """Seconds that communication took in all, hidden or not."""
        from_first = [
            (begin.seconds_after(self.spans[0][0]), end.seconds_after(self.spans[0][0]))
            for begin, end in self.spans
        ]
        return covered_s(from_first)


def covered_s(spans: Sequence[tuple[float, float]]) -> float:
    """Seconds in which at least one of the spans ran."""
    total = 0.0
    until = float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total
