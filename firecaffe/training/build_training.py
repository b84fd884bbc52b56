"""Build a training from a recipe and a world, run it, and write its result.json.

Or join a run in progress as a worker of its server. Such a worker is no rank of a process group; it
exchanges weights and gradients with the server over its own lanes.
"""

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from firecaffe.cluster.addresses import interface_of, own_addresses, split_place
from firecaffe.cluster.groups import GLOO_INTERFACE
from firecaffe.cluster.handover import LAUNCHED
from firecaffe.cluster.joining import JoinClient
from firecaffe.cluster.links import links_of, star_of
from firecaffe.cluster.process_settings import exclusive_in_process
from firecaffe.cluster.watch import PeerWatch
from firecaffe.cluster.world import World, join, run_pulse
from firecaffe.data import Data
from firecaffe.data.datasets import GIVEN
from firecaffe.errors import AgreementError, RunError, file_error, own_traceback
from firecaffe.exchange.route import HOOK
from firecaffe.files import write_json
from firecaffe.inventory.world_queries import doubts_of_world, size_queries
from firecaffe.meta_kernels import without_compiler
from firecaffe.output import LOST
from firecaffe.planner.run_forecast import write_forecast
from firecaffe.recipe.checked_recipe import CheckedRecipe, Prepared
from firecaffe.recipe.run import Ranks, Run, resolve
from firecaffe.recipe.sections import Recipe, tuned_by
from firecaffe.recipe.worker_numbers import check_joinable, check_ranks, layout_of
from firecaffe.runs.rank_times import read_timings
from firecaffe.runs.score import score_mode
from firecaffe.tasks import OWN_TASK, TaskConfig
from firecaffe.training.checkpoint import save_checkpoint
from firecaffe.training.data_workers import data_workers
from firecaffe.training.forward import arithmetic, naming_kernels
from firecaffe.training.given_parts import Parts, about_of, open_parts
from firecaffe.training.learner import Learner, build_alone, build_learner, connect, make_steps
from firecaffe.training.loop import EvaluationGroups, Training
from firecaffe.training.loop import train as run_training
from firecaffe.training.modes.served.real_ranks import WorkerRank
from firecaffe.training.modes.served.served_mode import Served, facts_of
from firecaffe.training.parallel.auto_layout import LayoutChoice, choose_layout, notes_of_layout
from firecaffe.training.parallel.mesh import Mesh, make_mesh
from firecaffe.training.plugins import (
    Plugin,
    around_batches,
    around_write,
    check_with,
    load_plugins,
    plugin_names,
)
from firecaffe.training.records import Records, Use, say
from firecaffe.training.result import Result
from firecaffe.training.saver import Saver
from firecaffe.training.shared_facts import describe_training, find_unrepeatable
from firecaffe.training.start import FaultWriter, Start, StopRequest, find_start, report_faults
from firecaffe.training.training_folder import Places, make_folder, notes_of, say_where, setup_lines
from firecaffe.transport.auto_exchange import AutoChoice
from firecaffe.transport.local_ranks import ranks_per_host
from firecaffe.user_code import without_folder


def save_forecast(
    folder: Path, run: Run, learner: Learner, parts: Parts
) -> tuple[list[str], Use | None]:
    """Write the planner's forecast on rank 0. Returns lines about it, and what refines it, if any.

    None is made if a hook sums the gradients, or for a network given as a Python object: it may be
    the very one that is trained. Raises: RecipeError if the recipe's cluster is invalid.
    """
    world = learner.mesh.world
    if not world.is_first or parts.model is not None or run.route.way == HOOK:
        return [], None
    lines, kept = write_forecast(
        folder=folder,
        recipe=run.recipe,
        data=learner.data,
        world_size=world.world_size,
        local_world_size=world.local_world_size,
        device=world.device,
        algorithm=run.route.algorithm,
        rounds=run.rounds,
        chosen=learner.holding.split_layers,
    )
    return lines, None if kept is None else kept.refine


def record_of(result: Result, training: Training, choice: AutoChoice | None) -> dict[str, Any]:
    run, learner, data = training.run, training.learner, training.learner.data
    recipe = run.recipe
    return {
        **result.to_dict(),
        **learner.findings.row,
        "model": without_folder(recipe.model.name),
        "world_size": training.world.world_size,
        "initial_lr": recipe.solver.base_lr * run.rate_scale,
        "exchange": run.route.algorithm,
        "exchange_choice": choice and asdict(choice),
        "route": run.route.description,
        "data": data.description,
        "class_names": data.class_names,
        "samples_seen": run.order.samples_before(result.steps),
        "balance": training.steps.shares.row,
        "synchrony": learner.mode.row(result.steps),
        "parallel": learner.holding.row(run.num_leaves),
        "tuned": tuned_by(recipe),
        "resumed_from": training.start.resumed_from,
        "lost_output": dict(LOST),
    }


