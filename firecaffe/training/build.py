"""Builds a training from a recipe and a world: the only file that knows all parts."""

import dataclasses
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

from torch import nn

from firecaffe.cluster.agree import text_of_first
from firecaffe.cluster.last_word import LAUNCHED, tell_uncaught
from firecaffe.cluster.tree import links_of, star_of
from firecaffe.cluster.world import World, join
from firecaffe.data.datasets import GIVEN
from firecaffe.data.train_batches import BatchesAhead
from firecaffe.exchange.route import HOOK
from firecaffe.gradients.combine import Hook
from firecaffe.plan.of_recipe import write_forecast
from firecaffe.recipe.config import check_workers
from firecaffe.recipe.identity import to_toml, tuned_by
from firecaffe.recipe.idle import idle_words
from firecaffe.recipe.local import check_local_workers
from firecaffe.recipe.paths import with_absolute_paths
from firecaffe.recipe.run import Ranks, Run, resolve
from firecaffe.recipe.sections import Recipe, check_recipe
from firecaffe.recipe.served import check_served_workers
from firecaffe.reference import without_folder
from firecaffe.runs.environment import describe_environment
from firecaffe.runs.files import write_atomically, write_json
from firecaffe.runs.folder import continue_run_folder, create_run_folder
from firecaffe.solvers.policy import rate_notes
from firecaffe.synchrony.config import MEASURED
from firecaffe.tasks import Loss, Task, TaskConfig
from firecaffe.training.about import About, about_of, write_about
from firecaffe.training.arithmetic import set_arithmetic
from firecaffe.training.balance import Balance
from firecaffe.training.checkpoint import save_checkpoint
from firecaffe.training.checks import check_hosts, check_rates, check_validation
from firecaffe.training.connect import connect
from firecaffe.training.data_workers import check_not_in_worker, data_workers
from firecaffe.training.facts import describe_training, unrepeatable
from firecaffe.training.frozen import frozen_of
from firecaffe.training.given_task import OWN
from firecaffe.training.learner import Learner, build_learner
from firecaffe.training.local.make import local_stepper
from firecaffe.training.local.stepper import LocalStepper
from firecaffe.training.loop import Training
from firecaffe.training.loop import train as run_training
from firecaffe.training.parts import Parts, check_arguments, open_parts
from firecaffe.training.plugins import (
    Plugin,
    around_batches,
    around_write,
    check,
    load_plugins,
    names,
)
from firecaffe.training.progress import say
from firecaffe.training.records import Records
from firecaffe.training.result import Result
from firecaffe.training.saver import Saver
from firecaffe.training.served.real import RealRanks
from firecaffe.training.served.stepper import ServedStepper
from firecaffe.training.start import FaultTeller, Start, find_start, remember_folder, tell_faults
from firecaffe.training.step import Stepper
from firecaffe.transport.local import ranks_per_host


