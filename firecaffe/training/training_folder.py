"""The beginning of a training: its folder, and the first lines for people.

Rank 0 marks the run's folder with a name that no other run has. A rank that does not see the mark
shares no disk with rank 0, and records its timings, and the faults that it is told of, in a folder
on its own host. Rank 0 alone writes checkpoints and the result.
"""

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from uuid import uuid4

from firecaffe.cluster.agree import broadcast_text, gather_text
from firecaffe.cluster.world import World
from firecaffe.compression import prune_notes
from firecaffe.errors import RunError
from firecaffe.files import folder_lock, write_atomically, write_json
from firecaffe.recipe.idle_settings import idle_settings
from firecaffe.recipe.run import Run
from firecaffe.recipe.sections import Recipe, flatten, to_toml, tuned_by
from firecaffe.runs.environment import describe_environment
from firecaffe.runs.run_folder import (
    APART,
    ENVIRONMENT,
    MARK,
    RunConfig,
    apart_mark,
    continue_run_folder,
    create_run_folder,
    mark_of,
)
from firecaffe.solvers.optimizer import decay_notes
from firecaffe.solvers.rate_policy import rate_notes
from firecaffe.training.given_parts import About, write_about
from firecaffe.training.learner import Learner
from firecaffe.training.plugins import Plugin, plugin_names
from firecaffe.training.records import say
from firecaffe.training.start import (
    Start,
    announce_folder,
    remember_folder,
    remember_own_folder,
    withdraw_folder,
)
from firecaffe.transport.auto_exchange import AutoChoice
from firecaffe.user_code import REFERENCES, with_file


def with_absolute_paths(recipe: Recipe) -> Recipe:
    """Return the recipe with absolute paths, except those in `args`, which are the user's."""
    changes: dict[str, Callable[[str], str]] = {
        "model.weights": _absolute,
        "data.path": _absolute,
        "data.cache": _absolute,
        "synchrony.speeds_from": _absolute,
        "run.cluster": lambda name: _absolute(name) if name.endswith(".toml") else name,
        **{word: lambda name: with_file(name, os.path.abspath) for word in REFERENCES},
    }
    settings = flatten(recipe)
    for word, change in changes.items():
        recipe = recipe.replace(word, change(settings[word]))
    return recipe


def _absolute(path: str) -> str:
    return path if not path or "://" in path else os.path.abspath(os.path.expanduser(path))


MAX_NAMED = 4


@dataclass(frozen=True)
class Places:
    first: Path
    """Rank 0's folder."""
    own: Path
    """The folder in which this rank records: rank 0's, or one on its own host."""
    is_apart: bool = False
    """Whether this rank does not see rank 0's folder, even if its own has the same path."""
    apart: Mapping[int, tuple[str, str]] = field(default_factory=dict)
    """Host and folder of each rank that does not see rank 0's."""

    def notes(self, host: str) -> list[str]:
        if not self.apart:
            return []
        ranks: dict[tuple[str, str], list[int]] = {}
        for rank, where in self.apart.items():
            ranks.setdefault(where, []).append(rank)
        said = [
            f"{name} keeps the timings of rank {', '.join(map(str, numbers))} in {folder}"
            for (name, folder), numbers in list(ranks.items())[:MAX_NAMED]
        ]
        if len(ranks) > MAX_NAMED:
            said.append(f"{len(ranks) - MAX_NAMED} others in theirs")
        return [
            f"checkpoints are in {self.first / 'checkpoints'} on {host} alone, for no disk with "
            f"that folder is shared: {'; '.join(said)}"
        ]


def find_places(world: World, words: RunConfig, first: Path, mark: str, start_step: int) -> Places:
    """Find each rank's folder; make one on each host that does not see `first`, rank 0's folder.

    All ranks call it. Rows after `start_step`, of an earlier attempt, go. Raises: RunError.
    """
    sees, marks = mark_of(first) == mark, (mark, apart_mark(mark))
    local_folder = first if sees else Path(words.folder or Path("runs", first.name)).absolute()
    if not sees:
        _make(local_folder, first, mark, start_step, world.host)
    said = gather_text(world, "" if sees else json.dumps([world.host, str(local_folder)]))
    # By now, another rank of this host may have made and marked the folder. Or it is rank 0's
    # folder, which a slow shared disk showed late.
    if mark_of(local_folder) not in marks:
        raise RunError(
            f"run.folder {local_folder} exists already on {world.host}, which does not see "
            f"{first} of rank 0; two runs never write into one folder"
        )
    apart = {rank: tuple(json.loads(text)) for rank, text in enumerate(said) if text}
    return Places(first, local_folder, not sees, apart)


