"""The folder of a run. One run writes into it, and continues in it after a restart.

docs/reference/run_folder.md lists its files. A host that does not see rank 0's folder has its own,
with its environment, the timings of its ranks and the faults that it learns of; see
training.training_folder.
"""

import json
import os
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from firecaffe.errors import RunError
from firecaffe.files import atomic_replace, remove_if_exists
from firecaffe.runs.schemas import SCHEMAS, DigestsRow, LossRow, RecipeWords, StepRow, WeightsRow
from firecaffe.schema import parse_toml, read_file, read_rows

RECIPE, FORECAST = "recipe.toml", "forecast.json"
ENVIRONMENT = "environment.json"
METRICS, WEIGHTS, DIGESTS = "metrics.jsonl", "weights.jsonl", "digests.jsonl"


@dataclass(frozen=True)
class RunConfig:
    """The folder of the run, and its records.

    Args:
        folder: Folder of this run, which must not exist. Empty: a new one below `runs`.
        tensorboard: Write TensorBoard events.
        loggers: Services to which the numbers are sent as well: wandb, mlflow.
        digests: Write digests of all tensors after each step (`firecaffe verify` does).
        cluster: The cluster for which the run is forecast: a file written by `firecaffe check`, or
            a name that `firecaffe plan` knows. Empty: a shipped one with this device; for several
            hosts without GPUs there is none.
        tuned: The search for the learning rate, as `firecaffe tune` writes it into its recipe; it
            has no effect if the recipe was changed afterwards. Empty: none.
    """

    folder: str = ""
    tensorboard: bool = True
    loggers: list[str] = field(default_factory=list)
    digests: bool = False
    cluster: str = ""
    tuned: str = ""


def create_run_folder(config: RunConfig, name: str, is_own: bool = False) -> Path:
    """Create a new run's folder. `is_own`: this run may have begun it already. Raises RunError."""
    if os.fsencode(config.folder) != config.folder.encode(errors="replace"):
        raise RunError(
            f"run.folder {config.folder} is no UTF-8, and safetensors opens no such files; choose "
            "another"
        )
    try:
        if config.folder:
            folder = Path(config.folder)
            folder.mkdir(parents=True, exist_ok=is_own)
        else:
            folder = _first_free(Path("runs"), f"{time.strftime('%Y%m%d-%H%M%S')}-{name}")
        (folder / "timings").mkdir(exist_ok=is_own)
        (folder / "checkpoints").mkdir(exist_ok=is_own)
    except FileExistsError:
        raise folder_exists_error(config.folder) from None
    except OSError as error:
        raise RunError(f"run.folder {config.folder or 'runs'}: {error.strerror}") from error
    return folder


def folder_exists_error(folder: str) -> RunError:
    is_over = (Path(folder) / "result.json").is_file()  # as a host sees it that comes too late
    return RunError(
        f"run.folder {folder} exists already{', with a run that is over' if is_over else ''}; give "
        "another, for two runs never write into one folder"
    )


def _first_free(parent: Path, name: str) -> Path:
    parent.mkdir(parents=True, exist_ok=True)
    for number in range(1, 1000):
        folder = parent / (name if number == 1 else f"{name}-{number}")
        try:
            folder.mkdir()
            return folder
        except FileExistsError:
            continue
    raise FileExistsError(parent / name)


def continue_run_folder(folder: Path, step: int) -> None:
    """Cut the records after a step, because later steps are computed again. Raises RunError.

    Also remove the remains of checkpoints that a killed attempt was writing or removing.
    """
    records = [folder / name for name in (METRICS, WEIGHTS, DIGESTS)]
    try:
        for path in (folder / "checkpoints").glob(".*.partial"):
            if ".before." not in path.name:  # keep a whole checkpoint, perhaps the only one
                remove_if_exists(path)
        for path in [*records, *(folder / "timings").glob("*.jsonl")]:
            if path.is_file():
                with atomic_replace(path) as aside, open(aside, "w", encoding="utf-8") as file:
                    for row in read_rows(path, StepRow):
                        if row["step"] <= step:
                            file.write(json.dumps(row) + "\n")
    except OSError as error:
        raise RunError(f"{folder}: its records cannot be gone on with ({error})") from error


