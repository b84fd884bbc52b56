"""One attempt: a scheme's rounds of training, a file, and the evaluation of the decoded network.

The trained network may start in lower rank.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from firecaffe.cluster.world import World
from firecaffe.compression.fcz import CODES, FileReport, write
from firecaffe.compression.transfer import BYTES_PER_WEIGHT
from firecaffe.data import Data, Dataset, open_data
from firecaffe.data.datasets import some_of
from firecaffe.errors import RecipeError, RunError
from firecaffe.files import atomic_replace, write_json
from firecaffe.models.low_rank import chosen_ranks, low_rank_weights, rank_of
from firecaffe.models.network import make_network
from firecaffe.models.weights import load_weights
from firecaffe.recipe.sections import Recipe
from firecaffe.resume_advice import option
from firecaffe.runs.measure import LOSS, Measure
from firecaffe.runs.run_folder import RECIPE, read_run_file
from firecaffe.shrink.layer_sizes import Choice
from firecaffe.shrink.pruning_rounds import rounds_of
from firecaffe.shrink.scheme import Scheme
from firecaffe.tasks import Task
from firecaffe.training.checkpoint import BEST
from firecaffe.training.data_workers import data_workers
from firecaffe.training.evaluation import evaluate
from firecaffe.training.fcz_description import describe, tensors_of
from firecaffe.training.forward import arithmetic
from firecaffe.training.given_parts import counts_of, task_for
from firecaffe.training.load import Trained, find_weights, load_run, run_of
from firecaffe.training.tensor_file import save_tensors
from firecaffe.training.trial import Trial, run_trials

LOW_RANK_FILE = "0-low_rank.safetensors"


def trained_network(recipe: Recipe, data: Data) -> nn.Module:
    """Load the trained network. Raises RecipeError if a weight is missing or does not fit."""
    network = make_network(recipe.model, *counts_of(data.train)).eval()
    loaded = load_weights(network, find_weights(recipe.model.weights)[0])
    if loaded.missing or loaded.reshaped:
        raise RecipeError(f"{loaded.line}; expected all to fit")
    return network


def ranks_of(scheme: Scheme, network: nn.Module) -> Mapping[str, int]:
    """Return the rank of each layer that becomes smaller in low rank. Raises RecipeError."""
    if "rank" in scheme.low_rank:
        return chosen_ranks(network, scheme.low_rank["rank"])
    ranks: dict[str, int] = {}
    for pattern, energy in scheme.low_rank.get("energy", {}).items():
        for layer in chosen_ranks(network, {pattern: 1}):
            weight = network.get_parameter(f"{layer}.weight")
            rank = rank_of(weight, energy)
            outputs, inputs = weight.flatten(1).shape
            ranks.pop(layer, None)
            if rank * (outputs + inputs) < outputs * inputs:
                ranks[layer] = rank
    return ranks


def with_ranks(recipe: Recipe, ranks: Mapping[str, int], weights: str) -> Recipe:
    """Return the recipe of the network in lower rank. Raises RecipeError if it is already."""
    if not ranks:
        return recipe
    if recipe.model.low_rank:
        raise RecipeError(
            "low_rank: the network has model.low_rank already; leave the scheme's out"
        )
    return replace(recipe, model=replace(recipe.model, low_rank=dict(ranks), weights=weights))


def write_start(network: nn.Module, ranks: Mapping[str, int], folder: Path) -> str:
    weights = low_rank_weights(network.state_dict(), ranks)
    path = folder / LOW_RANK_FILE
    with atomic_replace(path) as aside:
        save_tensors({name: tensor.contiguous() for name, tensor in weights.items()}, aside)
    return str(path)


def recipe_of_run(where: Path, recipe: Recipe, best: bool) -> Recipe:
    """Return a finished run's recipe, with weights at `where`. Raises RunError, RecipeError."""
    folder = run_of(where)
    if folder is None:
        raise RunError(f"{where}: no {RECIPE}; this is no run folder")
    if not (folder / "result.json").is_file():
        raise RunError(
            f"{folder}: has not finished; firecaffe train {folder / RECIPE} --resume {folder}"
        )
    if best and where != folder:
        raise RecipeError(
            f"{option('best')} is asked of a run's folder; {where} is one checkpoint of it"
        )
    weights = folder / "checkpoints" / BEST if best else where
    return replace(recipe, model=replace(recipe.model, weights=str(weights)))