def train_prepared(prepared: Prepared, has_ranks_checked: bool = True) -> Result:
    """Train a command's recipe. has_ranks_checked: see `train_parts`."""
    return train_parts(prepared.recipe, Parts(), prepared.resume, (), has_ranks_checked)


def train_parts(
    recipe: CheckedRecipe,
    parts: Parts,
    resume: Path | None,
    own_plugins: Sequence[Plugin],
    has_ranks_checked: bool = False,
) -> Result:
    """Train on this rank as `firecaffe.train` does.

    has_ranks_checked: whether a launcher has checked every number of ranks.
    """
    plugins = (*load_plugins(), *own_plugins)
    if parts.model is not None:
        name = f"own {getattr(parts.model, '__qualname__', type(parts.model).__qualname__)}"
        recipe = recipe.replace("model.name", name)
    if parts.train is not None:
        recipe = recipe.replace("data.name", GIVEN)
    if parts.task is not None:
        recipe = replace(recipe, task=TaskConfig(OWN_TASK))
    exchange = recipe.exchange
    shape = star_of if recipe.synchrony.goes_on_without_workers else links_of
    with (
        exclusive_in_process("train"),
        join(recipe.train.device, exchange.timeout_s, exchange.silent_s, shape) as world,
        ExitStack() as resources,
        report_faults(
            world
        ) as fault_writer,  # innermost: tells others of a fault before any exit waits
        _explain_file_errors(),
    ):
        recipe, chosen_layout = choose_layout(recipe, parts, world)
        if not has_ranks_checked:
            on_gpus = world.device.type != "cpu"
            check_ranks(recipe, world.world_size, world.local_world_size, on_gpus)
        layout = layout_of(recipe.parallel, world.world_size)
        if world.attempt == 0:  # a later attempt may have fewer ranks
            check_with(plugins, world.world_size)
        start = find_start(world, resume)
        mesh = make_mesh(world, layout, resources)
        return _train_in(
            mesh, recipe, parts, plugins, start, fault_writer, chosen_layout, resources
        )


@contextmanager
def _explain_file_errors() -> Iterator[None]:
    # A full disk is reported in one line; an error in user code keeps its traceback.
    try:
        yield
    except OSError as error:
        of_file = None if own_traceback(error) else file_error(error)
        if of_file is None:
            raise
        raise of_file from error


def _train_in(
    mesh: Mesh,
    recipe: CheckedRecipe,
    parts: Parts,
    plugins: Sequence[Plugin],
    start: Start,
    fault_writer: FaultWriter,
    chosen_layout: LayoutChoice | None,
    resources: ExitStack,
) -> Result:
    world = mesh.world
    resources.enter_context(arithmetic(recipe.train, world.device))
    if not recipe.train.compile:
        resources.enter_context(without_compiler())  # an optimizer would load the compiler
    data, unlike, doubts = _open_data(recipe, parts, world)
    is_repeatable = "training" not in unlike
    described = describe_training(recipe, data, is_repeatable)
    run = resolve(recipe, data, _ranks(mesh), described=described, hook=parts.hook_name)
    learners = recipe.synchrony.num_learners(world.world_size)
    with naming_kernels():
        learner = build_learner(
            run, parts, data, mesh, start.checkpoint, unlike, resources, learners
        )
    learner.doubts.extend(doubts)
    # From here on faults can be written to a folder.
    places = make_folder(world, run, start, about_of(parts, data), learner.findings.own_code)
    folder = places.first
    fault_writer.write_into(places.own)
    run, reducers, choice = connect(run, learner, learner.mode.summed(), resources, parts.comm_hook)
    holding, notes = learner.holding, setup_lines(run, learner, choice)
    said, refine = save_forecast(folder, run, learner, parts)
    notes += said + notes_of(run, learner, start, plugins)
    notes += notes_of_layout(chosen_layout)
    notes += places.notes(world.host)
    records, saver = _open_records(places, run, world, start, plugins, refine, resources)
    steps = make_steps(run, learner, reducers, plugins, start.step, is_repeatable, resources)
    if world.is_first:
        notes += learner.mode.open(folder, start.checkpoint)
    resources.enter_context(closing(learner.mode))
    for note in notes:
        records.say(note)
    say_where(world, run, places)
    groups = EvaluationGroups(world, holding.evaluators, mesh.column, holding.result_group)
    training = Training(run, groups, learner, steps, records, saver, folder, start)
    result = run_training(training)
    if holding.split_layers is not None and parts.model is not None:
        result.hold_function(parts.model)
    for line in learner.mode.closing_lines():
        records.say(line)
    if world.is_first:
        record = record_of(result, training, choice)
        record["plugins"] = plugin_names(plugins)
        record["parallel_choice"] = chosen_layout and asdict(chosen_layout)
        _keep_record(folder, run, record, records)
    return result


