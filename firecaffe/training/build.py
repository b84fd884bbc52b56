"""From a recipe and a world to a training: the only file that knows all parts."""

import dataclasses
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from firecaffe.cluster.agree import agree, gather_text
from firecaffe.cluster.groups import group_of_one
from firecaffe.cluster.last_word import LAUNCHED, tell_uncaught
from firecaffe.cluster.world import World, join
from firecaffe.data import (
    DATASETS,
    Batches,
    Dataset,
)
from firecaffe.data.train_batches import BatchesAhead
from firecaffe.errors import RecipeError
from firecaffe.exchange.choose import AUTO
from firecaffe.exchange.leaves import leaf_share
from firecaffe.exchange.route import Route, find_route
from firecaffe.gradients.buckets import cut
from firecaffe.gradients.combine import Hook
from firecaffe.gradients.probe import run_probe
from firecaffe.gradients.reducer import GradientReducer
from firecaffe.models import MODELS, classification_loss
from firecaffe.models.config import ModelConfig
from firecaffe.plan.of_recipe import write_forecast
from firecaffe.recipe.config import check_workers
from firecaffe.recipe.identity import identity, to_toml, tuned_by
from firecaffe.recipe.idle import idle_words
from firecaffe.recipe.sections import Recipe, check_recipe
from firecaffe.runs.environment import describe_environment
from firecaffe.runs.files import write_atomically, write_json
from firecaffe.runs.folder import continue_run_folder, create_run_folder
from firecaffe.solvers.optimizer import make_optimizer
from firecaffe.solvers.policy import batch_scale, rate_notes
from firecaffe.tasks import CLASSIFICATION, Loss
from firecaffe.training.arithmetic import cost_of_determinism, set_arithmetic
from firecaffe.training.checkpoint import check_identity, save_checkpoint
from firecaffe.training.checks import (
    check_coded,
    check_hosts,
    check_outputs,
    check_rates,
    check_validation,
)
from firecaffe.training.facts import (
    describe_training,
    doubt_of_data,
    doubt_of_weights,
    doubts_of,
    facts,
    unrepeatable,
)
from firecaffe.training.forward import Forward
from firecaffe.training.loop import Result, Training
from firecaffe.training.loop import train as run_training
from firecaffe.training.parts import Parts, build_network, check_arguments, open_parts
from firecaffe.training.plugins import Plugin, around_batches, around_write, check, load_plugins
from firecaffe.training.preflight import sample_order, total_steps
from firecaffe.training.progress import say
from firecaffe.training.saver import Saver
from firecaffe.training.start import FaultTeller, Start, find_start, remember_folder, tell_faults
from firecaffe.training.state import state_of
from firecaffe.training.step import Stepper, empty_counts
from firecaffe.transport.auto import AutoChoice, choose_exchange
from firecaffe.transport.exchange import Exchange
from firecaffe.transport.local import meet_local_ranks, ranks_per_host


def train(
    recipe: Recipe,
    model: Callable[[], nn.Module] | None = None,
    train_set: Dataset | None = None,
    test_set: Dataset | None = None,
    loss: Loss = classification_loss,
    resume: str | Path | None = None,
    comm_hook: tuple[object, Hook] | None = None,
    validation_set: Dataset | None = None,
) -> Result:
    """Trains in the world of torchrun's environment, or alone without one.

    model: a function that makes the network (a class will do); it is called under the recipe's
    seed. train_set, test_set: anything with the four members of `firecaffe.data.Dataset`. loss:
    (outputs, labels) -> the mean loss. Each stands in for what the recipe names. resume: a run
    folder or a checkpoint to go on from, with any number of workers. comm_hook: (state, hook), a
    communication hook as `DistributedDataParallel.register_comm_hook` takes it, which then sums
    the gradients instead of the recipe's exchange. validation_set: what `train.eval_every`
    evaluates on; of one's own data, `data.hold_out` holds out a share of train_set instead.

    Every rank returns the same result. Raises: FirecaffeError, one line for the user; a script that
    lets it through ends with that line and the error's exit code.
    """
    tell_uncaught()
    parts = Parts(model, loss, train_set, test_set, validation_set, comm_hook)
    check_arguments(recipe, parts, resume)
    check_recipe(recipe)
    plugins = load_plugins()
    if model is not None:
        name = f"own {getattr(model, '__qualname__', type(model).__qualname__)}"
        recipe = dataclasses.replace(recipe, model=ModelConfig(name))
    if train_set is not None:
        recipe = dataclasses.replace(recipe, data=dataclasses.replace(recipe.data, name="own data"))
    exchange = recipe.exchange
    with (
        join(recipe.train.device, exchange.timeout_s, exchange.silent_s) as world,
        ExitStack() as resources,
        tell_faults(
            world
        ) as found,  # inside, so that others hear of it before anything is waited for
    ):
        check_workers(recipe.train, world.world_size, exchange.level)
        check_hosts(recipe, world)
        if world.attempt == 0:  # later there may be fewer
            check(plugins, world.world_size)
        start = find_start(world, resume)
        return _train_in(world, recipe, parts, plugins, start, found, resources)


