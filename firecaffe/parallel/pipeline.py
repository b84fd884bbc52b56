"""The order in which each stage of a pipeline computes, as values; nothing here computes.

A micro-batch goes forward through all stages, which are runs of layers, and then backward. Others
may be in other stages at the same time. Both orders leave a stage idle for the same time; 1f1b
holds fewer activations. Source: Huang et al. 2019 (GPipe, arXiv 1811.06965); Narayanan et al. 2019
(PipeDream, SOSP '19) and 2021 (arXiv 2104.04473): 1f1b with a flush is PipeDream-Flush.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple


class Action(NamedTuple):
    is_forward: bool
    micro_batch: int


def gpipe(num_stages: int, num_micro_batches: int, stage: int) -> tuple[Action, ...]:
    """Return forward of all m micro-batches, then backward of all; m are held at once."""
    numbers = range(num_micro_batches)
    return (*(Action(True, n) for n in numbers), *(Action(False, n) for n in numbers))


def one_forward_one_backward(
    num_stages: int, num_micro_batches: int, stage: int
) -> tuple[Action, ...]:
    """Return a forward per later stage, then both in turn; stage k of K holds at most K - k."""
    ahead = min(num_stages - stage - 1, num_micro_batches)
    actions = [Action(True, n) for n in range(ahead)]
    for backward in range(num_micro_batches):
        if backward + ahead < num_micro_batches:
            actions.append(Action(True, backward + ahead))
        actions.append(Action(False, backward))
    return tuple(actions)


Order = Callable[[int, int, int], tuple[Action, ...]]
"""(stages, micro-batches, stage) -> that stage's actions. Backward has the order of forward."""

ORDERS: dict[str, Order] = {"gpipe": gpipe, "1f1b": one_forward_one_backward}


def idle_share(num_stages: int, num_micro_batches: int) -> Fraction:
    """Return a stage's idle share of a step, (K - 1) / (m + K - 1), for equal stages."""
    return Fraction(num_stages - 1, num_micro_batches + num_stages - 1)


@dataclass(frozen=True)
class Simulated:
    length_s: Fraction
    busy_s: tuple[Fraction, ...]

    @property
    def idle_share(self) -> Fraction:
        return 1 - sum(self.busy_s, Fraction()) / (self.length_s * len(self.busy_s))


def simulate(
    stages: Sequence[Sequence[Action]],
    forward_s: Sequence[Fraction | int],
    backward_s: Sequence[Fraction | int],
) -> Simulated:
    """Simulate a step without message times. Raises: ValueError if stages wait forever."""
    ends: dict[tuple[int, Action], Fraction] = {}
    now = [Fraction()] * len(stages)
    left = [list(reversed(actions)) for actions in stages]
    while any(left):
        moved = False
        for stage, actions in enumerate(left):
            while actions and (ready := _ready(stage, actions[-1], len(stages), ends)) is not None:
                action = actions.pop()
                taken = (forward_s if action.is_forward else backward_s)[stage]
                now[stage] = max(now[stage], ready) + taken
                ends[stage, action] = now[stage]
                moved = True
        if not moved:
            stuck = next(stage for stage, actions in enumerate(left) if actions)
            raise ValueError(f"stage {stuck} waits forever for {left[stuck][-1]}")
    busy = tuple(
        sum(
            (
                Fraction((forward_s if action.is_forward else backward_s)[stage])
                for action in actions
            ),
            Fraction(),
        )
        for stage, actions in enumerate(stages)
    )
    return Simulated(max(now), busy)


def _ready(
    stage: int, action: Action, num_stages: int, ends: dict[tuple[int, Action], Fraction]
) -> Fraction | None:
    if action.is_forward:
        return ends.get((stage - 1, action)) if stage else Fraction()
    if stage == num_stages - 1:
        return ends.get((stage, Action(True, action.micro_batch)))
    return ends.get((stage + 1, action))


def most_held(actions: Sequence[Action]) -> int:
    """Return the most micro-batches whose activations a stage holds at once."""
    held = most = 0
    for action in actions:
        held += 1 if action.is_forward else -1
        most = max(most, held)
    return most
