"""The run folder: one run writes into it, once.

recipe.toml        the recipe, every word resolved
environment.json   hardware, versions, commit
metrics.jsonl      a line for each step and each evaluation
timings/rank-R.jsonl   where the time of each step went, on each rank
tensorboard/       the same curves as TensorBoard events
checkpoints/       see train.checkpoint
digests.jsonl      digests of all tensors after each step, where asked for
result.json        written last: a run without it did not finish
"""

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from firecaffe.errors import RunError


@dataclass(frozen=True)
class RunConfig:
    """Where the run is recorded.

    Args:
        folder: Folder of this run, which must not exist. Empty: a new one below `runs`.
        tensorboard: Write TensorBoard events.
        digests: Write digests of all tensors after each step (`firecaffe verify` does).
    """

    folder: str = ""
    tensorboard: bool = True
    digests: bool = False


def create_run_folder(config: RunConfig, name: str) -> Path:
    """Makes the folder of a new run; whoever makes it owns it.

    Raises: RunError where it exists already or cannot be made.
    """
    try:
        if config.folder:
            folder = Path(config.folder)
            folder.mkdir(parents=True)
        else:
            folder = _first_free(Path("runs"), f"{time.strftime('%Y%m%d-%H%M%S')}-{name}")
        (folder / "timings").mkdir()
        (folder / "checkpoints").mkdir()
    except FileExistsError:
        raise RunError(
            f"run.folder {config.folder} exists already; two runs never write into one folder"
        ) from None
    except OSError as error:
        raise RunError(f"run.folder {config.folder or 'runs'}: {error.strerror}") from error
    return folder


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


def read_run_file(folder: Path, name: str) -> dict[str, Any]:
    """One of a run's JSON files.

    Raises: RunError where the folder is no finished run or the file is damaged.
    """
    path = folder / name
    if not folder.is_dir():
        raise RunError(f"{folder}: there is no such run folder")
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise RunError(f"{folder}: no {name}; the run did not finish, or this is no run") from None
    except (OSError, ValueError) as error:
        raise RunError(f"{path}: cannot be read ({error})") from error
    if not isinstance(value, dict):
        raise RunError(f"{path}: holds no JSON object")
    return value