def check_weights(recipe: Recipe, file: Path) -> None:
    if not recipe.model.weights:
        raise RecipeError(
            f"{file}: model.weights is empty; compress takes a finished run, or a recipe whose "
            "model.weights are those of a trained network"
        )


MAX_TRIED = 2000
"""Maximum held-out samples for sensitivities, which take many evaluations of each layer."""


@dataclass(frozen=True)
class Worth:
    """A network's metric, in the units of records: shares are fractions of 1."""

    test: float
    held_out: float | None
    """The metric on held-out training samples; None if there are none."""

    def less(self, after: "Worth", measure: Measure) -> "Worth":
        """Return the loss from this to `after`, in printed units (points); gains are negative."""

        def lost(one: float, other: float) -> float:
            return measure.scale * (measure.gain(one) - measure.gain(other))

        held_out = None
        if self.held_out is not None and after.held_out is not None:
            held_out = lost(self.held_out, after.held_out)
        return Worth(lost(self.test, after.test), held_out)


@dataclass(frozen=True)
class Evaluator:
    recipe: Recipe
    world: World
    data: Data
    task: Task

    @property
    def measure(self) -> Measure:
        return self.task.measure

    def worth(self, network: nn.Module) -> Worth:
        held_out = self.data.validation
        return Worth(
            self._value(network, self.data.test),
            None if held_out is None else self._value(network, held_out),
        )

    def tried(self, network: nn.Module) -> float:
        """Evaluate on at most MAX_TRIED held-out samples, in printed units; more is better."""
        held_out = self.data.validation
        assert held_out is not None
        if len(held_out) > MAX_TRIED:
            places = torch.linspace(0, len(held_out) - 1, MAX_TRIED).long()
            held_out = some_of(held_out, places)
        return self.measure.scale * self.measure.gain(self._value(network, held_out))

    def _value(self, network: nn.Module, part: Dataset) -> float:
        network = network.to(self.world.device)
        recipe = self.recipe
        evaluation = evaluate(network, self.task, part, recipe.data, recipe.train, self.world)
        name = self.measure.name
        return evaluation.loss if name == LOSS.name else evaluation.metrics[name]


@contextmanager
def open_evaluator(recipe: Recipe, world: World) -> Iterator[Evaluator]:
    """Open the recipe's data for evaluations. Raises DataError, RecipeError."""
    data = open_data(recipe.data)
    with arithmetic(recipe.train, world.device), data_workers(data):
        yield Evaluator(recipe, world, data, task_for(recipe, None, None, data.train))


@torch.no_grad()
def fold_normalization(network: nn.Module) -> list[str]:
    """Fold each BatchNorm's statistics into weight and bias; return the layers' names.

    The mean becomes 0 and the variance 1 - eps, so that a file needs no numbers for them. Outputs
    in evaluation are equal up to rounding. Do not train the network further. A BatchNorm without
    statistics, without weight and bias, or with a shared weight or bias, is not changed.
    """
    folded = []
    users = Counter(
        id(parameter) for layer in network.modules() for parameter in layer._parameters.values()
    )
    for name, layer in network.named_modules():
        if not isinstance(layer, _BatchNorm) or not layer.affine:
            continue
        mean, var = layer.running_mean, layer.running_var
        is_shared = users[id(layer.weight)] > 1 or users[id(layer.bias)] > 1
        if mean is None or var is None or is_shared:
            continue
        scale = layer.weight.double() / (var.double() + layer.eps).sqrt()
        layer.bias.copy_(layer.bias.double() - mean.double() * scale)
        layer.weight.copy_(scale)
        mean.zero_()
        var.fill_(1 - layer.eps)
        folded.append(name)
    return folded


