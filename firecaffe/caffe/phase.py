"""Apply Caffe's rules `include` and `exclude` (src/caffe/net.cpp, FilterNet and StateMeetsRule)."""

from collections.abc import Sequence
from dataclasses import dataclass

from firecaffe.caffe.message import Message

PHASES = ("TRAIN", "TEST")


@dataclass(frozen=True)
class State:
    phase: str
    level: int
    stages: frozenset[str]


def layers_of(
    net: Message, phase: str, stages: Sequence[str] = (), level: int = 0
) -> list[Message]:
    """Return a phase's layers in the file's order, as objects of `net`, which is in today's form.

    `stages` are added to those of the net's `state`. `level` replaces its level if not 0, as in
    Caffe's solver. Raises CaffeError if a layer has both include and exclude. Checked against
    Caffe.
    """
    net_state = net.message("state")
    net_state.ignore("phase")
    state = State(
        phase, level or net_state.integer("level"), frozenset((*stages, *net_state.texts("stage")))
    )
    return [message for message in net.messages("layer") if _is_in(message, state)]


def phase_of(layer: Message, phase: str) -> str:
    """Return the phase that a layer runs in: its own, or else the net's. It does not filter."""
    return layer.choice("phase", PHASES, phase)


def _is_in(layer: Message, state: State) -> bool:
    included = [_meets(rule, state) for rule in layer.messages("include")]
    excluded = [_meets(rule, state) for rule in layer.messages("exclude")]
    if included and excluded:
        raise layer.error("both include and exclude; expected one of them")
    return any(included) if included else not any(excluded)


def _meets(rule: Message, state: State) -> bool:
    """Whether all conditions hold. All are read, so that none counts as not understood."""
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