def _open_data(recipe: Recipe, parts: Parts, world: World) -> tuple[Data, list[str], list[str]]:
    """Open the data. Return it, its parts that do not repeat, and doubts about the data sets."""
    with size_queries() as asked:
        data = open_parts(recipe, parts)
        unlike, doubts = find_unrepeatable(world, data)
    return data, unlike, doubts + doubts_of_world("a data set", asked)


def _open_records(
    places: Places,
    run: Run,
    world: World,
    start: Start,
    plugins: Sequence[Plugin],
    refine: Use | None,
    resources: ExitStack,
) -> tuple[Records, Saver]:
    goes_on, keep_last = start.folder is not None, run.recipe.checkpoint.keep_last
    records = Records(places.own, run, world, start.step, goes_on, refine)
    resources.enter_context(closing(records))
    write, folder = around_write(plugins, save_checkpoint, world), places.first / "checkpoints"
    saver = Saver(folder, keep_last, write, records.say, records.weights)
    return records, resources.enter_context(closing(saver))


def _keep_record(folder: Path, run: Run, record: dict[str, Any], records: Records) -> None:
    write_json(folder / "result.json", record)
    for line in _score(folder):
        records.say(line)
    records.end(record)
    if LAUNCHED not in os.environ:  # our launcher prints it, if the folder stays
        say(f"{run.title}  run folder: {folder}")


def _ranks(mesh: Mesh) -> Ranks:
    # All ranks call it.
    ranks = mesh.sharers
    share_memory = ranks.device.type == "cpu" and sys.platform.startswith("linux")
    return Ranks(ranks.world_size, ranks_per_host(ranks), share_memory, mesh.world.world_size)


def _score(folder: Path) -> list[str]:
    # A forecast of every_step is not scored here: that needs the timings of all ranks.
    try:
        scored = score_mode(folder, read_timings(folder))
    except RunError as error:  # a full disk stored no rows
        return [f"warning: the forecast is not scored: {error}"]
    return [] if scored is None else scored.lines


def join_run(recipe: CheckedRecipe, place: str) -> Result:
    """Compute for the server of a run, and return the run's result. place: HOST:PORT, as printed.

    Raises: RecipeError; LaunchError if no run accepts workers there; AgreementError for another
    recipe or other data; PeerLostError if the server is gone; the error that the run ends with.
    """
    synchrony, exchange = recipe.synchrony, recipe.exchange
    check_joinable(synchrony)
    comes = JoinClient(place, exchange.timeout_s)
    # in_flight decides no bits, but it is the number of lanes that rank 0 connects.
    recipe = recipe.replace("synchrony.in_flight", comes.facts["in_flight"])
    if sys.platform.startswith("linux"):
        address = own_addresses(split_place(place)[0])[0]
        os.environ.setdefault(GLOO_INTERFACE, interface_of(address))
    with ExitStack() as resources:
        alone = resources.enter_context(join(recipe.train.device))
        plugins, learners = load_plugins(), comes.facts["learners"]
        run, learner = build_alone(recipe, Parts(), alone, learners, resources)
        local_facts = facts_of(run, learner.probe.digest, learners)
        check_same(local_facts, comes.facts)
        resources.enter_context(data_workers(learner.data))
        doubt = ""
        if local_facts["probe"] != comes.facts["probe"]:
            doubt = "computes other bits than rank 0, so that a replay may come to others"
        given = comes.enter({"doubt": doubt})
        sockets = {0: given.socket}
        watch = resources.enter_context(
            closing(
                PeerWatch(
                    rank=given.rank,
                    hosts=given.hosts,
                    sockets=sockets,
                    silent_s=exchange.silent_s,
                    timeout_s=exchange.timeout_s,
                    shape=star_of,
                )
            )
        )
        resources.enter_context(run_pulse(sockets.values(), exchange.silent_s))
        world = replace(alone, rank=given.rank, world_size=len(given.hosts), watch=watch)
        return _work(world, learner, plugins, recipe, given.store)


def _work(world: World, learner: Learner, plugins: Any, recipe: Recipe, store: Any) -> Result:
    served = learner.mode
    assert isinstance(served, Served)
    say(f"rank {world.rank} computes for rank 0 on {world.watch.hosts[0]}")
    batches = around_batches(plugins, learner.batches, world)
    rank = WorkerRank(world, served.holding, served.coder, batches, recipe, store=store)
    with report_faults(world), StopRequest() as stop:
        return rank.work(lambda: stop.reason)


def check_same(own: Mapping[str, Any], of_run: Mapping[str, Any]) -> None:
    """Raise AgreementError that names the first differing setting among those that decide bits."""
    here, there = own["deciding"], of_run["deciding"]
    for word in {**there, **here}:
        if here.get(word) != there.get(word):
            raise AgreementError(
                f"--join: {word} is {here.get(word)!s:.120} here and {there.get(word)!s:.120} in "
                "the run; a worker comes with the run's recipe and data"
            )