def train(
    recipe: Recipe,
    model: Callable[[], nn.Module] | None = None,
    train_set: Any = None,
    test_set: Any = None,
    loss: Loss | None = None,
    resume: str | Path | None = None,
    comm_hook: tuple[object, Hook] | None = None,
    validation_set: Any = None,
    task: Task | None = None,
) -> Result:
    """Trains in the world of torchrun's environment, or alone without one.

    Every rank calls it, and returns the same result.

    Args:
        recipe: The training. What the other arguments give stands in for what it names.
        model: A function that makes the network (a class will do); it is called under the recipe's
            seed.
        train_set: The training samples: a map-style torch Dataset (`from_torch` gives it workers),
            tensors or trees of them (`TensorDataset`, or the pair of inputs and targets), or an
            object with the two members of `firecaffe.data.Dataset`.
        test_set: The test samples, likewise. They are seen once, at the end.
        loss: (outputs, targets) to the mean loss of the samples, a scalar.
        resume: A run folder or a checkpoint to go on from, with any number of workers.
        comm_hook: (state, hook), a communication hook as
            `DistributedDataParallel.register_comm_hook` takes it, which then sums the gradients
            instead of the recipe's exchange.
        validation_set: The samples that `train.eval_every` evaluates on. Without it `data.hold_out`
            holds out a share of train_set.
        task: A loss and metrics of one's own.

    Raises: FirecaffeError, one line for the user, of the kind that says what it is about; a script
    that lets it through ends with that line and the error's exit code.
    """
    tell_uncaught()
    check_not_in_worker()
    parts = Parts(model, loss, task, train_set, test_set, validation_set, comm_hook)
    check_arguments(recipe, parts, resume)
    check_recipe(recipe)
    plugins = load_plugins()
    if model is not None:
        name = f"own {getattr(model, '__qualname__', type(model).__qualname__)}"
        recipe = dataclasses.replace(recipe, model=dataclasses.replace(recipe.model, name=name))
    if train_set is not None:
        recipe = dataclasses.replace(recipe, data=dataclasses.replace(recipe.data, name=GIVEN))
    if task is not None:
        recipe = dataclasses.replace(recipe, task=TaskConfig(OWN))
    exchange, synchrony = recipe.exchange, recipe.synchrony
    # A server goes on without workers that are lost.
    shape = star_of if synchrony.is_served and synchrony.clock == "real" else links_of
    with (
        join(recipe.train.device, exchange.timeout_s, exchange.silent_s, shape) as world,
        ExitStack() as resources,
        tell_faults(
            world
        ) as found,  # inside, so that others hear of it before anything is waited for
    ):
        check_workers(recipe.train, world.world_size, exchange.level)
        check_served_workers(synchrony, world.world_size)
        check_local_workers(synchrony, world.world_size, exchange.level)
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
    """Builds the training's parts and runs it. resources: takes all that has to be closed, as soon
    as it is there.
    """
    set_arithmetic(recipe.train, world.device)
    data = open_parts(recipe, parts)
    unlike = unrepeatable(world, data)
    described = describe_training(recipe, data, "training" not in unlike)
    run = resolve(recipe, data, _ranks(world), described=described, hook=parts.hook_name)
    check_validation(recipe, data)
    check_rates(recipe, run.steps)
    learners = recipe.synchrony.num_learners(world.world_size)
    learner = build_learner(run, parts, data, world, start.checkpoint, unlike, learners)
    # From here on faults have a place to be written to.
    about = about_of(parts, data)
    folder = _make_folder(world, run, start, about, learner.own_code)
    found.write_into(folder)
    run, reducer, choice = connect(run, learner, world, parts.comm_hook, resources)
    notes = [data.description, *data.notes, *_notes(run), *start.notes]
    if choice is not None:
        notes.insert(1, f"exchange: {choice.reason}")
    notes += [f"plug-in: {name}" for name in names(plugins)]
    notes += _weights_notes(recipe, learner)
    network, is_resumed = learner.forward.model, start.checkpoint is not None
    frozen = frozen_of(network, recipe.model, learner.first_weights, is_resumed)
    notes += frozen.notes(recipe.model)
    notes += [f"warning: {doubt}" for doubt in learner.doubts]
    served, local = learner.served, learner.local
    # A network that was given as an object of Python may be the very one that is trained.
    is_forecast = run.route.way != HOOK and served is None and local is None
    if world.is_first and parts.model is None and is_forecast:
        ranks = world.world_size, world.local_world_size
        notes += write_forecast(folder, recipe, data, *ranks, world.device, run.route.algorithm)
    goes_on = start.folder is not None
    records = Records(folder, run, world, start.step, goes_on)
    resources.enter_context(closing(records))
    write = around_write(plugins, save_checkpoint, world)
    kept = recipe.checkpoint.keep_last
    saver = Saver(folder / "checkpoints", kept, write, records.say)
    resources.enter_context(closing(saver))
    first = run.synchronous if start.step < run.rounds.synchronous else run
    leaves = first.micro_batches(world.rank)
    late_doubts = None if "training" in unlike else learner.doubts
    last_ahead = run.steps if served is None else served.leaves.first_step
    ahead = BatchesAhead(learner.batches, leaves, start.step, last_ahead, late_doubts)
    resources.enter_context(closing(ahead))
    resources.enter_context(data_workers(data))  # closed first, so that nobody waits for them
    batches = around_batches(plugins, ahead, world)
    clip = recipe.solver.clip_gradients
    sums = reducer
    if local is not None and first is not run:
        _, sums, _ = connect(first, learner, world, None, resources)
    stepper = Stepper(learner.forward, batches, learner.optimizer, sums, leaves, clip)
    stepper.momentum, stepper.ema = run.momentum, learner.ema
    steps: Stepper | ServedStepper | LocalStepper = stepper
    if local is not None:
        steps = local_stepper(local, run, world, stepper, ahead, reducer, resources)
    real: RealRanks | None = None
    if served is not None:
        if world.is_first:
            notes += served.open(folder, start.checkpoint)
        resources.enter_context(closing(served))
        in_any_order = around_batches(plugins, learner.batches, world)
        steps = served.stepper(stepper, in_any_order)
        if served.real is not None:
            words, timeout_s = recipe.synchrony, recipe.exchange.timeout_s
            made = world, served.real, learner.forward, learner.named, in_any_order
            real = RealRanks(*made, words, timeout_s)
    balance = _balance(run, world)
    training = Training(
        run=run,
        world=world,
        data=data,
        stepper=steps,
        ahead=ahead,
        balance=balance,
        state=learner.state,
        best=learner.best,
        saver=saver,
        folder=folder,
        first_step=start.step,
        probe=learner.probe.digest,
        doubts=learner.doubts,
        real=real,
    )
    for note in notes:
        records.say(note)
    _say_where(world, run, folder)
    result = run_training(training, records)
    if served is not None:
        records.say(served.clock.tally.line)
    if world.is_first:
        record = {
            **result.as_row(),
            "model": without_folder(recipe.model.name),
            "first_weights": learner.first_weights and learner.first_weights.as_dict(),
            "frozen_parameters": len(frozen.names),
            "world_size": world.world_size,
            "initial_lr": recipe.solver.base_lr * run.rate_scale,
            "exchange": run.route.algorithm,
            "exchange_choice": choice and dataclasses.asdict(choice),
            "route": run.route.description,
            "data": data.description,
            "class_names": data.class_names,
            "samples_seen": run.order.samples_before(result.steps),
            "balance": balance and balance.as_dict(),
            "synchrony": (served and served.row) or (local and local.row(result.steps)),
            "tuned": tuned_by(recipe),
            "resumed_from": start.resumed_from,
            "cost_of_determinism": learner.cost_of_determinism,
            "plugins": names(plugins),
        }
        write_json(folder / "result.json", record)
        records.end(record)
        if LAUNCHED not in os.environ:  # our launcher says it, of a folder that stays
            say(f"{run.title}  run folder: {folder}")
    return result