def _train_in(
    world: World,
    recipe: Recipe,
    parts: Parts,
    plugins: Sequence[Plugin],
    start: Start,
    found: FaultTeller,
    resources: ExitStack,
) -> Result:
    """resources: takes all that has to be closed, as soon as it is there."""
    config, checkpoint = recipe.train, start.checkpoint
    set_arithmetic(config, world.device)
    data = open_parts(recipe, parts)
    check_validation(recipe, data)
    steps = total_steps(recipe, data)
    check_rates(recipe, steps)
    unlike = unrepeatable(world, data)
    words = {
        **identity(recipe, steps),
        "the training data": describe_training(recipe, data, "training" not in unlike),
    }
    model = build_network(recipe, parts, data, world)
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    parameters = list(named.values())
    if not parameters:
        raise RecipeError(f"model.name {recipe.model.name!r} has no parameter to train")
    if recipe.exchange.codec:
        check_coded(recipe, named, parts.comm_hook is not None)
    optimizer = make_optimizer(named, recipe.solver)
    agree(world, facts(recipe, data, model, world, checkpoint, unlike))
    state = state_of(world, model, optimizer)
    doubts = [*map(doubt_of_data, unlike), *doubt_of_weights(state.take_from_first())]

    batches = Batches(data.train, sample_order(recipe, data), recipe.data, world.device)
    level = recipe.exchange.level
    share = leaf_share(config.num_micro_batches, world.world_size, world.rank, level)
    forward = Forward(model, dataclasses.replace(CLASSIFICATION, loss=parts.loss), config)
    state.numbers["scaler"] = forward.scaler
    # Before a checkpoint is restored, so that its digest compares with the first run's.
    check_outputs(forward, batches, recipe, data.train)
    probe = run_probe(model, parameters, partial(_first_loss, forward, batches), world)
    cost = None
    if world.device.type == "cuda" and config.deterministic:
        cost = _cost_of_determinism(forward, batches)
    if checkpoint is not None:
        check_identity(checkpoint, words, steps)
        state.load(checkpoint)

    in_order = [parameters[index] for index in probe.ready_order]
    recipe_as_written = recipe
    route, choice = _choose_route(recipe, parts, world, in_order)
    resolved = dataclasses.replace(recipe.exchange, algorithm=route.algorithm)
    recipe = dataclasses.replace(recipe, exchange=resolved)
    doubts = list(dict.fromkeys(doubts + doubts_of(recipe, world, route, probe, checkpoint)))
    name = f"{recipe.model.name.replace(' ', '-')}-{world.world_size}w"
    folder = _make_folder(world, recipe_as_written, name, start)
    found.write_into(folder)
    local = None
    if route.shares_memory:
        local = meet_local_ranks(world, recipe.exchange.timeout_s)
    if local is None:
        route = dataclasses.replace(route, senders=world.world_size)
    else:
        resources.callback(local.close)
    if parts.comm_hook is not None and world.group is None:
        resources.enter_context(group_of_one(world.device))
    exchange = resources.enter_context(closing(Exchange(world, route.algorithm, local)))
    reducer = resources.enter_context(
        GradientReducer(
            named,
            probe.ready_order,
            forward.empty_tail(),
            empty_counts(forward),
            config.num_micro_batches,
            exchange,
            route,
            recipe.exchange.bucket_bytes,
            parts.comm_hook,
        )
    )
    if reducer.memory is not None:
        state.add("compressor", reducer.memory)
    state.check_all_was_loaded()
    saver = resources.enter_context(
        closing(
            Saver(
                folder / "checkpoints",
                recipe.checkpoint.keep_last,
                around_write(plugins, save_checkpoint, world),
            )
        )
    )
    first_step = checkpoint.step if checkpoint else 0
    late_doubts = None if "training" in unlike else doubts
    in_time = resources.enter_context(
        closing(BatchesAhead(batches, share, first_step, steps, late_doubts))
    )
    stepper = Stepper(
        forward,
        around_batches(plugins, in_time, world),
        optimizer,
        reducer,
        share,
        recipe.solver.clip_gradients,
    )
    notes = rate_notes(recipe.solver, config.global_batch_size, steps)
    notes += idle_words(recipe).values()
    if recipe.run.tuned and not tuned_by(recipe):
        notes.append("run.tuned is left out: its search has ended in another recipe")
    training = Training(
        world=world,
        model=model,
        optimizer=optimizer,
        stepper=stepper,
        reducer=reducer,
        test=data.test,
        validation=data.validation,
        data=recipe.data,
        config=config,
        solver=recipe.solver,
        checkpoint=recipe.checkpoint,
        run=recipe.run,
        steps=steps,
        first_step=first_step,
        state=state,
        identity=words,
        probe=probe.digest,
        folder=folder,
        goes_on=start.folder is not None,
        saver=saver,
        title=name,
        doubts=doubts,
        broken=[getattr(each, "skipped", {}) for each in data.parts.values()],
        notes=[
            data.description,
            *data.notes,
            *notes,
            *start.notes,
            *(f"warning: {doubt}" for doubt in doubts),
        ],
    )
    if choice is not None:
        training.notes.insert(1, f"exchange: {choice.reason}")
    if world.is_first and recipe.data.name in DATASETS and recipe.model.name in MODELS:
        ranks = world.world_size, world.local_world_size
        training.notes += write_forecast(folder, recipe, *ranks, world.device, route.taken)
    result = run_training(training)
    if world.is_first:
        record = {
            **result.as_row(),
            "model": recipe.model.name,
            "world_size": world.world_size,
            "initial_lr": recipe.solver.base_lr
            * batch_scale(recipe.solver, config.global_batch_size),
            "exchange": route.algorithm,
            "exchange_choice": choice and dataclasses.asdict(choice),
            "route": route.line,
            "data": data.description,
            "samples_seen": sample_order(recipe, data).samples_before(steps),
            "tuned": tuned_by(recipe),
            "resumed_from": start.resumed_from,
            "cost_of_determinism": cost,
        }
        write_json(folder / "result.json", record)
        if LAUNCHED not in os.environ:  # our launcher says it, of a folder that stays
            say(f"{name}  run folder: {folder}")
    return result


