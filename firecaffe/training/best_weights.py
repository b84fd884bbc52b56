"""The best weights in the place of the last, to be tested at the end of a training."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from firecaffe.cluster.world import World
from firecaffe.errors import CheckpointError
from firecaffe.training.best import Best
from firecaffe.training.checkpoint import Checkpoint
from firecaffe.training.evaluate import Evaluation
from firecaffe.training.norms import NORMS
from firecaffe.training.progress import in_words
from firecaffe.training.start import load_together
from firecaffe.training.state import WEIGHTS, State, stored_piece

EVALUATED = (*WEIGHTS, "ema", NORMS)
"""The pieces of a state that an evaluation may take."""


def test_best(
    world: World,
    state: State,
    best: Best,
    test: Callable[[], Evaluation],
    say: Callable[[str], None],
) -> Evaluation | None:
    """What the best weights come to on the test samples; None if their checkpoint is not kept, or,
    with a warning, damaged. All ranks call it. test: of the network as it is.
    """
    if not best.checkpoint:
        return None
    try:
        checkpoint, _ = load_together(world, Path(best.checkpoint))
        with in_place(state, checkpoint):
            found = test()
    except CheckpointError as error:  # the run's own result does not hang on it
        say(f"warning: the best weights, of step {best.step}, are not tested: {error}")
        return None
    say(
        f"test of the best weights, of step {best.step}: {in_words(found.metrics, found.shares)}"
        f"loss {found.loss:.4f}; the test above is of the last weights"
    )
    return found


@contextmanager
def in_place(state: State, checkpoint: Checkpoint) -> Iterator[None]:
    """Puts a checkpoint's weights into the network, for a `with` block; then the own are back, the
    same bits. All ranks enter it. Raises: CheckpointError if they do not fit.
    """
    pieces = {name: state.pieces[name] for name in EVALUATED if name in state.pieces}
    live = [t for each in pieces.values() for part in each.parts().values() for t in part.tensors]
    own = [tensor.clone() for tensor in live]
    try:
        for name, piece in pieces.items():
            piece.load(stored_piece(checkpoint, name, piece.held_by_all))
        yield
    finally:
        with torch.no_grad():
            for tensor, value in zip(live, own, strict=True):
                tensor.copy_(value)
