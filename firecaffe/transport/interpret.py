"""Runs a schedule for all ranks in one process: the oracle of the tests."""

from collections import defaultdict

import torch
from torch import Tensor

from firecaffe.exchange.leaves import sum_of_nodes, tree_sum
from firecaffe.exchange.schedule import AVERAGE, VECTOR, Schedule


def interpret(schedule: Schedule, vectors: list[Tensor]) -> list[Tensor]:
    """Return all ranks' vectors after the schedule, from those of each rank, or each input."""
    nodes = [node for of_rank in schedule.inputs for node in of_rank]
    if nodes:
        held = [torch.full_like(vectors[0], torch.nan) for _ in schedule.inputs]
    else:
        held = [vector.clone() for vector in vectors]
    if nodes and schedule.world_size == 1:
        return [sum_of_nodes(nodes, vectors, schedule.num_leaves, torch.add)]
    kept: dict[tuple[int, int, int], dict[int, Tensor]] = defaultdict(dict)
    for round_ in schedule.rounds:
        before = [vector.clone() for vector in held]
        arriving: dict[tuple[int, int, int], dict[int, Tensor]] = defaultdict(dict)
        for t in round_:
            key = t.destination, t.start, t.stop
            part = (before[t.source] if t.reads == VECTOR else vectors[t.reads])[t.start : t.stop]
            if not t.reduce:
                held[t.destination][t.start : t.stop] = part
            elif t.reads == VECTOR:
                arriving[key][t.source] = part
            else:
                kept[key][t.reads] = part
        for (rank, start, stop), parts in arriving.items():
            parts[rank] = before[rank][start:stop]
            in_order = [part for _, part in sorted(parts.items())]
            held[rank][start:stop] = tree_sum(in_order, torch.add)
        for (rank, start, stop), arrived in list(kept.items()):
            local_inputs = {
                number: vectors[number][start:stop] for number in schedule.own_inputs(rank)
            }
            if len(arrived) + len(local_inputs) < len(nodes):
                continue
            in_order = [
                part for _, part in sorted((kept.pop((rank, start, stop)) | local_inputs).items())
            ]
            total = sum_of_nodes(nodes, in_order, schedule.num_leaves, torch.add)
            held[rank][start:stop] = total
    if schedule.kind == AVERAGE:
        held = [vector / schedule.world_size for vector in held]
    return held
