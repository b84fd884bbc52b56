"""Which layers a net has in a phase: Caffe's rules `include { … }` and `exclude { … }`.

Source: BVLC/caffe, src/caffe/net.cpp (FilterNet, StateMeetsRule); tried against a real Caffe.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from firecaffe.caffe.message import Message

PHASES = ("TRAIN", "TEST")


@dataclass(frozen=True)
class State:
    """What a rule is asked about."""

    phase: str
    level: int
    stages: frozenset[str]


def layers_of(
    net: Message, phase: str, stages: Sequence[str] = (), level: int = 0
) -> list[Message]:
    """The layers that take part, in the file's order; the same objects as in the net.

    Args:
        net: In today's form, see `upgrade.current`.
        phase: TRAIN or TEST.
        stages: Beside those of the net's own `state`.
        level: Instead of that in the net's own `state`, if it is not 0, as Caffe's solver does it.

    Raises: CaffeError if a layer has both include and exclude.
    """
    own = net.message("state")
    own.ignore("phase")
    state = State(phase, level or own.integer("level"), frozenset((*stages, *own.texts("stage"))))
    return [each for each in net.messages("layer") if _is_in(each, state)]


def phase_of(layer: Message, phase: str) -> str:
    """The phase that a layer runs in: its own, or else the net's. It does not filter."""
    return layer.choice("phase", PHASES, phase)


def _is_in(layer: Message, state: State) -> bool:
    included = [_meets(rule, state) for rule in layer.messages("include")]
    excluded = [_meets(rule, state) for rule in layer.messages("exclude")]
    if included and excluded:
        raise layer.error("both include and exclude; expected one of them")
    return any(included) if included else not any(excluded)


def _meets(rule: Message, state: State) -> bool:
    """All that a rule says must hold; all of it is read."""
    no_bound = state.level
    return all(
        (
            rule.choice("phase", PHASES, state.phase) == state.phase,
            rule.integer("min_level", no_bound) <= state.level,
            rule.integer("max_level", no_bound) >= state.level,
            state.stages.issuperset(rule.texts("stage")),
            state.stages.isdisjoint(rule.texts("not_stage")),
        )
    )
