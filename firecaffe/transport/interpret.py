"""Runs a schedule for all ranks in one process: the oracle of the tests."""

from collections import defaultdict

from torch import Tensor

from firecaffe.exchange.schedule import Schedule, tree_sum


def interpret(schedule: Schedule, vectors: list[Tensor]) -> list[Tensor]:
    """The vectors of all ranks after the schedule.

    vectors: one of shape (num_elements,) for each rank; they are not changed.
    """
    held = [vector.clone() for vector in vectors]
    for round_ in schedule.rounds:
        before = [vector.clone() for vector in held]
        arriving: dict[tuple[int, int, int], list[tuple[int, Tensor]]] = defaultdict(list)
        for t in round_:
            part = before[t.source][t.start : t.stop]
            if t.reduce:
                arriving[t.destination, t.start, t.stop].append((t.source, part))
            else:
                held[t.destination][t.start : t.stop] = part
        for (rank, start, stop), parts in arriving.items():
            parts.append((rank, before[rank][start:stop]))
            in_order = [part for _, part in sorted(parts, key=lambda rank_part: rank_part[0])]
            held[rank][start:stop] = tree_sum(in_order, lambda a, b: a + b)
    return held
