"""The learner of this rank: network, task and optimizer, their state, and their probe."""

from collections.abc import Callable, Container, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn, optim

from firecaffe.cluster.agree import agree
from firecaffe.data import Batch, Batches, Data
from firecaffe.errors import RecipeError
from firecaffe.gradients.codec_memory import CodecMemory
from firecaffe.gradients.probe import Probe, run_probe
from firecaffe.gradients.shards import Shards, make_shards
from firecaffe.models.weights import FirstWeights, file_digest, outline_of, read_weights
from firecaffe.parallel.own_samples import OwnSamples
from firecaffe.recipe.run import Run
from firecaffe.recipe.update_at import needs_norms
from firecaffe.solvers.layer_rates import LayerRates
from firecaffe.solvers.optimizer import make_optimizer
from firecaffe.synchrony.config import EVERY_STEP, LOCAL
from firecaffe.training.arithmetic import cost_of_determinism
from firecaffe.training.best import Best
from firecaffe.training.checkpoint import Checkpoint, check_identity, check_whole
from firecaffe.training.checks import check_coded, check_outputs
from firecaffe.training.constraint import Constraint, make_constraints
from firecaffe.training.ema import Ema
from firecaffe.training.facts import doubt_of_data, doubt_of_weights, doubts_of, facts
from firecaffe.training.first_weights import find_weights
from firecaffe.training.forward import Forward
from firecaffe.training.given_task import task_for
from firecaffe.training.local.make import Local, make_local
from firecaffe.training.mix import mixing_of
from firecaffe.training.norms import NORMS, Norms, check_layers
from firecaffe.training.own_code import own_code
from firecaffe.training.parallel.coded import MemoryInParts, PartCodec
from firecaffe.training.parallel.fresh import FreshNetwork
from firecaffe.training.parallel.mesh import Mesh
from firecaffe.training.parallel.network import SplitNetwork, split_network
from firecaffe.training.parallel.pieces import InParts
from firecaffe.training.parallel.reference import reference_gradients
from firecaffe.training.parallel.shards import hold_shards
from firecaffe.training.parallel.stage_forward import StageForward
from firecaffe.training.parallel.staged import StagedNetwork, cut_network
from firecaffe.training.parallel.step import stand_in_of
from firecaffe.training.parallel.words import in_words_of
from firecaffe.training.parts import Parts, build_network
from firecaffe.training.piece import Piece
from firecaffe.training.rise import Rise
from firecaffe.training.served.make import Served, make_served
from firecaffe.training.served.stepper import delayed_updates
from firecaffe.training.served.unsent import FeedbackEncoder
from firecaffe.training.state import WEIGHTS, State, state_of
from firecaffe.training.stored import InMemory
from firecaffe.training.weights import take_rows


