"""Loads a trained network from a run's folder, a checkpoint, or a file of weights.

Also finds the file that `model.weights` means, and parts of a run that were given in Python.
"""

import warnings
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from firecaffe.data import open_data
from firecaffe.data.datasets import GIVEN
from firecaffe.errors import CheckpointError, RecipeError
from firecaffe.generators import generators_kept
from firecaffe.models.extra_state import hold_extra_state, release_extra_state
from firecaffe.models.low_rank import make_low_rank
from firecaffe.models.network import GIVEN_IN_PYTHON, made_by, make_network
from firecaffe.models.weights import FirstWeights, Outline, file_digest, load_weights, read_weights
from firecaffe.recipe.checked_recipe import recipe_of_run
from firecaffe.recipe.sections import Recipe
from firecaffe.resume_advice import replaced
from firecaffe.runs.run_folder import ENVIRONMENT, RECIPE
from firecaffe.tasks import OWN_TASK, TaskConfig
from firecaffe.training.checkpoint import BEST, POINTERS, STATE, SUMS, Checkpoint, load_newest
from firecaffe.training.evaluation_weights import NORMS
from firecaffe.training.fcz_description import check_outline, described, is_coded, with_nets
from firecaffe.training.forward import set_memory_format
from firecaffe.training.given_parts import (
    NOTHING,
    About,
    Parts,
    about_of,
    check_no_arguments,
    read_about,
)
from firecaffe.training.piece import Weights, take_rows
from firecaffe.training.state import WEIGHTS, State, stored_piece
from firecaffe.training.tensor_file import InMemory
from firecaffe.user_code import shown

UNUSED_BY_NETWORK = ("data.name", "task.name")
"""Settings of a .fcz file that do not matter to its network."""

Given = Callable[[], nn.Module] | nn.Module


@dataclass(frozen=True)
class Trained:
    """The network of a run after `step`, or of a file (no step), in evaluation mode on the CPU."""

    model: nn.Module
    recipe: Recipe
    about: About
    step: int | None
    evaluated: str
    """Loaded weights: "weights", or "ema", their moving average, if evaluations use that."""
    notes: list[str]
    """Lines about newer checkpoints that are damaged."""


def load(
    run_or_file: str | Path,
    model: Given | None = None,
    *,
    best: bool = False,
    trust_code: bool = False,
) -> nn.Module:
    """Return a trained network in evaluation mode, on the CPU.

    If the run's evaluations use a moving average of the weights, the network has that.

    Args:
        run_or_file: A run's folder (its newest checkpoint that verifies), a checkpoint in it, or a
            file: .fcz, which says which network it is, or weights alone (safetensors, or a
            state_dict of torch.save).
        model: The network, or a function that makes it. It is needed for a file of weights, and for
            a run or a .fcz file whose network is a user's own code.
        best: Load a run's best checkpoint instead of the newest.
        trust_code: Also run code that the folder or the file names, whoever made it. Otherwise only
            firecaffe's own networks are built.

    Raises: CheckpointError if no checkpoint verifies, or the weights do not fit; RecipeError if
    nothing says which network it is; RunError if the run cannot be read; DataError if its data are
    needed and missing; OwnCodeError for what a user's code raises.
    """
    if not isinstance(run_or_file, str | Path):
        raise RecipeError(f"load: found {shown(run_or_file)}; expected the path of a run or a file")
    if model is not None and not isinstance(model, nn.Module) and not callable(model):
        raise RecipeError(
            f"load: model is {shown(model)}; expected a network, or a function that makes one"
        )
    where = Path(run_or_file)
    if where.is_file() and where.name not in POINTERS and not is_coded(where):
        network = _from_weights(where, model, best)
    else:
        trained = load_run(where, model, best=best, trust_code=trust_code)
        for note in trained.notes:
            warnings.warn(note, stacklevel=2)
        network = trained.model
    release_extra_state(network)
    return network


