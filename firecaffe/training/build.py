"""Builds a training from a recipe and a world, and runs it."""

import dataclasses
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from firecaffe.cluster.last_word import LAUNCHED, tell_uncaught
from firecaffe.cluster.tree import links_of, star_of
from firecaffe.cluster.world import World, join
from firecaffe.data.datasets import GIVEN
from firecaffe.errors import RunError
from firecaffe.exchange.route import HOOK
from firecaffe.files import write_json
from firecaffe.gradients.combine import Hook
from firecaffe.plan.of_recipe import write_forecast
from firecaffe.recipe.parallel import layout_of
from firecaffe.recipe.ranks import check_ranks
from firecaffe.recipe.run import Ranks, Run, resolve
from firecaffe.recipe.sections import Recipe, check_recipe
from firecaffe.runs.explain import read_timings
from firecaffe.runs.score_mode import score_mode
from firecaffe.synchrony.config import FIRST, MEASURED
from firecaffe.tasks import Loss, Task, TaskConfig
from firecaffe.training.about import about_of
from firecaffe.training.arithmetic import arithmetic
from firecaffe.training.balance import Balance
from firecaffe.training.beginning import make_folder, notes_of, say_where
from firecaffe.training.checkpoint import save_checkpoint
from firecaffe.training.checks import check_rates, check_validation
from firecaffe.training.connect import connect
from firecaffe.training.data_workers import check_not_in_worker
from firecaffe.training.ending import record_of
from firecaffe.training.evaluate import Outputs
from firecaffe.training.facts import describe_training, unrepeatable
from firecaffe.training.frozen import frozen_of
from firecaffe.training.given_task import OWN
from firecaffe.training.learner import Learner, build_learner
from firecaffe.training.loop import Training
from firecaffe.training.loop import train as run_training
from firecaffe.training.parallel.auto import LayoutChoice, choose_layout, notes_of_layout
from firecaffe.training.parallel.mesh import Mesh, make_mesh
from firecaffe.training.parallel.own_evaluation import OwnOutputs
from firecaffe.training.parts import Parts, check_arguments, open_parts
from firecaffe.training.plugins import (
    Plugin,
    around_write,
    check,
    load_plugins,
    names,
)
from firecaffe.training.progress import say
from firecaffe.training.records import Records
from firecaffe.training.result import Result
from firecaffe.training.saver import Saver
from firecaffe.training.start import FaultTeller, Start, find_start, tell_faults
from firecaffe.training.steps import make_steps
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

    What it sets in the process is as before when it returns: threads, kernels, torch's generators,
    signals. The C library's malloc keeps what was freed from then on (`mallopt`), which nothing
    can take back.

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
    # A server that is rank 0 alone goes on without workers that are lost.
    goes_on = synchrony.is_served and synchrony.clock == "real" and synchrony.server == FIRST
    shape = star_of if goes_on else links_of
    with (
        join(recipe.train.device, exchange.timeout_s, exchange.silent_s, shape) as world,
        ExitStack() as resources,
        tell_faults(
            world
        ) as found,  # inside, so that others hear of it before anything is waited for
    ):
        recipe, chosen_layout = choose_layout(recipe, parts, world)
        on_gpus = world.device.type != "cpu"
        layout = check_ranks(recipe, world.world_size, world.local_world_size, on_gpus)
        if world.attempt == 0:  # later there may be fewer
            check(plugins, world.world_size)
        start = find_start(world, resume)
        mesh = make_mesh(world, layout, resources)
        return _train_in(mesh, recipe, parts, plugins, start, found, chosen_layout, resources)


