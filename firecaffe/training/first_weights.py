"""The file that `model.weights` means: the file itself, or that of a checkpoint of a run."""

from dataclasses import dataclass
from pathlib import Path

from firecaffe.errors import CheckpointError, RecipeError
from firecaffe.models.weights import FirstWeights, Outline, file_digest, read_weights
from firecaffe.recipe.sections import Recipe
from firecaffe.training.checkpoint import BEST, POINTERS, STATE, Checkpoint, load_newest
from firecaffe.training.piece import take_rows
from firecaffe.training.state import WEIGHTS, State
from firecaffe.training.tensor_file import InMemory


@dataclass(frozen=True)
class FirstFile:
    path: str
    """Empty if there is no file."""
    sha256: str
    damaged: list[str]
    """Why newer checkpoints of the run that `model.weights` names were not used."""

    def read_into(self, state: State, outline: Outline) -> FirstWeights | None:
        """Load weights that fit into a state. outline: the whole network's. Raises: RecipeError."""
        if not self.path:
            return None
        first_weights, fitting = read_weights(outline, self.path, self.sha256)
        for piece in WEIGHTS:
            here = state.pieces[piece].parts()
            for name in fitting.keys() & here.keys():
                take_rows(here[name], InMemory(fitting), name)
        return first_weights


def first_file(recipe: Recipe, checkpoint: Checkpoint | None) -> FirstFile:
    """Return the file that `model.weights` means, unless a checkpoint is resumed."""
    if checkpoint is not None or not recipe.model.weights:
        return FirstFile("", "none", [])
    path, damaged = find_weights(recipe.model.weights)
    return FirstFile(path, file_digest(path), damaged)


def find_weights(where: str) -> tuple[str, list[str]]:
    """Return the file that `model.weights` means, and why newer checkpoints were not used.

    where: a file of weights, a run's folder (its newest checkpoint that verifies), a checkpoint, or
    `checkpoints/best`, `good` or `latest`. Raises: RecipeError if a folder has no checkpoint.
    """
    path = Path(where)
    if path.name == BEST and not path.exists():
        raise RecipeError(
            f"model.weights is {where!r}, which is not there; a run keeps its best checkpoint with "
            "checkpoint.best = true and train.eval_every"
        )
    if not path.is_dir() and not (path.is_file() and path.name in POINTERS):
        return where, []
    try:
        checkpoint, damaged = load_newest(path)
    except CheckpointError as error:
        raise RecipeError(
            f"model.weights {error}; expected a run's folder, a checkpoint, or a file of weights"
        ) from error
    assert checkpoint.folder is not None  # it was read from there
    return str(checkpoint.folder / STATE), damaged