def load_run(
    where: Path,
    model: Given | None = None,
    *,
    best: bool = False,
    recipe: Recipe | None = None,
    trust_code: bool = False,
) -> Trained:
    """Load the network of a run, a checkpoint or a .fcz file. recipe: replaces its recipe."""
    if not where.exists():
        raise CheckpointError(f"{where}: there is no such run folder, checkpoint or file")
    if is_coded(where):
        return _from_coded(where, model, best, recipe, trust_code)
    run = run_of(where)
    about: About | None = NOTHING
    if run is None:
        if model is None:
            raise RecipeError(
                f"{where}: no {RECIPE} there, or above it, says which network it is; give it: "
                f'load("{where}", model=…)'
            )
        recipe = recipe or Recipe()
    else:
        about = read_about(run)
        recipe = recipe or recipe_of_run(run, trust_code=trust_code)
    if model is None and recipe.model.name.startswith(GIVEN_IN_PYTHON):
        raise RecipeError(
            f"{where}: its network, {recipe.model.name.removeprefix(GIVEN_IN_PYTHON)}, was given "
            f'in Python; give it again: firecaffe.load("{where}", model=…)'
        )
    if run is not None and is_import(where, recipe) and not best:
        return _filled(model, recipe, about or NOTHING, Path(recipe.model.weights))
    checkpoint, damaged = _checkpoint(where, best)
    about = about or about_of(Parts(), open_data(recipe.data))
    network = _made(model, recipe, about)
    evaluated = fill(network, checkpoint)
    notes = [f"{reason}; an older checkpoint is taken" for reason in damaged]
    # After loading, because a user's `eval` may compute something from the weights.
    return Trained(network.eval(), recipe, about, checkpoint.step, evaluated, notes)


def is_import(where: Path, recipe: Recipe) -> bool:
    """Whether an import made a folder: its recipe has first weights, and no run began there."""
    # A run writes its environment as it begins.
    begun = any((where / name).exists() for name in ("checkpoints", SUMS, ENVIRONMENT))
    return bool(recipe.model.weights) and not begun


def _filled(model: Given | None, recipe: Recipe, about: About, file: Path) -> Trained:
    """Load a network from a file of weights. Raises: CheckpointError unless all of them fit."""
    network = _made(model, recipe, about)
    try:
        loaded = load_weights(network, str(file))
    except RecipeError as error:
        raise CheckpointError(str(error).removeprefix("model.weights ")) from error
    if loaded.missing or loaded.unexpected or loaded.reshaped:
        line = loaded.line.removeprefix("model.weights ")
        raise CheckpointError(f"{line}; expected all to fit")
    return Trained(network.eval(), recipe, about, None, "weights", [])


def run_of(where: Path) -> Path | None:
    """Return the run's folder at or above a path; None for a .fcz file, wherever it lies."""
    if is_coded(where):
        return None
    around = (where, where.resolve().parent, where.resolve().parent.parent)
    return next((folder for folder in around if (folder / RECIPE).is_file()), None)


@torch.no_grad()
def fill(network: nn.Module, checkpoint: Checkpoint) -> str:
    """Load the weights of evaluations; return "weights" or "ema". Raises: CheckpointError."""
    Weights(network.named_parameters).load(stored_piece(checkpoint, "parameter"))
    Weights(network.named_buffers).load(stored_piece(checkpoint, "buffer"))
    buffers = dict(network.named_buffers())
    norms = stored_piece(checkpoint, NORMS)
    for name in norms:
        buffers[name].copy_(norms[name])
    averages = stored_piece(checkpoint, "ema")
    if not len(averages):
        return "weights"
    named = dict(network.named_parameters())
    for name in averages:
        named[name].copy_(averages[name])
    return "ema"


def _checkpoint(where: Path, best: bool) -> tuple[Checkpoint, list[str]]:
    if not best:
        return load_newest(where)
    if (where / SUMS).is_file():
        raise RecipeError(f"{where}: is one checkpoint; best is asked of a run's folder")
    folder = where / "checkpoints" if (where / "checkpoints").is_dir() else where
    if not (folder / BEST).is_file():
        known = load_newest(folder)[0].numbers.get("best", {})
        advice = "train with checkpoint.best = true and train.eval_every"
        if known.get("checkpoint"):
            advice = f"the best is {known['checkpoint']}, of the run that it has resumed"
        elif known and known.get("value") is None:
            advice = f"{known['metric']} was no number in any evaluation"
        raise CheckpointError(f"{where}: has no best checkpoint; {advice}")
    return load_newest(folder / BEST)


