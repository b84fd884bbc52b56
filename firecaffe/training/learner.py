"""The learner of this rank: network, task and optimizer, their state, and their probe."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn, optim

from firecaffe.cluster.agree import agree
from firecaffe.data import Batch, Batches, Data
from firecaffe.errors import RecipeError
from firecaffe.gradients.probe import Probe, run_probe
from firecaffe.models.weights import FirstWeights, file_digest, load_weights
from firecaffe.parallel.own_samples import OwnSamples
from firecaffe.recipe.run import Run
from firecaffe.solvers.optimizer import make_optimizer
from firecaffe.synchrony.config import EVERY_STEP, LOCAL
from firecaffe.training.arithmetic import cost_of_determinism
from firecaffe.training.best import Best
from firecaffe.training.checkpoint import Checkpoint, check_identity, check_whole
from firecaffe.training.checks import check_coded, check_outputs
from firecaffe.training.ema import Ema
from firecaffe.training.facts import doubt_of_data, doubt_of_weights, doubts_of, facts
from firecaffe.training.first_weights import find_weights
from firecaffe.training.forward import Forward
from firecaffe.training.given_task import task_for
from firecaffe.training.local.make import Local, make_local
from firecaffe.training.mix import mixing_of
from firecaffe.training.norms import NORMS, Norms
from firecaffe.training.own_code import own_code
from firecaffe.training.parallel.mesh import Mesh
from firecaffe.training.parallel.network import SplitNetwork, split_network
from firecaffe.training.parallel.stage_forward import StageForward
from firecaffe.training.parallel.staged import StagedNetwork, cut_network
from firecaffe.training.parallel.step import stand_in_of
from firecaffe.training.parts import Parts, build_network
from firecaffe.training.rise import Rise
from firecaffe.training.served.make import Served, make_served
from firecaffe.training.served.stepper import delayed_updates
from firecaffe.training.served.unsent import FeedbackEncoder
from firecaffe.training.state import State, state_of
from firecaffe.training.stored import InMemory


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
    stage: StageForward | None
    """This rank's, if the network is in stages."""
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
        return None if self.split is None else self.split.own_samples

    @property
    def summed(self) -> dict[str, nn.Parameter]:
        """The parameters whose gradients are summed over those that share out micro-batches."""
        if self.split is None or self.own_samples is None:
            return self.named
        parts = self.split.parameters
        return {name: each for name, each in self.named.items() if each not in parts}

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
    model = build_network(recipe, parts, data.train, world.device)
    split: SplitNetwork | None = None
    staged: StagedNetwork | None = None
    if recipe.parallel.is_split:
        split = split_network(model, recipe.parallel, mesh)
    elif recipe.parallel.stages:
        staged = cut_network(model, recipe.parallel, mesh)
    held = split or staged
    called = str if held is None else held.called
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    # A stage may have nothing that is trained. Patterns of names are those of the whole network.
    of_all = named if staged is None else staged.trained()
    if not of_all:
        raise RecipeError(f"model.name {recipe.model.name!r} has no parameter to train")
    if recipe.exchange.codec:
        check_coded(recipe, named, parts.comm_hook is not None)
    optimizer = make_optimizer(
        of_all, recipe.solver, delayed_updates(recipe.synchrony, served_learners), called=called
    )
    state = state_of(world, model, optimizer)
    ema: Ema | None = None
    if recipe.train.ema_decay:
        ema = Ema(named, recipe.train.ema_decay, recipe.train.ema_warmup)
        state.pieces["ema"] = ema.piece
    if held is not None:
        held.cut_pieces(state)
    weights, damaged = "", list[str]()
    if checkpoint is None and recipe.model.weights:
        weights, damaged = find_weights(recipe.model.weights)
    weights_sha256 = file_digest(weights) if weights else "none"
    code = own_code(recipe, parts)
    agree(world, facts(recipe, data, state, checkpoint, unlike, code, weights_sha256))
    doubts = [*map(doubt_of_data, unlike), *doubt_of_weights(state.take_from_first())]
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
        norms = Norms(forward, batches, recipe.train.batch_norm_samples, ema)
        state.pieces[NORMS] = norms.piece
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
    own_parts = frozenset[nn.Parameter]() if held is None else held.parameters
    row = None if staged is None else mesh.row
    probe = run_probe(places, named, first_backward, mesh.column, own_parts, row)
    cost = None
    is_timed = world.device.type == "cuda" and recipe.train.deterministic and stage is None
    if is_timed:
        cost = _cost_of_determinism(forward, first)
    first_weights: FirstWeights | None = None
    if weights and held is None:
        first_weights = load_weights(model, weights, weights_sha256)
    elif weights:
        whole = build_network(recipe, parts, data.train, world.device)
        first_weights = load_weights(whole, weights, weights_sha256)
        state.pieces["parameter"].load(InMemory(dict(whole.named_parameters())))
        state.pieces["buffer"].load(InMemory(dict(whole.named_buffers())))
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
        served=served,
        local=local,
        best=best,
        norms=norms,
        rise=rise,
        batches=batches,
        stand_in=stand_in,
        probe=probe,
        split=held,
        stage=stage,
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
