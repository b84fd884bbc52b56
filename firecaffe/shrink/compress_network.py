"""The compression of a trained network: rounds of a scheme, or a search for a target; its record.

Content of OUT-rounds, the folder next to the file:

    compress.json        the request; the same request resumes here, another is refused
    0-low_rank.safetensors    with low_rank: the weights in lower rank
    1-prune/, 2-share/   the rounds' run folders, with 1-prune.toml and 1-prune.log next to them
    net.fcz, net.json    the result
    sensitivity.json     with a target: the sensitivity of each layer
    40x/                 with a target: the rounds and the file of one attempted size
"""

import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from math import ceil, log2
from pathlib import Path
from typing import Any, TypedDict

from torch import nn

from firecaffe.cluster.world import World
from firecaffe.compression.fcz import TensorReport
from firecaffe.compression.fcz.network_file import outline_of
from firecaffe.compression.transfer import BYTES_PER_WEIGHT, seconds
from firecaffe.data import Data, check_data
from firecaffe.errors import OwnCodeError, RecipeError, RunError
from firecaffe.files import atomic_replace, write_json
from firecaffe.models.weights import file_digest
from firecaffe.recipe.checked_recipe import check_recipe
from firecaffe.recipe.run import total_steps
from firecaffe.recipe.sections import Recipe, to_toml
from firecaffe.resume_advice import option
from firecaffe.runs.measure import Measure
from firecaffe.runs.run_folder import read_run_file
from firecaffe.schema import Count, Real, read_file
from firecaffe.shrink.attempt import (
    AttemptMaker,
    AttemptResult,
    Evaluator,
    Worth,
    open_evaluator,
    ranks_of,
    trained_network,
    with_ranks,
    write_start,
)
from firecaffe.shrink.layer_sizes import LayerSensitivity, choose, layers_of, measure_layers
from firecaffe.shrink.pruning_rounds import Attempt, Target, best_of, next_aim, rounds_of
from firecaffe.shrink.scheme import Scheme
from firecaffe.training.checks import preflight
from firecaffe.training.fcz_description import tensors_of
from firecaffe.training.load import find_weights
from firecaffe.training.trial import claim_folder, command_lock

HEADER_BYTES = 200


@dataclass(frozen=True)
class CompressRequest:
    recipe: Recipe
    """The trained network's recipe; `model.weights` says where its weights are."""
    scheme: Scheme
    target: Target | None
    out: Path
    workers: int

    @property
    def folder(self) -> Path:
        return self.out.with_name(f"{self.out.stem}-rounds")


@dataclass(frozen=True)
class CompressionResult:
    asked: CompressRequest
    weights: int
    """Parameters of the network; a ratio counts 4 bytes for each."""
    float_worth: Worth
    made: AttemptResult
    tried: Sequence[AttemptResult]
    layers: Sequence[LayerSensitivity]
    reached: bool
    """Whether the target is reached; true without a target."""
    measure: Measure


def plan_compression(asked: CompressRequest) -> Data:
    """Check everything before training. Raises RecipeError, and the errors of `preflight`."""
    data = check_data(asked.recipe.data)
    if asked.target is not None and data.validation is None:
        raise RecipeError(
            f"{option('target')} {asked.target.word} chooses by held-out training samples, and the "
            "run has "
            "none; compress a run that was trained with data.hold_out, as 0.1"
        )
    network = trained_network(asked.recipe, data)
    for name, values in tensors_of(network).items():
        outline_of(name, values)  # raises if a file cannot hold it
    if asked.target is not None:
        _check_target(
            asked.target, asked.scheme, sum(parameter.numel() for parameter in network.parameters())
        )
    with _prefix_errors(asked.scheme, ""):
        recipe = with_ranks(asked.recipe, ranks_of(asked.scheme, network), "")
    for trial in rounds_of(recipe, asked.scheme, total_steps(recipe, data), Path()):
        # The weights were checked above, and those of later rounds do not exist yet.
        model = replace(trial.recipe.model, weights="")
        with _prefix_errors(asked.scheme, f", round {trial.name}"):
            preflight(check_recipe(replace(trial.recipe, model=model)), asked.workers)
    return data


def _check_target(target: Target, scheme: Scheme, weights: int) -> None:
    whole = weights * BYTES_PER_WEIGHT
    if target.is_of_size and target.most_bytes(weights) >= whole:
        raise RecipeError(
            f"{option('target')} {target.word}: the network's weights are {whole:,} bytes as "
            "float32 already"
        )
    settings = (("prune", "keep"), ("prune", "threshold"), ("share", "bits"))
    if not any(training_round.has(*word) for training_round in scheme.rounds for word in settings):
        raise RecipeError(
            f"{option('target')} {target.word} chooses what layers keep and their bits, and scheme "
            f"{scheme.name} neither prunes nor shares; leave the target out"
        )


@contextmanager
def _prefix_errors(scheme: Scheme, place: str) -> Iterator[None]:
    try:
        yield
    except OwnCodeError:
        raise
    except RecipeError as error:
        raise RecipeError(f"scheme {scheme.name}{place}: {error}") from error


