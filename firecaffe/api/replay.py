"""`firecaffe.replay`: the same bits again, from a run's recipe and its log of events alone."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from firecaffe.api.answer import Answer
from firecaffe.api.argument_checks import path_of
from firecaffe.api.run_argument import folder_of, open_run
from firecaffe.cluster.from_script import from_script
from firecaffe.cluster.groups import check_alone
from firecaffe.cluster.world import join
from firecaffe.errors import NotIdenticalError
from firecaffe.training.named import check_named
from firecaffe.training.verification import replay as replay_run

NEEDED = ("model", "data", "task")
"""Recipe sections that determine what is computed."""


@dataclass(frozen=True, repr=False)
class Replay(Answer):
    """A run that was computed again with the same bits."""

    run: Path
    """The run, as it was given."""
    step: int
    """The step up to which it was computed."""
    updates: int
    """The server's updates."""
    weights_sha256: str
    """The digest of the weights."""
    state_sha256: str
    """The digest of all state, and of the losses of all steps."""

    def to_dict(self) -> dict[str, Any]:
        """Return the fields."""
        return {
            "run": str(self.run),
            "step": self.step,
            "updates": self.updates,
            "weights_sha256": self.weights_sha256,
            "state_sha256": self.state_sha256,
        }

    def _parts(self) -> Iterator[str]:
        yield (
            f"same: {self.updates:,} updates of {self.step} steps; weights "
            f"{self.weights_sha256[:12]}, state {self.state_sha256[:12]}"
        )


@from_script
def replay(
    run: str | Path,
    *,
    to: str | Path = "",
    trust_code: bool = False,
    replace: Mapping[str, Any] | None = None,
) -> Replay:
    """Compute a run with a server again, on this process, and compare the digests of its end.

    Args:
        run: A run's folder. If the run did not finish, it is computed up to its newest checkpoint.
        to: A new folder for the checkpoint of what came out; none is kept without it.
        trust_code: Run code that the folder names.
        replace: Words of the run's recipe with other values, as {"data.path": "new"}.

    Raises: NotIdenticalError if a digest differs; RunError if the run wrote no events, or a line of
    its log is damaged; RecipeError, DataError, CheckpointError.
    """
    check_alone("replay")
    used = open_run(run, replace, trust_code)
    target = None if to == "" else path_of("to", to)
    check_named(used.where, used.recipe, NEEDED)
    folder, exchange = folder_of(used.where), used.recipe.exchange
    with join(used.recipe.train.device, exchange.timeout_s, exchange.silent_s) as world:
        replayed = replay_run(folder, used.recipe, world, target)
    ours, theirs = replayed.computed, replayed.recorded
    if not replayed.is_same:
        what = "weights" if ours.weights != theirs.weights else "optimizer state or losses"
        raise NotIdenticalError(
            f"{folder} differs from its replay after step {ours.step}: {what}; weights "
            f"{theirs.weights[:12]} in the run, {ours.weights[:12]} in the replay. Other code, "
            "data or hardware than the run's may be why"
        )
    return Replay(used.where, ours.step, replayed.updates, ours.weights, ours.state)
