"""The best evaluation on validation samples so far, and a test of its weights at the end.

The state is saved in the checkpoint. All ranks receive the same evaluation and decide the same.
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
from firecaffe.training.evaluation import Evaluation
from firecaffe.training.evaluation_weights import NORMS
from firecaffe.training.records import in_words
from firecaffe.training.start import load_together
from firecaffe.training.state import WEIGHTS, State, stored_piece

STATE = ("value", "loss", "step", "checkpoint", "evaluated", "without")


class _BestRow(TypedDict):
    metric: str
    value: float | None
    # Missing in older checkpoints.
    loss: NotRequired[float | None]
    step: Count
    checkpoint: str
    evaluated: Count
    without: Count


@dataclass
class Best:
    """Tracks which evaluation was the best. Its state is JSON; see `training.piece.Numbers`."""

    measure: Measure
    value: float | None = None
    """None if there was no evaluation, or none that gave a number."""
    loss: float | None = None
    """The loss of the best. At equal values the lower loss is better, and then the earlier one."""
    step: int = 0
    checkpoint: str = ""
    """The path of the checkpoint of that step, if it is kept."""
    evaluated: int = 0
    """The step of the last evaluation."""
    without: int = 0
    """Evaluations since the value last improved. A lower loss alone does not reset the number."""

    def add(self, step: int, evaluation: Evaluation) -> bool:
        """Record the evaluation after step `step`. Returns whether it is the best so far."""
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

    def has_stalled(self, stop_after: int) -> bool:
        """Whether the last `stop_after` evaluations brought no better value; never if it is 0."""
        return 0 < stop_after <= self.without

    def stall_message(self, last: int) -> str:
        shown = "none" if self.value is None else self.measure.shown(self.value)
        return (
            f"stopped early after step {last}: no better {self.measure.words} in {self.without} "
            f"evaluations than {shown} after step {self.step} (train.stop_after)"
        )

    @property
    def row(self) -> dict[str, Any] | None:
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
        """Restore a state, unless its metric differs. Raises: ValueError if it is invalid."""
        row = checked(state, _BestRow)
        if row["metric"] == self.measure.name:
            for name in STATE:
                setattr(self, name, row.get(name))


EVALUATED = (*WEIGHTS, "ema", NORMS)
"""The pieces of a state that an evaluation may use."""


def evaluate_best(
    world: World,
    state: State,
    best: Best,
    test: Callable[[], Evaluation],
    say: Callable[[str], None],
) -> Evaluation | None:
    """Test the best weights. All ranks call it.

    None if no checkpoint has them, or (with a warning) if it is damaged.
    """
    if not best.checkpoint:
        return None
    try:
        checkpoint, _ = load_together(world, Path(best.checkpoint))
        with in_place(state, checkpoint):
            evaluation = test()
    except CheckpointError as error:  # the run's own result does not depend on it
        say(f"warning: the best weights, of step {best.step}, are not tested: {error}")
        return None
    say(
        f"test of the best weights, of step {best.step}: "
        f"{in_words(evaluation.metrics, evaluation.shares)}"
        f"loss {evaluation.loss:.4f}; the test above is of the last weights"
    )
    return evaluation


@contextmanager
def in_place(state: State, checkpoint: Checkpoint) -> Iterator[None]:
    """Use a checkpoint's weights in a `with` block. All ranks enter it. Raises: CheckpointError."""
    pieces = {name: state.pieces[name] for name in EVALUATED if name in state.pieces}
    live = [t for piece in pieces.values() for part in piece.parts().values() for t in part.tensors]
    clones = [tensor.clone() for tensor in live]
    try:
        for name, piece in pieces.items():
            piece.load(stored_piece(checkpoint, name, piece.held_by_all))
        yield
    finally:
        with torch.no_grad():
            for tensor, value in zip(live, clones, strict=True):
                tensor.copy_(value)