MAX_SHARED = 1 << 16


def write_network(trained: Trained, scheme: Scheme, path: Path) -> FileReport:
    """Fold the normalization if the scheme requires it, and write the file. Raises RecipeError."""
    if scheme.normalization == "fold":
        fold_normalization(trained.model)
    tensors = {
        name: _in_bits(values, scheme.biases) for name, values in tensors_of(trained.model).items()
    }
    network = describe(trained.recipe, trained.about)
    (code,) = (code for code in CODES if code == scheme.code)
    return write(path, tensors, network, code=code)


def _in_bits(values: NDArray[Any], bits: int) -> NDArray[Any]:
    """Round float32 vectors and tensors of shared values to float16, if `bits` is 16."""
    if bits == 32 or values.dtype != np.float32:
        return values
    if values.ndim > 1 and len(np.unique(values)) > MAX_SHARED:
        return values
    with np.errstate(over="ignore"):
        rounded: NDArray[np.float32] = values.astype(np.float16).astype(np.float32)
    if not np.array_equal(np.isfinite(rounded), np.isfinite(values)):
        return values
    return rounded + np.float32(0)  # turns -0 into 0, which compresses


FILE = "net.fcz"


@dataclass(frozen=True)
class RoundDone:
    name: str
    folder: Path
    steps: int
    test: float
    """The metric on the test samples, before writing the network."""


@dataclass(frozen=True)
class AttemptResult:
    path: Path
    report: FileReport
    rounds: Sequence[RoundDone]
    worth: Worth
    """The metric of the network decoded from the file."""
    lost: Worth
    """The loss against the float network, in printed units."""
    ratio: float

    @property
    def as_row(self) -> dict[str, Any]:
        return {
            "file": str(self.path),
            "bytes": self.report.num_bytes,
            "ratio": self.ratio,
            "decoded": asdict(self.worth),
            "lost": asdict(self.lost),
        }


@dataclass(frozen=True)
class AttemptMaker:
    recipe: Recipe
    """`model.weights` has the trained weights."""
    scheme: Scheme
    steps: int
    weights: int
    before: Worth
    judge: Evaluator
    workers: int
    lock: int
    say: Callable[[str], None]

    def make(self, folder: Path, choice: Choice | None = None) -> AttemptResult:
        """Train the missing rounds, write the file, read it back and evaluate that network.

        `choice` replaces the scheme's settings of layers. Raises what `run_trials` and `load`
        raise.
        """
        folder.mkdir(parents=True, exist_ok=True)
        measure = self.judge.measure
        trials = rounds_of(self.recipe, self.scheme, self.steps, folder, choice, measure)
        train = partial(run_trials, at_once=1, workers=self.workers, lock=self.lock)
        rounds = []
        for trial in trials:
            train([trial], say=lambda _: None)
            rounds.append(self._done(trial))
        # With the checked recipe, because the folder's recipe may have been copied with a run.
        trained = load_run(trials[-1].folder, recipe=trials[-1].recipe)
        path = folder / FILE
        report = write_network(trained, self.scheme, path)
        worth = self.judge.worth(load_run(path, recipe=trained.recipe).model)
        lost = self.before.less(worth, measure)
        ratio = self.weights * BYTES_PER_WEIGHT / report.num_bytes
        made = AttemptResult(path, report, rounds, worth, lost, ratio)
        write_json(path.with_suffix(".json"), made.as_row)
        return made

    def _done(self, trial: Trial) -> RoundDone:
        result = read_run_file(trial.folder, "result.json")
        measure = self.judge.measure
        test = measure.value_in(result)
        self.say(f"{trial.folder}: test {measure.words} {measure.shown(test)}")
        return RoundDone(trial.name, trial.folder, result["steps"], test)
