"""The file that `model.weights` means: itself, or that of a checkpoint of a run."""

from pathlib import Path

from firecaffe.errors import CheckpointError, RecipeError
from firecaffe.training.checkpoint import BEST, POINTERS, STATE, load_newest


def find_weights(where: str) -> tuple[str, list[str]]:
    """The file of weights that `model.weights` means, and why newer checkpoints are no good.

    where: what `firecaffe.load` takes: a file of weights, a run's folder (its newest checkpoint
    that verifies), a checkpoint's, or `checkpoints/best`, `good` or `latest`, which name one.

    Raises: RecipeError if a folder has no such checkpoint.
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