@dataclass(frozen=True)
class Learner:
    """The parts that learn, built alike on all ranks and loaded from the checkpoint, if there is
    one.
    """

    forward: Forward
    named: dict[str, nn.Parameter]
    """The parameters that are trained."""
    optimizer: optim.Optimizer
    state: State
    ema: Ema | None
    """The moving average of the weights, if one is kept."""
    constraints: list[Constraint]
    """What the weights have to obey, in the order in which they act."""
    served: Served | None
    """What a mode of [synchrony] with a server has beside; None without one."""
    local: Local | None
    """What mode local has beside; None in others."""
    best: Best
    norms: Norms | None
    """The BatchNorm statistics that evaluations take; None if they take the training's own."""
    rise: Rise | None
    """What sees a loss that stays above its start; None in every_step."""
    batches: Batches
    stand_in: Batch
    """Samples for a rank that has none where others wait for it; see `parallel.step`."""
    probe: Probe
    split: SplitNetwork | StagedNetwork | None
    """What a model has beside that is split, or in stages; None if it is not."""
    part_codec: PartCodec | None
    """What encodes gradients of parts by themselves; None if nothing does, or they go with those of
    other parameters."""
    stage: StageForward | None
    """This rank's, if the network is in stages."""
    shards: Shards | None
    """Of the update, if each rank updates a shard of the weights."""
    all_names: list[tuple[str, nn.Parameter]]
    """The whole network's parameters by all their names; those of other stages on the meta device.
    """
    doubts: list[str]
    """Reasons why other numbers of workers may not end in the same bits."""
    cost_of_determinism: float | None
    """The ratio of a micro-batch's time to that without deterministic kernels; None on a CPU."""
    own_code: dict[str, str]
    """What tells a user's code from other code; see `own_code`."""
    first_weights: FirstWeights | None
    """What was taken from `model.weights`; None if nothing was."""
    damaged: list[str]
    """Why newer checkpoints of the run that `model.weights` names were not taken."""

    @property
    def own_samples(self) -> OwnSamples | None:
        """The row, if its ranks have samples of their own."""
        return self.split.own_samples if isinstance(self.split, SplitNetwork) else None

    @property
    def summed(self) -> dict[str, nn.Parameter]:
        """The parameters whose gradients are summed over those that share out micro-batches."""
        if not isinstance(self.split, SplitNetwork) or self.own_samples is None:
            return self.named
        parts = self.split.parameters | self.split.biases
        return {name: each for name, each in self.named.items() if each not in parts}

    def memory_of(self, memory: CodecMemory) -> Piece:
        """What a compressor keeps back, as a piece of the state. memory: that of `summed`."""
        if self.split is None:
            return memory
        memories: list[tuple[Container[str], CodecMemory]] = [(self.summed, memory)]
        if self.part_codec is not None:
            memories.append((self.part_codec.names, self.part_codec.memory))
        return MemoryInParts(memories, self.split.names)

    def ready_order(self, part: Mapping[str, nn.Parameter]) -> list[int]:
        """The places in a part of `named`, in the order in which backward finishes gradients."""
        names, place_of = list(self.named), {name: place for place, name in enumerate(part)}
        in_order = (names[index] for index in self.probe.ready_order)
        return [place_of[name] for name in in_order if name in place_of]


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
    """Builds this rank's learner; every rank calls it. unlike: the parts of the data that are not
    repeatable. resources: takes what has to be closed. served_learners: how many a server has at
    the beginning.

    Raises: RecipeError, AgreementError, CheckpointError.
    """
    recipe, world = run.recipe, mesh.world
    fresh: FreshNetwork | None = None
    if recipe.parallel.is_split or recipe.parallel.stages:
        fresh = FreshNetwork(recipe, parts, data.train)
        model = fresh.outline
    else:
        model = build_network(recipe, parts, data.train, world.device)
    if recipe.train.batch_norm_samples:
        check_layers(model, recipe.train.batch_norm_samples)
    weights, damaged = "", list[str]()
    if checkpoint is None and recipe.model.weights:
        weights, damaged = find_weights(recipe.model.weights)
    weights_sha256 = file_digest(weights) if weights else "none"
    code = own_code(recipe, parts)
    agree(world, facts(recipe, world, data, model, checkpoint, unlike, code, weights_sha256))
    outline = outline_of(model)  # of the whole network, which a split takes apart
    split: SplitNetwork | None = None
    staged: StagedNetwork | None = None
    with in_words_of(recipe.parallel):
        if fresh is not None and recipe.parallel.is_split:
            exchange = recipe.exchange
            model, split = split_network(fresh, recipe.parallel, mesh, exchange, resources)
        elif fresh is not None:
            model, staged = cut_network(fresh, recipe.parallel, mesh)
    held = split or staged
    called = str if held is None else held.called
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    # A stage may have nothing that is trained. Patterns of names are those of the whole network.
    of_all = named if staged is None else staged.trained()
    if split is not None:
        of_all = {**named, **split.outlines}
    if not of_all:
        raise RecipeError(f"model.name {recipe.model.name!r} has no parameter to train")
    part_codec: PartCodec | None = None
    if recipe.exchange.codec:
        check_coded(recipe, of_all, parts.comm_hook is not None)
    if recipe.exchange.codec and split is not None and split.own_samples is not None:
        in_parts = {name: each for name, each in named.items() if each in split.parameters}
        if in_parts:
            codec = run.num_leaves, run.route.codec, run.route.level
            part_codec = PartCodec(in_parts, mesh.column, *codec)
            resources.enter_context(closing(part_codec))
    optimizer = make_optimizer(
        of_all, recipe.solver, delayed_updates(recipe.synchrony, served_learners), called=called
    )
    if split is not None and isinstance(optimizer, LayerRates):
        optimizer.norms = split.norms
    state = state_of(world, model, optimizer)
    ema: Ema | None = None
    if recipe.train.ema_decay:
        ema = Ema(named, recipe.train.ema_decay, recipe.train.ema_warmup)
        state.pieces["ema"] = ema.piece
    constraints = make_constraints(recipe, model)
    for each in constraints:
        state.pieces |= each.pieces
    if held is not None:
        held.cut_pieces(state)
    others = state.take_from_first() if held is None else held.other_weights
    doubts = [*map(doubt_of_data, unlike), *doubt_of_weights(others)]
    batches = Batches(data.train, run.order, recipe.data, world.device)
    task = task_for(recipe, parts.loss, parts.task, data.train)
    places = model if staged is None else staged.module
    mixing, is_split = mixing_of(recipe.data, recipe.train.seed), recipe.parallel.is_split
    forward = Forward(places, task, recipe.train, mixing, is_split, world.device)
    stage: StageForward | None = None
    if staged is not None:
        stage = StageForward(forward, staged, run.order)
        resources.callback(stage.close)
    served: Served | None = None
    if recipe.synchrony.is_served:
        served = make_served(run, forward, named, optimizer, ema, served_learners)
        state.pieces["server"] = served.memory
        if isinstance(served.coder, FeedbackEncoder) and served.real is None:
            state.pieces["compressor"] = served.coder
        state.numbers["synchrony"] = served
    norms: Norms | None = None
    if recipe.train.batch_norm_samples:
        run_of = None if stage is None else stage.training_outputs
        norms = Norms(model, forward, batches, recipe.train.batch_norm_samples, ema, run_of)
        state.pieces[NORMS] = norms.piece if held is None else InParts(norms.piece, held.names)
    local: Local | None = None
    if recipe.synchrony.mode == LOCAL:
        local = make_local(run, mesh.sharers.rank, forward, model, of_all, held)
        state.pieces |= local.pieces(held)
    best = Best(task.measure)
    state.numbers |= {"scaler": forward.scaler, "best": best}
    rise: Rise | None = None
    if recipe.synchrony.mode != EVERY_STEP:
        rise = Rise()
        state.numbers["rise"] = rise
    # Before weights are read, so that its digest compares with the first run's.
    is_own = parts.loss is not None or parts.task is not None
    outputs_of = None if stage is None else stage.try_outputs
    check_outputs(forward, batches, recipe, data.train, is_own, outputs_of)
    first = batches.train_batch(0, 0)
    stand_in = stand_in_of(first)
    first_backward: Callable[[], Tensor | None] = partial(_first_backward, forward, first)
    if stage is not None:
        first_backward = partial(stage.first_backward, lambda _: first)
    beside = {} if held is None else reference_gradients(forward)
    probe = run_probe(places, named, first_backward, world, mesh.column, beside)
    shards: Shards | None = None
    if run.route.to_owners:
        buckets = named, probe.ready_order, recipe.exchange.bucket_bytes
        is_whole = needs_norms(recipe.solver)
        shards = make_shards(*buckets, world.world_size, world.rank, is_whole)
        optimizer = make_optimizer(named, recipe.solver, runs=shards.own)
        if ema is not None:
            ema = Ema(shards.own, recipe.train.ema_decay, recipe.train.ema_warmup)
        hold_shards(state, model, shards, optimizer, ema)
    cost = None
    is_timed = world.device.type == "cuda" and recipe.train.deterministic and stage is None
    if is_timed:
        cost = _cost_of_determinism(forward, first)
    first_weights: FirstWeights | None = None
    if weights:
        first_weights, fitting = read_weights(outline, weights, weights_sha256)
        for piece in WEIGHTS:
            parts_here = state.pieces[piece].parts()
            for name in fitting.keys() & parts_here.keys():
                take_rows(parts_here[name], InMemory(fitting), name)
    if constraints and checkpoint is None:
        for each in constraints:
            each.begin()
        doubts += doubt_of_weights(state.take_from_first())
    if checkpoint is not None:
        check_identity(checkpoint, dict(run.deciding), run.steps)
        check_whole(checkpoint, run.rounds)
        state.load(checkpoint)
    doubts += doubts_of(recipe, world, run.route, probe, checkpoint)
    once = list(dict.fromkeys(doubts))
    return Learner(
        forward=forward,
        named=named,
        optimizer=optimizer,
        state=state,
        ema=ema,
        constraints=constraints,
        served=served,
        local=local,
        best=best,
        norms=norms,
        rise=rise,
        batches=batches,
        stand_in=stand_in,
        probe=probe,
        split=held,
        part_codec=part_codec,
        stage=stage,
        shards=shards,
        all_names=list(model.named_parameters(remove_duplicate=False))
        if staged is None
        else staged.tied,
        doubts=once,
        cost_of_determinism=cost,
        own_code=code,
        first_weights=first_weights,
        damaged=damaged,
    )


def _first_backward(forward: Forward, first: Batch) -> Tensor:
    """Runs backward for the training's first micro-batch, which every rank can compute. Returns its
    loss.
    """
    forward.begin_step()
    loss, _ = forward(*first, step=0, leaf=0)
    assert loss is not None  # the first micro-batch of an epoch is never empty
    torch.autograd.backward(loss)
    return loss


def _cost_of_determinism(forward: Forward, first: Batch) -> float:
    buffers = [buffer.clone() for buffer in forward.model.buffers()]
    cost = cost_of_determinism(partial(_first_backward, forward, first))
    for buffer, start in zip(forward.model.buffers(), buffers, strict=True):
        buffer.copy_(start)
    forward.model.zero_grad()
    return cost
