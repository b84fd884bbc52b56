"""The learner of this rank: network, task and optimizer, their state, and their probe.

It is built first. Connecting it then makes its reducers, and the object that runs its steps.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, replace
from typing import Any

from torch import Tensor, nn

from firecaffe.cluster.agree import agree
from firecaffe.cluster.groups import group_of_one
from firecaffe.cluster.world import World
from firecaffe.data import Batches, Data
from firecaffe.data.batches import PrefetchedBatches
from firecaffe.data.dataset import map_batch
from firecaffe.errors import RecipeError
from firecaffe.exchange import AUTO
from firecaffe.files import sha256_of
from firecaffe.gradients.bucket_sums import Hook
from firecaffe.gradients.buckets import cut
from firecaffe.gradients.probe import Probe, run_probe
from firecaffe.gradients.reducer import GradientReducer
from firecaffe.inventory.attributes import attributes_of, carried_over
from firecaffe.inventory.findings import Inventory, doubts_of_network
from firecaffe.inventory.network_state import ForwardWatch
from firecaffe.inventory.world_queries import doubts_of_world, world_queries
from firecaffe.models import ModelConfig
from firecaffe.models.network import Frozen, frozen_of, maker_of
from firecaffe.models.weights import FirstWeights, outline_of
from firecaffe.recipe.checked_recipe import CheckedRecipe
from firecaffe.recipe.run import Ranks, Run, resolve
from firecaffe.recipe.sections import Recipe
from firecaffe.recipe.worker_numbers import layout_of
from firecaffe.synchrony.log import LogReader
from firecaffe.training.best import Best
from firecaffe.training.checkpoint import Checkpoint, check_identity, check_whole
from firecaffe.training.checks import check_float32, check_not_float16, check_outputs
from firecaffe.training.choices import (
    Making,
    hold,
    make_mode,
    make_noise_meter,
    make_unsplit,
    make_update,
)
from firecaffe.training.data_workers import data_workers
from firecaffe.training.evaluation_weights import Norms, TrainedNorms, check_layers
from firecaffe.training.first_look import FirstLook, is_repeatable, raise_first
from firecaffe.training.forward import Forward, arithmetic, cost_of_determinism
from firecaffe.training.given_parts import Parts, open_parts, task_for
from firecaffe.training.holdings.holding import Holding
from firecaffe.training.load import first_weights_file
from firecaffe.training.modes.every_step import EveryStep
from firecaffe.training.modes.mode import Linked, ModeParts, ReducerSpec, Steps
from firecaffe.training.outcome import NoiseMeter
from firecaffe.training.parallel.mesh import Mesh, make_mesh
from firecaffe.training.piece import Numbers
from firecaffe.training.plugins import Plugin, around_batches
from firecaffe.training.shared_facts import (
    describe_training,
    doubt_of_data,
    doubt_of_weights,
    doubts_of,
    facts,
)
from firecaffe.training.state import State
from firecaffe.training.updates.every_rank import EveryRank
from firecaffe.training.updates.spread import ScalerNumbers
from firecaffe.transport.auto_exchange import AutoChoice, choose_exchange
from firecaffe.transport.exchange import Exchange
from firecaffe.transport.local_ranks import LocalRanks, meet_local_ranks
from firecaffe.user_code import caffe_file, find, is_caffe, is_reference, source_digest


def own_code(recipe: Recipe, parts: Parts) -> dict[str, str]:
    """Return the sha256 or version of code that is not firecaffe's own, by recipe section."""
    model, loss = parts.model, parts.loss if parts.task is None else parts.task.loss
    named_model, named_task = recipe.model.name, recipe.task.name
    codes = {
        "model": maker_of(named_model).code if model is None else source_digest(model),
        "task": _named("task.name", named_task) if loss is None else source_digest(loss),
        "data": _named("data.name", recipe.data.name),
        "solver": _named("solver.type", recipe.solver.type),
    }
    return {section: code for section, code in codes.items() if code}


def _named(word: str, name: str) -> str:
    if is_caffe(name):
        return sha256_of(caffe_file(word, name))
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
    dropped: Sequence[str] = ()
    """The buffers that backward changes. These changes are dropped."""

    @property
    def row(self) -> dict[str, Any]:
        return {
            "frozen_parameters": len(self.frozen.names),
            "first_weights": self.first_weights and asdict(self.first_weights),
            "inventory": self.inventory and self.inventory.row,
            "cost_of_determinism": self.cost_of_determinism,
        }

    def notes(self, model: ModelConfig) -> list[str]:
        notes = list[str]()
        if self.first_weights is not None:
            notes += [f"warning: {why}; an older checkpoint is taken" for why in self.damaged]
            notes.append(self.first_weights.line)
        elif model.weights:
            notes.append(f"model.weights {model.weights} is not read: the run is resumed")
        notes += self.frozen.notes(model)
        notes += [
            f"warning: backward changes the buffer {name}, which is dropped: a step keeps what "
            "forward changes"
            for name in self.dropped
        ]
        return notes + ([] if self.inventory is None else self.inventory.notes)