def _choose_route(
    recipe: Recipe, parts: Parts, world: World, parameters: list[nn.Parameter]
) -> tuple[Route, AutoChoice | None]:
    """How gradients go, with what `auto` is here; parameters are in the order in which backward
    finishes them.
    """
    config = recipe.exchange
    is_possible = world.device.type == "cpu" and sys.platform.startswith("linux")
    route_by = partial(
        find_route,
        num_leaves=recipe.train.num_micro_batches,
        world_size=world.world_size,
        ranks_per_host=ranks_per_host(world),
        shared_memory=config.shared_memory and is_possible,
        codec=config.codec,
        level=config.level,
        hook="" if parts.comm_hook is None else _name_of(parts.comm_hook[1]),
    )
    if config.algorithm != AUTO:
        return route_by(config.algorithm), None
    sizes = [parameter.nbytes for parameter in parameters]
    buckets = [sum(sizes[start:stop]) for start, stop in cut(sizes, config.bucket_bytes)]
    choice = choose_exchange(world, buckets, route_by("tree"))
    return route_by(choice.algorithm), choice


def _name_of(hook: Hook) -> str:
    return str(getattr(hook, "__qualname__", "of the user"))


def _first_loss(forward: Forward, batches: Batches) -> Tensor:
    """The loss of the training's first micro-batch, which every rank can compute."""
    forward.begin_step()
    loss, _ = forward(*batches.train_batch(0, 0), step=0, leaf=0)
    assert loss is not None  # the first micro-batch of an epoch is never empty
    return loss


def _cost_of_determinism(forward: Forward, batches: Batches) -> float:
    buffers = [buffer.clone() for buffer in forward.model.buffers()]
    cost = cost_of_determinism(lambda: torch.autograd.backward(_first_loss(forward, batches)))
    for buffer, start in zip(forward.model.buffers(), buffers, strict=True):
        buffer.copy_(start)
    forward.model.zero_grad()
    return cost


def _make_folder(world: World, recipe: Recipe, name: str, start: Start) -> Path:
    """Rank 0 makes the run's folder, or takes it back to the start, and begins it; all ranks know
    it then, and whoever starts them again.
    """
    folder = Path()
    if world.is_first:
        if start.folder is None:
            folder = create_run_folder(recipe.run, name)
        else:
            folder = start.folder
            continue_run_folder(folder, start.step)
        write_atomically(folder / "recipe.toml", to_toml(recipe))
        write_json(folder / "environment.json", describe_environment())
        remember_folder(world, start, folder.resolve())
    return Path(gather_text(world, str(folder.resolve()))[0])
