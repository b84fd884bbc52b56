"""Trainings of one recipe that should end in the same bits, in folders that are removed."""

import dataclasses
import signal
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import NoReturn

from firecaffe.cluster.agent import SIGNALS
from firecaffe.cluster.hosts import Hosts, check_memory
from firecaffe.cluster.launcher import launch
from firecaffe.cluster.process_settings import handlers_kept
from firecaffe.errors import PreemptedError, RecipeError
from firecaffe.faults import Fault
from firecaffe.files import private_folder, write_atomically
from firecaffe.recipe.checked_recipe import CheckedRecipe, Prepared
from firecaffe.recipe.identity import to_toml
from firecaffe.runs.fault import settle_fault
from firecaffe.training.checks import preflight


@dataclass(frozen=True)
class Twin:
    """One of the trainings that are compared."""

    name: str
    """The user's text: a number of workers, or a layout."""
    workers: int
    recipe: CheckedRecipe


def by_workers(recipe: CheckedRecipe, counts: Iterable[int]) -> list[Twin]:
    return [Twin(str(count), count, recipe) for count in counts]


def check_twins(twins: Iterable[Twin]) -> None:
    """Check twins. Raises: RecipeError for a mode with a server, whose results depend on events;
    what `preflight` raises. The recipe's run.folder is ignored, because each twin gets its own.
    """
    for twin in twins:
        recipe = twin.recipe
        if recipe.synchrony.is_served:
            raise RecipeError(
                f"synchrony.mode {recipe.synchrony.mode} gives other results on other numbers of "
                "workers, which cannot be compared; train it, and firecaffe replay RUN computes it "
                "anew"
            )
        preflight(recipe.replace("run.folder", ""), twin.workers)
        check_memory(twin.workers)


@contextmanager
def folder_of_twins(command: str) -> Iterator[Path]:
    """Make a folder for the runs, and remove it after the block, also if a signal ends that.

    Raises: PreemptedError after a signal, since no checkpoint is left to resume.
    """
    with handlers_kept(SIGNALS) as heard, private_folder(f"firecaffe-{command}-") as folder:
        for number in heard:
            signal.signal(number, _stop)
        try:
            yield folder
        except PreemptedError as error:
            raise PreemptedError(f"stopped on request; {command} begins anew") from error


def _stop(number: int, frame: FrameType | None) -> NoReturn:
    raise PreemptedError(signal.Signals(number).name)


def train_twin(twin: Twin, parent: Path, digests: bool = False) -> Path:
    """Train a twin on local workers; return the run's folder below `parent`."""
    name, recipe = twin.name, twin.recipe
    if name.isdigit():
        name += f"-worker{'s' if twin.workers > 1 else ''}"
    folder, path = parent / name, parent / f"{name}.toml"
    run = dataclasses.replace(recipe.run, folder=str(folder), digests=digests, tensorboard=False)
    of_run = dataclasses.replace(recipe, run=run)
    write_atomically(path, to_toml(of_run))
    hosts = Hosts(twin.workers)
    launch(["train", str(path)], hosts, settle=_without_resume, for_ranks=Prepared(of_run))
    return folder


def _without_resume(folder: Path | None, fault: Fault, then: str) -> Fault:
    return dataclasses.replace(settle_fault(folder, fault, then), can_resume=False)