def _made(model: Given | None, recipe: Recipe, about: About) -> nn.Module:
    with generators_kept():  # the user's random numbers continue as if no network was made
        if model is None:
            network = make_network(recipe.model, about.num_classes, about.in_channels)
        elif isinstance(model, nn.Module):
            network = model
        else:
            check_no_arguments(model)
            network = made_by(model)
    if model is not None:
        make_low_rank(network, recipe.model.low_rank)
    hold_extra_state(network)
    set_memory_format(network, recipe.train)
    return network


def _from_coded(
    file: Path, model: Given | None, best: bool, recipe: Recipe | None, trust_code: bool
) -> Trained:
    # The file's outline is compared with the network's before memory is allocated for tensors.
    if best:
        raise RecipeError(f"{file}: is a file; best is asked of a run's folder")
    named = UNUSED_BY_NETWORK if model is None else ("model.name", *UNUSED_BY_NETWORK)
    given = named if recipe is None else ("model.name",)
    stated, about = described(file, given, trust_code=trust_code)
    if recipe is None:
        recipe = with_nets(file, stated, named)
    if model is None:
        check_outline(file, recipe.model, about)
    return _filled(model, recipe, about, file)


def _from_weights(file: Path, model: Given | None, best: bool) -> nn.Module:
    if best:
        raise RecipeError(f"{file}: is a file; best is asked of a run's folder")
    if model is None:
        raise RecipeError(
            f'{file}: a file of weights does not say which network it is; give it: load("{file}", '
            "model=…)"
        )
    return _filled(model, Recipe(), NOTHING, file).model


@dataclass(frozen=True)
class FirstWeightsFile:
    path: str
    """Empty if there is no file."""
    sha256: str
    damaged: list[str]
    """Why newer checkpoints of the run that `model.weights` names were not used."""

    def read_into(self, state: State, outline: Outline) -> FirstWeights | None:
        """Load the weights that fit `state`. outline: the whole network's. Raises: RecipeError."""
        if not self.path:
            return None
        first_weights, fitting = read_weights(outline, self.path, self.sha256)
        for piece in WEIGHTS:
            here = state.pieces[piece].parts()
            for name in fitting.keys() & here.keys():
                take_rows(here[name], InMemory(fitting), name)
        return first_weights


def first_weights_file(recipe: Recipe, checkpoint: Checkpoint | None) -> FirstWeightsFile:
    """Return the file that `model.weights` means, unless a checkpoint is resumed."""
    if checkpoint is not None or not recipe.model.weights:
        return FirstWeightsFile("", "none", [])
    path, damaged = find_weights(recipe.model.weights)
    return FirstWeightsFile(path, file_digest(path), damaged)


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


def check_named(where: Path, recipe: Recipe, needed: Collection[str]) -> None:
    """Raise RecipeError if parts of `needed` sections were given in Python and are not named."""
    run = run_of(where)
    about = None if run is None else read_about(run)
    unnamed = {}
    if recipe.model.name.startswith(GIVEN_IN_PYTHON):
        unnamed["model"] = f"network {recipe.model.name.removeprefix(GIVEN_IN_PYTHON)}"
    if recipe.data.name == GIVEN:
        unnamed["data"] = "data"
    for word in ("loss", "task"):
        if about and word in about.given and recipe.task.name in (OWN_TASK, TaskConfig().name):
            unnamed["task"] = word
    missing = {section: what for section, what in unnamed.items() if section in needed}
    if missing:
        raise RecipeError(
            f"{where}: given in Python, or not at all, and named nowhere: "
            f"{', '.join(missing.values())}; name functions that return the same: "
            f"{replaced({f'{section}.name': 'path/file.py:function' for section in missing})}"
        )
