"""The best evaluation on validation samples so far, and how many came since without a better one.

It goes with the checkpoint, so that a resumed training counts on. All ranks get the same
evaluation, so they decide alike.

The best weights in the place of the last, to be tested at the end of a training.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import isnan
from pathlib import Path
from typing import Any, NotRequired, TypedDict

import torch

from firecaffe.cluster.world import World
from firecaffe.errors import CheckpointError
from firecaffe.runs.measure import Measure
from firecaffe.schema import Count, checked
from firecaffe.training.checkpoint import Checkpoint
from firecaffe.training.evaluate import Evaluation
from firecaffe.training.evaluation_weights import NORMS
from firecaffe.training.records import in_words
from firecaffe.training.start import load_together
from firecaffe.training.state import WEIGHTS, State, stored_piece

STATE = ("value", "loss", "step", "checkpoint", "evaluated", "without")
"""What goes with a checkpoint."""


class _Row(TypedDict):
    """That, as it is read. A value may be no number."""

    metric: str
    value: float | None
    loss: NotRequired[float | None]
    """Younger than the others."""
    step: Count
    checkpoint: str
    evaluated: Count
    without: Count


@dataclass
class Best:
    """Which evaluation was the best. Its state is JSON; see `training.piece.Numbers`."""

    measure: Measure
    """What chooses."""
    value: float | None = None
    """None if there was no evaluation, or none that gave a number."""
    loss: float | None = None
    """Its loss: of two that have the same value, the one with the lower loss is the best, and of
    those the earlier.
    """
    step: int = 0
    checkpoint: str = ""
    """The path of the checkpoint of that step, if it is kept."""
    evaluated: int = 0
    """The step of the last evaluation."""
    without: int = 0
    """Evaluations since one had a better value than all before: a lower loss alone is no reason to
    train on.
    """

    def add(self, step: int, evaluation: Evaluation) -> bool:
        """Takes in the evaluation after step `step`. Returns whether it is the best so far."""
        value = float(evaluation.row[self.measure.name])
        is_better = self._is_better(value)
        has_lower_loss = (
            value == self.value and self.loss is not None and evaluation.loss < self.loss
        )
        self.evaluated = step
        self.without = 0 if is_better else self.without + 1
        if is_better or has_lower_loss:
            self.value, self.loss = value, evaluation.loss
            self.step, self.checkpoint = step, ""
        return is_better or has_lower_loss

    def keep(self, checkpoint: str) -> None:
        """Takes the path of the checkpoint of the best evaluation."""
        self.checkpoint = checkpoint

    def is_enough(self, stop_after: int) -> bool:
        """Whether so many evaluations have come without a better one; 0 is never enough."""
        return 0 < stop_after <= self.without

    def no_better(self, last: int) -> str:
        """The line about an early stop, after step `last`."""
        shown = "none" if self.value is None else self.measure.shown(self.value)
        return (
            f"stopped early, after step {last}: {self.without} evaluations came to no better "
            f"{self.measure.words} than {shown}, after step {self.step} (train.stop_after)"
        )

    @property
    def row(self) -> dict[str, Any] | None:
        """It as result.json has it; None if there was no evaluation."""
        if self.value is None:
            return None
        names = ("value", "step", "checkpoint")
        return {"metric": self.measure.name, **{name: getattr(self, name) for name in names}}

    def _is_better(self, value: float) -> bool:
        if self.value is None or isnan(value):
            return not isnan(value)
        return self.measure.gain(value) > self.measure.gain(self.value)

    def state_dict(self) -> dict[str, Any]:
        if not self.evaluated:
            return {}
        return {"metric": self.measure.name, **{name: getattr(self, name) for name in STATE}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes what was found so far. By another metric there was nothing yet.

        Raises: ValueError if it is none.
        """
        row = checked(state, _Row)
        if row["metric"] == self.measure.name:
            for name in STATE:
                setattr(self, name, row.get(name))


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