@dataclass(frozen=True)
class Learner:
    """The parts that learn, built the same way on all ranks and loaded from any checkpoint."""

    data: Data
    mesh: Mesh
    """The ranks at the beginning; `state.world` has those that are left."""
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
    served_learners: int,
) -> Learner:
    """Build this rank's learner. Raises: RecipeError; AgreementError; CheckpointError.

    All ranks call it. unlike: parts of the data that do not repeat. served_learners: with how many
    a server begins; 0 without one.
    """
    recipe, world = run.recipe, mesh.world
    with world_queries() as asked:
        unsplit = make_unsplit(run, parts, data, world)
    if (samples := recipe.train.batch_norm_samples) > 0:
        check_layers(unsplit.outline, samples)
    file, code = first_weights_file(recipe, checkpoint), own_code(recipe, parts)
    agree(world, facts(recipe, world, data, unsplit.outline, checkpoint, unlike, code, file.sha256))
    outline = outline_of(unsplit.outline)  # of the whole network, before it is split
    batches = Batches(data.train, run.order, recipe.data, world.device)
    task = task_for(recipe, parts.loss, parts.task, data.train)
    holding = hold(Making(unsplit, run, task, batches, mesh, resources))
    _check_trained(recipe, holding.everywhere)
    doubts = [*map(doubt_of_data, unlike), *doubt_of_weights(holding.take_first_weights())]
    doubts += doubts_of_world("the network's constructor", asked)
    # Before weights are loaded, so that the probe's digest can be compared with the first run's.
    look = FirstLook(holding.forward, run.keeps_frozen)  # watches the forwards that follow, too
    check_outputs(holding.forward, batches, recipe, parts.has_own_task, holding.try_outputs)
    inventory = holding.examine(look, batches)
    probe, carried, cost = _probe(recipe, holding, batches, mesh)
    delayed = recipe.synchrony.delayed_updates(served_learners)
    update = make_update(run, holding, probe, mesh, delayed)
    mode, best = make_mode(run, update, mesh, served_learners), Best(task.measure)
    norms = Norms(holding, batches, samples) if samples else TrainedNorms()
    noise = make_noise_meter(run, update, mode)
    pieces = holding.pieces() | update.pieces() | mode.pieces() | norms.pieces()
    numbers = _numbers(holding, update) | {"best": best, "noise": noise} | mode.numbers()
    state = State(world, pieces, numbers)
    first_weights = file.read_into(state, outline)
    doubts += _begin(run, update, state, checkpoint)
    doubts += doubts_of(run, world, probe, checkpoint)
    doubts += doubts_of_network(inventory, carried, probe.repeats)
    findings = Findings(
        num_parameters=unsplit.num_parameters,
        own_code=code,
        frozen=frozen_of(holding.all_names, recipe.model, first_weights, checkpoint is not None),
        first_weights=first_weights,
        damaged=file.damaged,
        inventory=inventory,
        cost_of_determinism=cost,
        dropped=holding.changed_in_backward,
    )
    why = list(dict.fromkeys(doubts))
    return Learner(
        data, mesh, holding, update, mode, state, best, norms, noise, batches, probe, why, findings
    )


def _check_trained(recipe: Recipe, trained: Mapping[str, nn.Parameter]) -> None:
    if not trained:
        raise RecipeError(f"model.name {recipe.model.name!r} has no parameter to train")
    check_not_float16(recipe, trained)
    if recipe.exchange.codec:
        check_float32(recipe, trained)


def _numbers(holding: Holding, update: EveryRank) -> dict[str, Numbers]:
    return {"scaler": ScalerNumbers(holding.forward.scaler), "scalars": update.numbers()}


def _probe(
    recipe: Recipe, holding: Holding, batches: Batches, mesh: Mesh
) -> tuple[Probe, list[str], float | None]:
    forward, world = holding.forward, mesh.world
    first, reference = batches.train_batch(0, 0), holding.reference()

    def backward() -> Tensor | None:
        return holding.first_backward(map_batch(Tensor.clone, first))

    def watched() -> Tensor | None:
        loss = backward()
        attributes.append(attributes_of(forward.model))
        return loss

    watch, is_exact = ForwardWatch(forward.model), is_repeatable(forward)
    attributes = [attributes_of(forward.model)]
    probe = run_probe(
        buffers=forward.buffers,
        named=holding.named,
        backward=watched,
        world=world,
        column=mesh.column,
        beside=reference,
        twice=is_exact,
    )
    raise_first(world, watch.line_after_backward())
    carried = carried_over(*attributes) if is_exact else []
    is_timed = world.device.type == "cuda" and recipe.train.deterministic
    return probe, carried, _cost_of_determinism(forward, backward) if is_timed else None


def _begin(run: Run, update: EveryRank, state: State, checkpoint: Checkpoint | None) -> list[str]:
    doubts = list[str]()
    if checkpoint is not None:
        check_identity(checkpoint, dict(run.deciding), run.steps)
        check_whole(checkpoint, run.rounds)
        state.load(checkpoint)
    elif update.applier.constraints:
        update.constrain()
        doubts = doubt_of_weights(state.copy_from_first())
    state.begin()
    return doubts


