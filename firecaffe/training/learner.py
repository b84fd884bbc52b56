"""The learner of this rank: network, task and optimizer, their state, and their probe."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

from firecaffe.cluster.agree import agree
from firecaffe.cluster.world import World
from firecaffe.data import Batches, Data
from firecaffe.errors import RecipeError
from firecaffe.gradients.probe import Probe, run_probe
from firecaffe.inventory.findings import Inventory
from firecaffe.models.config import ModelConfig
from firecaffe.models.freeze import Frozen, frozen_of
from firecaffe.models.network import maker_of
from firecaffe.models.weights import FirstWeights, outline_of
from firecaffe.recipe.run import Run
from firecaffe.recipe.sections import Recipe
from firecaffe.training.best import Best
from firecaffe.training.checkpoint import Checkpoint, check_identity, check_whole
from firecaffe.training.checks import check_coded, check_outputs
from firecaffe.training.choices import (
    Making,
    hold,
    make_mode,
    make_noise_meter,
    make_update,
    unheld_network,
)
from firecaffe.training.evaluation_weights import Norms, TrainedNorms, check_layers
from firecaffe.training.first_look import FirstLook
from firecaffe.training.first_weights import first_file
from firecaffe.training.forward import Forward, cost_of_determinism
from firecaffe.training.given_parts import Parts, task_for
from firecaffe.training.holdings.holding import Holding
from firecaffe.training.modes.mode import ModeParts
from firecaffe.training.noise_meter import NoiseMeter
from firecaffe.training.parallel.mesh import Mesh
from firecaffe.training.piece import Numbers
from firecaffe.training.shared_facts import doubt_of_data, doubt_of_weights, doubts_of, facts
from firecaffe.training.state import State
from firecaffe.training.updates.every_rank import EveryRank
from firecaffe.user_code import caffe_file, file_digest, find, is_caffe, is_reference, source_digest


def own_code(recipe: Recipe, parts: Parts) -> dict[str, str]:
    """Return the sha256 or version of code that is not firecaffe's own, by recipe section."""
    codes = {"model": "", "task": ""}
    if parts.model is None:
        codes["model"] = maker_of(recipe.model.name).code
    else:
        codes["model"] = source_digest(parts.model)
    loss = parts.loss if parts.task is None else parts.task.loss
    if loss is not None:
        codes["task"] = source_digest(loss)
    else:
        codes["task"] = _named("task.name", recipe.task.name)
    codes["data"] = _named("data.name", recipe.data.name)
    codes["solver"] = _named("solver.type", recipe.solver.type)
    return {section: code for section, code in codes.items() if code}


def _named(word: str, name: str) -> str:
    if is_caffe(name):
        return file_digest(caffe_file(word, name))
    return source_digest(find(word, name)) if is_reference(name) else ""


@dataclass(frozen=True)
class Findings:
    """Facts about a training's network, weights and code, for people and the run's record."""

    num_parameters: int
    """The elements of all parameters of the whole network."""
    own_code: dict[str, str]
    frozen: Frozen
    first_weights: FirstWeights | None
    damaged: list[str]
    """Why newer checkpoints of the run that `model.weights` names were not used."""
    inventory: Inventory | None
    """Facts about the network; None if layers or stages are split among ranks."""
    cost_of_determinism: float | None
    """A micro-batch's time with deterministic kernels over that without; None if not measured."""

    @property
    def row(self) -> dict[str, Any]:
        return {
            "frozen_parameters": len(self.frozen.names),
            "first_weights": self.first_weights and self.first_weights.as_dict(),
            "inventory": self.inventory and self.inventory.row,
            "cost_of_determinism": self.cost_of_determinism,
        }

    def notes(self, model: ModelConfig) -> list[str]:
        """Return lines for people."""
        notes = list[str]()
        if self.first_weights is not None:
            notes += [f"warning: {why}; an older checkpoint is taken" for why in self.damaged]
            notes.append(self.first_weights.line)
        elif model.weights:
            notes.append(f"model.weights {model.weights} is not read: the run is resumed")
        notes += self.frozen.notes(model)
        return notes + ([] if self.inventory is None else self.inventory.notes)


@dataclass(frozen=True)
class Learner:
    """The parts that learn, built the same way on all ranks and loaded from any checkpoint."""

    holding: Holding
    update: EveryRank
    mode: ModeParts
    state: State
    best: Best
    norms: TrainedNorms | Norms
    """The BatchNorm statistics of evaluations."""
    noise: NoiseMeter
    batches: Batches
    probe: Probe
    """This machine's results for the training's first micro-batch."""
    doubts: list[str]
    """Reasons why other numbers of workers may not end in the same bits; more may follow."""
    findings: Findings