def _say_where(world: World, run: Run, folder: Path) -> None:
    """On each other host, where the run is told of and recorded: with its first rank, on the first.
    The run.folder of that host counts, whatever is said on this one.
    """
    hosts = [world.host] if world.watch is None else world.watch.hosts
    if hosts[0] != world.host and hosts.index(world.host) == world.rank:
        say(
            f"{run.title}  rank {world.rank} of {world.world_size}; rank 0 on {hosts[0]} tells how "
            f"it goes, and the run folder is {folder} there"
        )


def _ranks(world: World) -> Ranks:
    """The ranks of this world, for the run. All ranks call it."""
    share_memory = world.device.type == "cpu" and sys.platform.startswith("linux")
    return Ranks(world.world_size, ranks_per_host(world), share_memory)


def _balance(run: Run, world: World) -> Balance | None:
    """What decides about shares, if they are measured and there are several."""
    words = run.recipe.synchrony
    if words.shares != MEASURED or world.world_size == 1:
        return None
    full_step = run.recipe.train.global_batch_size
    return Balance(world, run.num_leaves, full_step, words.shares_every, run.shares)


def _notes(run: Run) -> list[str]:
    """Notes for the user about the recipe's words."""
    recipe = run.recipe
    notes = rate_notes(recipe.solver, recipe.train.global_batch_size, run.steps)
    notes += idle_words(recipe).values()
    if recipe.train.ema_decay:
        notes.append(
            f"evaluations take the moving average, train.ema_decay {recipe.train.ema_decay:g}"
        )
    if recipe.run.tuned and not tuned_by(recipe):
        notes.append("run.tuned is left out: its search has ended in another recipe")
    return notes


def _weights_notes(recipe: Recipe, learner: Learner) -> list[str]:
    """What became of the file of the first weights."""
    if learner.first_weights is not None:
        warned = [f"warning: {why}; an older checkpoint is taken" for why in learner.damaged]
        return [*warned, learner.first_weights.line]
    weights = recipe.model.weights
    return [f"model.weights {weights} is not read: the run is resumed"] if weights else []


def _make_folder(
    world: World, run: Run, start: Start, about: About, own_code: Mapping[str, str]
) -> Path:
    """Makes the run's folder on rank 0, or takes an earlier attempt's back to the start; tells all
    ranks, and the launcher for a next attempt.
    """
    folder = Path()
    if world.is_first:
        if start.folder is None:
            folder = create_run_folder(run.recipe.run, run.title)
        else:
            folder = start.folder
            continue_run_folder(folder, start.step)
        write_atomically(folder / "recipe.toml", to_toml(with_absolute_paths(run.recipe)))
        hosts = [world.host] if world.watch is None else list(dict.fromkeys(world.watch.hosts))
        environment = {**describe_environment(), "hosts": hosts, "own_code": own_code}
        write_json(folder / "environment.json", environment)
        write_about(folder, about)
        remember_folder(world, start, folder.resolve())
    return Path(text_of_first(world, str(folder.resolve())))