def _train_in(
    mesh: Mesh,
    recipe: Recipe,
    parts: Parts,
    plugins: Sequence[Plugin],
    start: Start,
    found: FaultTeller,
    chosen_layout: LayoutChoice | None,
    resources: ExitStack,
) -> Result:
    """Builds the training's parts and runs it. chosen_layout: if the recipe has asked for one.
    resources: takes all that has to be closed, as soon as it is there.
    """
    world = mesh.world
    resources.enter_context(arithmetic(recipe.train, world.device))
    data = open_parts(recipe, parts)
    unlike = unrepeatable(world, data)
    is_repeatable = "training" not in unlike
    described = describe_training(recipe, data, is_repeatable)
    run = resolve(recipe, data, _ranks(mesh), described=described, hook=parts.hook_name)
    check_validation(recipe, data)
    check_rates(recipe, run.steps)
    learners = recipe.synchrony.num_learners(world.world_size)
    learner = build_learner(run, parts, data, mesh, start.checkpoint, unlike, resources, learners)
    # From here on faults have a place to be written to.
    folder = make_folder(world, run, start, about_of(parts, data), learner.own_code)
    found.write_into(folder)
    run, reducers, choice = connect(run, learner, mesh.sharers, parts.comm_hook, resources)
    is_resumed = start.checkpoint is not None
    frozen = frozen_of(learner.all_names, recipe.model, learner.first_weights, is_resumed)
    notes = notes_of(run, data, learner, frozen, choice, start, plugins)
    notes += notes_of_layout(chosen_layout)
    served = learner.served
    # A network that was given as an object of Python may be the very one that is trained.
    is_planned = parts.model is None and run.route.way != HOOK
    if world.is_first and is_planned:
        words = recipe, data, world.world_size, world.local_world_size, world.device
        chosen = None if learner.split is None else learner.split.chosen
        notes += write_forecast(folder, *words, run.route.algorithm, run.rounds, chosen)
    records = Records(folder, run, world, start.step, goes_on=start.folder is not None)
    resources.enter_context(closing(records))
    write = around_write(plugins, save_checkpoint, world)
    keep_last = recipe.checkpoint.keep_last
    saver = Saver(folder / "checkpoints", keep_last, write, records.say, records.weights)
    resources.enter_context(closing(saver))
    parts_of_run = run, learner, world, data
    steps = make_steps(
        run, learner, mesh, data, reducers, plugins, start.step, is_repeatable, resources
    )
    if served is not None:
        if world.is_first:
            notes += served.open(folder, start.checkpoint)
        resources.enter_context(closing(served))
    balance = _balance(run, mesh)
    evaluators = mesh.column if learner.own_samples is None else world
    training = Training(
        run=run,
        world=world,
        evaluators=evaluators,
        estimators=mesh.column,
        tellers=evaluators if learner.stage is None else world,
        data=data,
        stepper=steps.stepper,
        ahead=steps.ahead,
        balance=balance,
        state=learner.state,
        best=learner.best,
        norms=learner.norms,
        rise=learner.rise,
        saver=saver,
        folder=folder,
        first_step=start.step,
        probe=learner.probe.digest,
        doubts=learner.doubts,
        outputs_of=partial(_outputs_of, learner, world),
        real=steps.real,
    )
    for note in notes:
        records.say(note)
    say_where(world, run, folder)
    result = run_training(training, records)
    if learner.split is not None and parts.model is not None:
        result.hold_function(parts.model)
    if served is not None:
        records.say(served.clock.tally.line)
    if world.is_first:
        record = record_of(result, *parts_of_run, frozen, choice, balance, start)
        record["plugins"] = names(plugins)
        record["parallel_choice"] = chosen_layout and dataclasses.asdict(chosen_layout)
        write_json(folder / "result.json", record)
        for line in _score(folder):
            records.say(line)
        records.end(record)
        if LAUNCHED not in os.environ:  # our launcher says it, of a folder that stays
            say(f"{run.title}  run folder: {folder}")
    return result


def _outputs_of(learner: Learner, world: World, num_samples: int) -> Outputs | None:
    """What gives the outputs of a network that a row of ranks holds; None if a call does."""
    if learner.stage is not None:
        return learner.stage.outputs
    if learner.own_samples is None:
        return None
    forward = learner.forward
    made = forward.model, forward.config, world, learner.own_samples, learner.stand_in
    return OwnOutputs(*made, num_samples)


def _ranks(mesh: Mesh) -> Ranks:
    """The ranks that share out micro-batches, for the run. All ranks call it."""
    ranks = mesh.sharers
    share_memory = ranks.device.type == "cpu" and sys.platform.startswith("linux")
    return Ranks(ranks.world_size, ranks_per_host(ranks), share_memory, mesh.world.world_size)


def _balance(run: Run, mesh: Mesh) -> Balance | None:
    """What decides about shares, if they are measured and there are several."""
    words = run.recipe.synchrony
    layout = layout_of(run.recipe.parallel, mesh.world.world_size)
    if words.shares != MEASURED or layout.data == 1:
        return None
    full_step = run.recipe.train.global_batch_size
    return Balance(mesh.world, layout, run.num_leaves, full_step, words.shares_every, run.shares)


def _score(folder: Path) -> list[str]:
    """What is to be said of the forecast, of another mode than every_step, at the run's end: one of
    every_step is of all ranks, whose timings are not here alone.
    """
    try:
        scored = score_mode(folder, read_timings(folder))
    except RunError as error:  # a full disk has kept no rows
        return [f"warning: the forecast is not scored: {error}"]
    return [] if scored is None else scored.lines