def build_learner(
    run: Run,
    parts: Parts,
    data: Data,
    mesh: Mesh,
    checkpoint: Checkpoint | None,
    unlike: Sequence[str],
    resources: ExitStack,
    served_learners: int = 0,
) -> Learner:
    """Build this rank's learner; every rank calls it. unlike: unrepeatable parts of the data.

    served_learners: a server's at the beginning. Raises: RecipeError, AgreementError,
    CheckpointError.
    """
    recipe, world = run.recipe, mesh.world
    unheld = unheld_network(run, parts, data, world)
    if recipe.train.batch_norm_samples:
        check_layers(unheld.outline, recipe.train.batch_norm_samples)
    file, code = first_file(recipe, checkpoint), own_code(recipe, parts)
    agree(world, facts(recipe, world, data, unheld.outline, checkpoint, unlike, code, file.sha256))
    outline = outline_of(unheld.outline)  # of the whole network, before it is split
    batches = Batches(data.train, run.order, recipe.data, world.device)
    task = task_for(recipe, parts.loss, parts.task, data.train)
    holding = hold(Making(unheld, run, task, batches, mesh, resources))
    _check_trained(recipe, holding)
    doubts = [*map(doubt_of_data, unlike), *doubt_of_weights(holding.take_first_weights())]
    # Before weights are read, so that the probe's digest compares with the first run's.
    look = FirstLook(holding.forward, run.keeps_frozen)  # watches the forwards that follow, too
    check_outputs(holding.forward, batches, recipe, parts.has_own_task, holding.try_outputs)
    inventory = holding.look_around(look, batches)
    probe, cost = _probe(recipe, holding, batches, mesh)
    delayed = recipe.synchrony.delayed_updates(served_learners)
    update = make_update(run, holding, probe, mesh, delayed)
    mode, best = make_mode(run, update, mesh, served_learners), Best(task.measure)
    norms = _norms(recipe, holding, batches)
    noise = make_noise_meter(run, update, mode)
    state = _state_of(world, holding, update, mode, norms, {"best": best, "noise": noise})
    first_weights = file.read_into(state, outline)
    doubts += _begin(run, update, state, checkpoint)
    doubts += doubts_of(run, world, probe, checkpoint)
    doubts += [] if inventory is None else inventory.doubts
    frozen = frozen_of(holding.all_names, recipe.model, first_weights, checkpoint is not None)
    taken = frozen, first_weights, file.damaged
    findings = Findings(unheld.num_parameters, code, *taken, inventory, cost)
    doubts = list(dict.fromkeys(doubts))
    made = holding, update, mode, state, best, norms, noise, batches, probe
    return Learner(*made, doubts, findings)


def _check_trained(recipe: Recipe, holding: Holding) -> None:
    if not holding.everywhere:
        raise RecipeError(f"model.name {recipe.model.name!r} has no parameter to train")
    if recipe.exchange.codec:
        check_coded(recipe, holding.everywhere)


def _probe(
    recipe: Recipe, holding: Holding, batches: Batches, mesh: Mesh
) -> tuple[Probe, float | None]:
    forward, world = holding.forward, mesh.world
    backward, reference = (
        partial(holding.first_backward, batches.train_batch(0, 0)),
        holding.reference(),
    )
    probe = run_probe(forward.buffers, holding.named, backward, world, mesh.column, reference)
    is_timed = world.device.type == "cuda" and recipe.train.deterministic
    return probe, _cost_of_determinism(forward, backward) if is_timed else None


def _norms(recipe: Recipe, holding: Holding, batches: Batches) -> TrainedNorms | Norms:
    samples = recipe.train.batch_norm_samples
    return Norms(holding, batches, samples) if samples else TrainedNorms()


def _begin(run: Run, update: EveryRank, state: State, checkpoint: Checkpoint | None) -> list[str]:
    doubts = list[str]()
    if checkpoint is not None:
        check_identity(checkpoint, dict(run.deciding), run.steps)
        check_whole(checkpoint, run.rounds)
        state.load(checkpoint)
    elif update.applier.constraints:
        update.constrain()
        doubts = doubt_of_weights(state.take_from_first())
    state.begin()
    return doubts


def _state_of(
    world: World,
    holding: Holding,
    update: EveryRank,
    mode: ModeParts,
    norms: TrainedNorms | Norms,
    others: dict[str, Numbers],
) -> State:
    pieces = holding.pieces() | update.pieces() | mode.pieces() | norms.pieces()
    numbers: dict[str, Numbers] = {"scalars": update.numbers(), "scaler": holding.forward.scaler}
    return State(world, pieces, numbers | mode.numbers() | others)


def _cost_of_determinism(forward: Forward, micro_batch: Callable[[], object]) -> float:
    buffers = [buffer.clone() for buffer in forward.model.buffers()]
    cost = cost_of_determinism(micro_batch)
    for buffer, start in zip(forward.model.buffers(), buffers, strict=True):
        buffer.copy_(start)
    forward.model.zero_grad()
    return cost