def _cost_of_determinism(forward: Forward, micro_batch: Callable[[], object]) -> float:
    buffers = [buffer.clone() for buffer in forward.model.buffers()]
    cost = cost_of_determinism(micro_batch)
    for buffer, start in zip(forward.model.buffers(), buffers, strict=True):
        buffer.copy_(start)
    forward.model.zero_grad()
    return cost


def build_alone(
    recipe: CheckedRecipe, parts: Parts, world: World, learners: int, resources: ExitStack
) -> tuple[Run, Learner]:
    """Build a learner at its beginning on this process alone. Raises: as `build_learner`."""
    resources.enter_context(arithmetic(recipe.train, world.device))
    data = open_parts(recipe, parts)
    run = resolve(recipe, data, Ranks(), described=describe_training(recipe, data))
    mesh = make_mesh(world, layout_of(recipe.parallel, 1), resources)
    return run, build_learner(run, parts, data, mesh, None, (), resources, learners)


def connect(
    run: Run,
    learner: Learner,
    summed: Sequence[ReducerSpec],
    resources: ExitStack,
    hook: tuple[object, Hook] | None = None,
) -> tuple[Run, list[GradientReducer], AutoChoice | None]:
    """Make one reducer for each of `summed`. All ranks call it. Raises: PeerLostError.

    Also returns the run with the exchange that is used, and what `auto` chose, if it was asked.
    """
    config, world = run.recipe.exchange, learner.mesh.sharers
    local: LocalRanks | None = None
    if run.route.shares_memory:
        local = meet_local_ranks(world, config.timeout_s)
    if local is None:
        run = replace(run, ranks=replace(run.ranks, share_memory=False))
    else:
        resources.callback(local.close)  # in case no exchange is made that closes it
    named, order_of = learner.holding.named, learner.probe.order_of
    orders = [order_of(named, part.named) for part in summed]
    choice = None
    if run.algorithm == AUTO and run.has_exchange:
        buckets = list[int]()
        for part, order in zip(summed, orders, strict=True):
            tensors = list(part.named.values())
            sizes = [tensors[place].nbytes for place in order]
            buckets += [sum(sizes[start:stop]) for start, stop in cut(sizes, config.bucket_bytes)]
        choice = choose_exchange(world, buckets, run.route)
        run = replace(run, algorithm=choice.algorithm)
    if hook is not None and world.group is None:
        resources.enter_context(group_of_one(world.device))
    exchange = resources.enter_context(closing(Exchange(world, run.route, local)))
    reducers = [
        resources.enter_context(
            GradientReducer(
                parameters=part.named,
                ready_order=order,
                tail=part.tail,
                counts=part.counts,
                num_leaves=run.num_leaves,
                exchange=exchange,
                bucket_bytes=config.bucket_bytes,
                hook=hook,
                shards=learner.update.shards,
            )
        )
        for part, order in zip(summed, orders, strict=True)
    ]
    for place, reducer in enumerate(reducers):
        if reducer.memory is not None:
            name = "compressor" if len(reducers) == 1 else f"compressor-{place}"
            learner.state.add(name, learner.holding.memory(reducer.memory))
    learner.state.check_all_loaded()
    return run, reducers, choice


def make_steps(
    run: Run,
    learner: Learner,
    reducers: Sequence[GradientReducer],
    plugins: Sequence[Plugin],
    first_step: int,
    is_repeatable: bool,
    resources: ExitStack,
    source: LogReader | None = None,
) -> Steps:
    """Build the steps; every rank calls it. first_step: the step to resume from.

    reducers: those of `mode.summed()`. is_repeatable: whether training data repeat; if they turn
    out not to, the learner gets doubts. source: a log of a server's events, in place of its clock.
    """
    holding, mode, mesh = learner.holding, learner.mode, learner.mesh
    first = mode.first_run(run, first_step)
    leaves = first.micro_batches(mesh.sharers.rank)
    fetched = leaves if holding.has_inputs else []
    late_doubts = learner.doubts if is_repeatable else None
    last = mode.prefetch_end(run)
    ahead = PrefetchedBatches(learner.batches, fetched, first_step, last, late_doubts)
    resources.enter_context(closing(ahead))
    resources.enter_context(data_workers(learner.data))  # closed first: nobody waits for them then
    sums = reducers[0]
    if first is not run:  # steps of another mode come first
        _, [sums], _ = connect(first, learner, ModeParts(learner.update).summed(), resources)
    update = learner.update.connect(sums)
    in_order = around_batches(plugins, ahead, mesh.world)
    return mode.steps(
        Linked(
            run=run,
            mesh=mesh,
            step=EveryStep(holding, update, in_order, leaves, run.momentum, learner.noise.is_due),
            reducers=reducers,
            ahead=ahead,
            batches=around_batches(plugins, learner.batches, mesh.world),
            state=learner.state,
            probe=learner.probe.digest,
            resources=resources,
            source=source,
        )
    )
