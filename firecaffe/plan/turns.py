"""A step of a pipeline in time: its stages compute, and messages go between them.

A stage does its actions in their order, each when what it needs has come in. Its port sends one
message after the other, while it computes.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from firecaffe.parallel.pipeline import Action


@dataclass(frozen=True)
class Turns:
    """What each stage came to, in seconds."""

    ends_s: tuple[float, ...]
    """When its last backward is over."""
    waits_s: tuple[float, ...]
    """For how long it waited for what it needed."""


def turns(
    orders: Sequence[Sequence[Action]],
    forward_s: Sequence[float],
    backward_s: Sequence[float],
    passes_s: Sequence[float],
    returns_s: Sequence[float],
) -> Turns:
    """orders: of each stage, what it does; one of `parallel.pipeline`. forward_s, backward_s: of
    each stage, of a micro-batch. passes_s, returns_s: of each cut, what a message with activations
    takes, and one with gradients.
    """
    last = len(orders) - 1
    now_s, port_s, waits_s = ([0.0] * len(orders) for _ in range(3))
    came_s: dict[tuple[int, Action], float] = {}
    """When a stage has what it needs for an action."""
    left = [[*reversed(actions)] for actions in orders]

    def has(stage: int, action: Action) -> float | None:
        if stage == (0 if action.is_forward else last):
            return 0.0
        return came_s.get((stage, action))

    while any(left):
        for stage, actions in enumerate(left):
            while actions and (ready_s := has(stage, actions[-1])) is not None:
                action = actions.pop()
                waits_s[stage] += max(0.0, ready_s - now_s[stage])
                now_s[stage] = max(now_s[stage], ready_s)
                now_s[stage] += (forward_s if action.is_forward else backward_s)[stage]
                other = stage + 1 if action.is_forward else stage - 1
                if 0 <= other <= last:
                    taken_s = passes_s[stage] if action.is_forward else returns_s[other]
                    port_s[stage] = max(port_s[stage], now_s[stage]) + taken_s
                    came_s[other, action] = port_s[stage]
    return Turns(tuple(now_s), tuple(waits_s))