def compress(
    asked: CompressRequest,
    world: World,
    say: Callable[[str], None],
    say_layers: Callable[[Sequence[LayerSensitivity], Measure], None],
) -> CompressionResult:
    """Train the rounds, write the file and evaluate it. Finished work in the folder is reused.

    `world` has only this process. `say` reports the end of each round, and `say_layers` the
    sensitivities. Raises RunError if the folder holds another compression, and what `run_trials`
    raises.
    """
    data = plan_compression(asked)
    with command_lock(asked.folder) as lock, open_evaluator(asked.recipe, world) as judge:
        _claim(asked)
        network = trained_network(asked.recipe, data)
        before = judge.worth(network)
        weights = sum(parameter.numel() for parameter in network.parameters())
        recipe, network = _start(asked, network, data)
        steps = total_steps(recipe, data)
        maker = AttemptMaker(
            recipe, asked.scheme, steps, weights, before, judge, asked.workers, lock, say
        )
        tried: list[AttemptResult] = []
        layers: list[LayerSensitivity] = []
        if asked.target is None:
            made, reached = maker.make(asked.folder), True
        else:
            layers = _sensitivities(asked, network, judge)
            say_layers(layers, judge.measure)
            rest = _rest_bytes(network, layers, asked.scheme)
            attempts: list[Attempt] = []
            while (aim := next_aim(asked.target, attempts, weights)) is not None:
                folder = asked.folder / f"{weights * BYTES_PER_WEIGHT / aim:.4g}x"
                tried.append(maker.make(folder, choose(layers, aim, rest)))
                lost = tried[-1].lost.held_out
                assert lost is not None  # checked by plan_compression
                attempts.append(Attempt(aim, tried[-1].report.num_bytes, lost))
            place, reached = best_of(asked.target, attempts, weights)
            made = tried[place]
        if reached:
            with atomic_replace(asked.out) as aside:
                shutil.copyfile(made.path, aside)
        return CompressionResult(
            asked, weights, before, made, tried, layers, reached, judge.measure
        )


def _start(asked: CompressRequest, network: nn.Module, data: Data) -> tuple[Recipe, nn.Module]:
    ranks = ranks_of(asked.scheme, network)
    if not ranks:
        return asked.recipe, network
    recipe = with_ranks(asked.recipe, ranks, write_start(network, ranks, asked.folder))
    return recipe, trained_network(recipe, data)


class SensitivityRow(TypedDict):
    name: str
    weights: Count
    keeps: dict[str, Real]
    bits: dict[str, Real]


class Sensitivities(TypedDict):
    layers: list[SensitivityRow]


def _sensitivities(
    asked: CompressRequest, network: nn.Module, judge: Evaluator
) -> list[LayerSensitivity]:
    path = asked.folder / "sensitivity.json"
    if path.exists():
        kept: Any = read_file(path, Sensitivities, RunError)
        try:
            return [LayerSensitivity.of_row(row) for row in kept["layers"]]
        except ValueError as error:
            raise RunError(f"{path}: {error}") from error
    prunes = asked.scheme.names_biases("prune", "keep")
    shares = asked.scheme.names_biases("share", "bits")
    layers = measure_layers(layers_of(network, prunes, shares), lambda: judge.tried(network))
    write_json(path, {"layers": [asdict(layer) for layer in layers]})
    return layers


def _rest_bytes(network: nn.Module, layers: Sequence[LayerSensitivity], scheme: Scheme) -> float:
    every: int = sum(tensor.numel() for tensor in network.state_dict().values())
    return HEADER_BYTES + (every - sum(layer.weights for layer in layers)) * scheme.biases / 8


def _claim(asked: CompressRequest) -> None:
    weights = find_weights(asked.recipe.model.weights)[0]
    wanted: dict[str, Any] = {
        "recipe": to_toml(asked.recipe.replace("run.folder", "")),
        "weights": f"sha256 {file_digest(weights)}",
        "scheme": json.loads(json.dumps(asdict(asked.scheme))),
    }
    what = "the rounds of another compression (another {})"
    claim_folder(asked.folder / "compress.json", wanted, what, "name")


def as_record(result: CompressionResult) -> dict[str, Any]:
    """Return one JSON object. Losses are in printed units: points of a share."""
    asked, whole = result.asked, result.weights * BYTES_PER_WEIGHT
    target = asked.target
    return {
        "network": asked.recipe.model.label,
        "from": asked.recipe.model.weights,
        "scheme": asked.scheme.name,
        "target": None if target is None else target.word,
        "reached": result.reached,
        "weights": result.weights,
        "float_bytes": whole,
        "metric": result.measure.name,
        "is_share": result.measure.is_share,
        "float": asdict(result.float_worth),
        **result.made.as_row,
        "file": str(asked.out if result.reached else result.made.path),
        "seconds_over_10_mbit_per_s": {
            "float": seconds(whole),
            "file": seconds(result.made.report.num_bytes),
        },
        "rounds": [{**asdict(trial), "folder": str(trial.folder)} for trial in result.made.rounds],
        "tensors": [tensor_row(tensor) for tensor in result.made.report.tensors],
        "tried": [made.as_row for made in result.tried],
        "sizes": sizes_in(asked.folder),
        "sensitivity": [asdict(layer) for layer in result.layers],
    }


def sizes_in(folder: Path) -> list[dict[str, Any]]:
    """Return all files of this network and scheme, for any target, by ratio. Raises RunError."""
    places = [path.parent for path in (*folder.glob("net.json"), *folder.glob("*/net.json"))]
    return sorted(
        (read_run_file(place, "net.json") for place in places), key=lambda row: row["ratio"]
    )


def tensor_row(tensor: TensorReport) -> dict[str, Any]:
    return {
        "name": tensor.name,
        "shape": list(tensor.shape),
        "size": tensor.size,
        "kept_share": tensor.kept / tensor.size if tensor.size else 0.0,
        "values": tensor.distinct,
        "bits": ceil(log2(tensor.distinct)) if tensor.distinct > 1 else 0,
        "bytes": tensor.num_bytes,
        "mask_bytes": tensor.mask_bytes,
        "symbol_bytes": tensor.symbol_bytes,
        "codebook_bytes": tensor.codebook_bytes,
        "floor_bytes": tensor.floor_bytes,
        "above_floor": tensor.num_bytes / tensor.floor_bytes - 1 if tensor.floor_bytes else 0.0,
    }