def read_run_file(folder: Path, name: str, kind: Any = None) -> dict[str, Any]:
    """Read a JSON file of a run by `kind`, or `SCHEMAS`. Raises RunError if missing or damaged."""
    _check_is_there(folder)
    absent = f"no {name}; the run did not finish, or this is no run"
    kind = kind or SCHEMAS.get(name, dict[str, Any])
    return {**read_file(folder / name, kind, RunError, absent=absent)}


def read_run_recipe(folder: Path) -> dict[str, Any]:
    """Read a recipe's sections. Raises RunError if it is missing or damaged."""
    _check_is_there(folder)
    absent = f"no {RECIPE}; this is no run folder"
    return {**read_file(folder / RECIPE, RecipeWords, RunError, parse_toml, absent=absent)}


def recorded_section(folder: Path, section: str) -> dict[str, Any]:
    """Return a section of a run's recipe; empty if there is none. Raises RunError."""
    is_there = (folder / RECIPE).exists()
    return read_run_recipe(folder).get(section, {}) if is_there else {}


def _check_is_there(folder: Path) -> None:
    if not folder.is_dir():
        raise RunError(f"{folder}: there is no run")


MARK = "run"
"""The key of environment.json whose value identifies a run."""

APART = "apart"
"""The key of rank 0's environment.json: host and folder of timings elsewhere, by rank."""


def mark_of(folder: Path) -> str:
    """Return the mark of a folder's run; empty if there is none, or it is not visible here."""
    try:
        return str(read_run_file(folder, ENVIRONMENT).get(MARK, ""))
    except RunError:
        return ""


def apart_mark(mark: str) -> str:
    """Return the mark of a folder on a host that does not see rank 0's folder."""
    return f"{mark} apart"


def elsewhere(folder: Path, here: Iterable[int]) -> list[str]:
    """Describe where timings of ranks other than `here` are. Raises RunError."""
    if not (folder / ENVIRONMENT).is_file():
        return []
    known, places = set(here), dict[tuple[str, str], list[str]]()
    for rank, (host, place) in read_run_file(folder, ENVIRONMENT).get(APART, {}).items():
        if int(rank) not in known:
            places.setdefault((host, place), []).append(rank)
    return [
        f"timings of rank {', '.join(ranks)} are on {host} in {place}/timings; copied to "
        f"{folder}/timings they are counted, too"
        for (host, place), ranks in places.items()
    ]


@dataclass(frozen=True)
class Recorded:
    losses: dict[int, float | None]
    """The mean loss of each step, counted from 1; None if it was not finite."""
    weights: dict[int, str]
    """The SHA-256 of all parameters and buffers, after evaluations and checkpoints."""
    tensors: dict[int, dict[str, str]]
    """The digests of the state's tensors and of the losses, by step and name, if run.digests."""

    @property
    def last(self) -> int:
        return max(self.losses, default=0)


def recorded_of(folder: Path) -> Recorded:
    losses = read_rows(folder / METRICS, LossRow, holding=b'"train"')
    weights = read_rows(folder / WEIGHTS, WeightsRow)
    tensors = read_rows(folder / DIGESTS, DigestsRow)
    return Recorded(
        losses={row["step"]: row["loss"] for row in losses if row["kind"] == "train"},
        weights={row["step"]: row["sha256"] for row in weights},
        tensors={row["step"]: row["tensors"] for row in tensors},
    )


@dataclass(frozen=True)
class FirstDifference:
    step: int
    """Counted from 1."""
    tensor: str


def first_difference(run: Path, other: Path) -> FirstDifference | None:
    """Compare the digests of two runs, which need equal steps and tensors. Raises RunError."""
    for folder in (run, other):
        if not (folder / DIGESTS).exists():
            raise RunError(f"{run}, {other}: no digests of both (no {folder / DIGESTS})")
    rows, other_rows = (list(read_rows(folder / DIGESTS, DigestsRow)) for folder in (run, other))
    for row, other_row in zip(rows, other_rows, strict=False):
        tensors, other_tensors = row["tensors"], other_row["tensors"]
        if row["step"] != other_row["step"] or tensors.keys() != other_tensors.keys():
            raise RunError(f"{run} and {other} did not train the same tensors at the same steps")
        for name, value in tensors.items():
            if value != other_tensors[name]:
                return FirstDifference(row["step"], name)
    if len(rows) != len(other_rows):
        raise RunError(f"{run} has {len(rows)} steps, {other} has {len(other_rows)}")
    return None
