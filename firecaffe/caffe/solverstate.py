"""Read .solverstate files (SnapshotSolverState, sgd_solver.cpp; field numbers of a real Caffe)."""

from pathlib import Path
from typing import NamedTuple

from firecaffe.caffe import blob
from firecaffe.caffe.blob import Array
from firecaffe.caffe.message import CaffeError
from firecaffe.caffe.text import decoded
from firecaffe.caffe.wire import BYTES, VARINT, opened, signed

ITERATION, LEARNED_NET, HISTORY, CURRENT_STEP = 1, 2, 3, 4
MOST_BLOBS = 20_000
MOST_PATH_BYTES = 10_000


class SolverState(NamedTuple):
    iteration: int
    learned_net: str
    """The path of the weights on the host that trained them; empty if the file does not say it."""
    current_step: int
    """The number of steps passed of the policy multistep."""
    history: list[Array]
    """The solver's arrays: SGD has one for each parameter that is no copy, its momentum.

    They have the net's order. Solvers with two arrays have all the first, then all the second.
    """


def read(path: Path) -> SolverState:
    """Read a .solverstate. Raises CaffeError (one line) if the file is damaged or no such file."""
    wire = opened(path)
    numbers: dict[int, int] = {}
    learned_net, places = "", []
    for part in wire.parts(0, len(wire)):
        if part.kind == VARINT:
            numbers[part.number] = signed(part.value)
        elif part.kind == BYTES and part.number == LEARNED_NET:
            if part.stop - part.start > MOST_PATH_BYTES:
                raise wire.error(part.start, f"a path of more than {MOST_PATH_BYTES:,} bytes")
            learned_net = decoded(wire.text(part))
        elif part.kind == BYTES and part.number == HISTORY:
            places.append(part)
        if len(places) > MOST_BLOBS or len(numbers) > MOST_BLOBS:
            raise wire.error(part.start, f"more than {MOST_BLOBS:,} blobs")
    iteration, step = numbers.get(ITERATION, -1), numbers.get(CURRENT_STEP, 0)
    if iteration < 0 or step < 0:
        raise CaffeError(f"{path}: says no iteration; expected a .solverstate")
    history = [blob.read(wire, place.start, place.stop) for place in places]
    return SolverState(iteration, learned_net, step, history)
