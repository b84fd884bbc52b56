"""A pipeline's step without messages, in exact time, against which formulas are checked."""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from firecaffe.parallel.stages import Action


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
