"""Trainings of one recipe, by workers or layouts, that should end in the same bits."""

import dataclasses
import re
import signal
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from firecaffe.cluster.agent import SIGNALS
from firecaffe.cluster.hosts import Hosts, check_memory
from firecaffe.cluster.launcher import launch
from firecaffe.cluster.process_settings import handlers_kept
from firecaffe.errors import PreemptedError, RecipeError
from firecaffe.faults import Fault
from firecaffe.files import private_folder, write_atomically
from firecaffe.parallel.config import ONE_WEIRD_TRICK, ParallelConfig
from firecaffe.recipe.checked_recipe import CheckedRecipe, Prepared, check_recipe
from firecaffe.recipe.sections import Recipe, to_toml
from firecaffe.resume_advice import option
from firecaffe.runs.fault import settle_fault
from firecaffe.training.checks import preflight

SCHEMES: dict[str, Any] = {"model": "none", "trick": ONE_WEIRD_TRICK}
"""`ParallelConfig.scheme` of the layouts in which several workers share a model."""

NUMBER = r"([1-9]\d{0,3})"
LAYOUT = re.compile(rf"(1)|(?:data|shards)={NUMBER}|(model|trick|stages)=(?:{NUMBER}x)?{NUMBER}")
STAGES, SHARDS = "stages", "shards"


@dataclass(frozen=True)
class Twin:
    name: str
    """The user's text: a number of workers, or a layout."""
    workers: int
    recipe: CheckedRecipe


def by_workers(recipe: CheckedRecipe, counts: Iterable[int]) -> list[Twin]:
    return [Twin(str(count), count, recipe) for count in counts]


def layouts_of(text: str, recipe: Recipe) -> list[Twin]:
    """Return the recipe in each of the layouts, which must give the same bits.

    Raises RecipeError for an unknown layout, or if the recipe neither splits a layer nor names
    stages nor updates in shards.
    """
    parallel, exchange = recipe.parallel, recipe.exchange
    in_shards, is_whole = exchange.in_shards, parallel.is_whole
    matches = {name: _layout(name) for name in text.split(",")}
    if is_whole and not in_shards:
        raise RecipeError(
            f"{option('layouts')}: the recipe splits no layer and names no stages; say parallel."
            "split, parallel.scheme one_weird_trick, parallel.stages, or exchange.update_at shards"
        )
    twins: dict[str, Twin] = {}
    for name, match in matches.items():
        one, data, kind, rows, columns = match.groups()
        size = (1, 1) if one else (int(data), 1) if data else (int(rows or 1), int(columns))
        is_shared = name.startswith(SHARDS)
        if is_shared and not in_shards:
            raise RecipeError(
                f"{option('layouts')} has shards, but exchange.update_at is all; say shards"
            )
        if kind is not None and is_whole:
            raise RecipeError(
                f"{option('layouts')} has {kind}, but the recipe has "
                "exchange.update_at shards; say shards=D"
            )
        update_at: Any = SHARDS if is_shared or (in_shards and kind is not None) else "all"
        twin = dataclasses.replace(
            recipe,
            parallel=parallel if is_whole else _over(parallel, kind, *size),
            exchange=dataclasses.replace(exchange, update_at=update_at),
        )
        twins[name] = Twin(name, size[0] * size[1], check_recipe(twin))
    if len(twins) < 2:
        raise RecipeError(
            f"{option('layouts')} is {text!r}; verify compares two or more, as 1,model=2x2"
        )
    return list(twins.values())


def _layout(name: str) -> re.Match[str]:
    match = LAYOUT.fullmatch(name)
    if match is None:
        raise RecipeError(
            f"{option('layouts')} has {name!r}; a layout is 1, data=D, shards=D, model=K, trick=K "
            "or stages=K, or of D models model=DxK and so on, as in 1,data=4,model=2x2"
        )
    return match


def _over(config: ParallelConfig, kind: str | None, data: int, size: int) -> ParallelConfig:
    """Return [parallel] for a layout; `kind` is None if each worker holds a whole model."""
    if kind == STAGES:
        if not config.stages:
            raise RecipeError(
                f"{option('layouts')} has stages, but the recipe has no parallel.stages"
            )
        return config.in_stages(data, size)
    parallel = config.over(data, size)
    if kind is None and not config.is_split:
        return parallel
    if kind is not None and not config.is_split:
        raise RecipeError(
            f"{option('layouts')} has {kind}, but the recipe has parallel.stages and splits no "
            "layer; say stages=K"
        )
    if kind is not None:
        parallel = dataclasses.replace(parallel, scheme=SCHEMES[kind])
    if not parallel.is_split:
        raise RecipeError(
            f"{option('layouts')}: parallel.split does not say which layers are split, and "
            "one_weird_trick's own choice is for trick alone; say parallel.split"
        )
    return parallel


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