def _make(folder: Path, first: Path, mark: str, start_step: int, host: str) -> None:
    try:
        folder.mkdir(parents=True)
        (folder / "timings").mkdir()
        facts = {**describe_environment(), MARK: apart_mark(mark), "folder_of_rank_0": str(first)}
        write_json(folder / ENVIRONMENT, facts)
    except FileExistsError:
        if mark_of(folder) == apart_mark(mark):
            with folder_lock(folder):
                continue_run_folder(folder, start_step)
    except OSError as error:
        raise RunError(f"run.folder {folder} on {host}: {error.strerror}") from error


def make_folder(
    world: World, run: Run, start: Start, about: About, own_code: Mapping[str, str]
) -> Places:
    """Make the run's folder on rank 0, or reset an earlier attempt's folder to the start step.

    All ranks get its path, as do launchers, for a next attempt. Ranks that do not see it make one.
    """
    folder, mark = Path(), ""
    environment: dict[str, object] = {}
    if world.is_first:
        if start.folder is None:
            config = run.recipe.run
            is_own = bool(config.folder) and announce_folder(world, start, Path(config.folder))
            try:
                folder = create_run_folder(config, run.title, is_own)
            except RunError:
                withdraw_folder(world, start)
                raise
        else:
            folder = start.folder
            continue_run_folder(folder, start.step)
        folder = folder.resolve()
        write_atomically(folder / "recipe.toml", to_toml(with_absolute_paths(run.recipe)))
        hosts = list(dict.fromkeys(world.watch.hosts))
        mark = mark_of(folder) or uuid4().hex
        environment = {**describe_environment(), "hosts": hosts, "own_code": own_code, MARK: mark}
        write_json(folder / ENVIRONMENT, environment)
        write_about(folder, about)
        remember_folder(world, start, folder)
    first, mark = json.loads(broadcast_text(world, json.dumps([str(folder), mark])))
    places = find_places(world, run.recipe.run, Path(first), mark, start.step)
    if places.is_apart:
        remember_own_folder(world, start, places.own)
    if world.is_first and places.apart:
        write_json(folder / ENVIRONMENT, {**environment, APART: places.apart})
    return places


def setup_lines(run: Run, learner: Learner, choice: AutoChoice | None) -> list[str]:
    """Return the lines on what will be trained: network, data, workers and exchange."""
    train, ranks, device = run.recipe.train, run.ranks, learner.mesh.world.device
    workers = ranks.in_all or ranks.world_size
    by_ranks = run.route.description if choice is None else choice.reason
    exchange = learner.mode.describe_exchange(run, by_ranks)
    if workers == 1:
        exchange = "none, for one worker"
    return [
        f"network: {run.recipe.model.name}, {learner.findings.num_parameters:,} parameters",
        f"data: {learner.data.description}",
        f"workers: {workers} on {device.type}; batches of {train.global_batch_size} in "
        f"micro-batches of {train.micro_batch_size}, {run.steps:,} steps",
        f"exchange: {exchange}",
    ]


def notes_of(run: Run, learner: Learner, start: Start, plugins: Sequence[Plugin]) -> list[str]:
    recipe, applier = run.recipe, learner.update.applier
    notes = [*learner.data.notes]
    notes += rate_notes(recipe.solver, recipe.train.global_batch_size, run.steps)
    notes += prune_notes(recipe.prune, run.steps)
    notes += idle_settings(recipe).values()
    if recipe.train.ema_decay:
        notes.append(
            f"evaluations take the moving average, train.ema_decay {recipe.train.ema_decay:g}"
        )
    if recipe.run.tuned and not tuned_by(recipe):
        notes.append("run.tuned is left out: its search has ended in another recipe")
    notes += [*start.notes, *decay_notes(applier.optimizer, recipe.solver)]
    notes += [f"plug-in: {name}" for name in plugin_names(plugins)]
    notes += learner.findings.notes(recipe.model)
    notes += [constraint.line for constraint in applier.constraints]
    return notes + [f"warning: {doubt}" for doubt in learner.doubts]


def say_where(world: World, run: Run, places: Places) -> None:
    """On the first rank of each other host, print the host that reports the run, and its folder."""
    hosts = world.watch.hosts
    if hosts[0] != world.host and hosts.index(world.host) == world.rank:
        note = (
            f"; this host does not see it, and records in {places.own}" if places.is_apart else ""
        )
        say(
            f"{run.title}  rank {world.rank} of {world.world_size}; rank 0 on {hosts[0]} tells how "
            f"it goes, and the run folder is {places.first} there{note}"
        )
