"""Checkpoints: the whole state of a training, for any number of workers.

    checkpoints/step-00000100/state.safetensors       parameters, buffers, optimizer state
    checkpoints/step-00000100/compressor.safetensors  a compressor's memory; one for each fragment
    checkpoints/step-00000100/meta.json               step, recipe identity, numbers
    checkpoints/step-00000100/SHA256SUMS              `sha256sum -c` checks it
    checkpoints/latest                                the name of the newest whole one
    checkpoints/best                                  the name of the best, if one is kept
    checkpoints/good                                  that of the lowest loss, in some modes

A checkpoint is written under another name, synced, digested and renamed; only then does `latest`
name it. Nothing in it belongs to a worker: random numbers are keyed, and the order of samples is a
function of the step. Nothing is ever unpickled. `training.state` says which file has which tensors.
"""

import json
import os
import re
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, TypedDict

from torch import Tensor

from firecaffe.errors import CheckpointError, UnfitCheckpointError
from firecaffe.files import (
    read_small,
    remove_if_exists,
    sha256_of,
    sync_file,
    sync_folder,
    write_atomically,
)
from firecaffe.recipe.sections import Recipe, flatten
from firecaffe.schema import Count, checked, read_file
from firecaffe.solvers.rate_policy import LENGTH_DEPENDENT
from firecaffe.synchrony.rounds import Rounds
from firecaffe.training.tensor_file import InMemory, Stored, TensorFile, save_tensors
from firecaffe.user_code import wherever

FILE_NAME = r"[\w.-]{1,200}"

STATE, META, SUMS = "state.safetensors", "meta.json", "SHA256SUMS"
LATEST, BEST, GOOD = "latest", "best", "good"
POINTERS = LATEST, BEST, GOOD
SUFFIX = ".safetensors"


class Meta(TypedDict):
    step: Count
    identity: dict[str, Any]
    probe: str
    history: str
    doubts: list[str]


WORDS: tuple[Any, ...] = tuple(Meta.__annotations__)


@dataclass
class Checkpoint:
    """The saved state of a training after `step` updates. `history` digests all losses so far."""

    step: int
    identity: dict[str, Any]
    """The settings of the recipe that decide bits."""
    probe: str
    history: str = ""
    tensors: Stored = field(default_factory=lambda: InMemory({}))
    """The tensors that all ranks hold, by PIECE/NAME."""
    numbers: dict[str, dict[str, Any]] = field(default_factory=dict)
    """State that is not tensors, by key in meta.json: optimizer scalars, the loss scale."""
    doubts: list[str] = field(default_factory=list)
    """Reasons why other numbers of workers may have computed other bits so far."""
    piece_files: dict[str, Path] = field(default_factory=dict)
    """The file of each piece that ranks hold in parts, by piece name. Saving moves these files."""
    # of SHA256SUMS; empty unless the checkpoint was read from a folder
    digest: str = ""
    folder: Path | None = None
    copies: list[IO[bytes]] = field(default_factory=list)
    """Open, unnamed files: copies of piece files that lie on another host."""


def save_checkpoint(folder: Path, checkpoint: Checkpoint) -> Path:
    """Write a checkpoint and update `latest`. Raises: CheckpointError; older ones stay intact."""
    name = checkpoint_name(checkpoint.step)
    aside = folder / f".{name}.partial"
    try:
        remove_if_exists(aside)
        folder.mkdir(exist_ok=True)  # without parents: a deleted run folder stays deleted
        aside.mkdir()
        # Saving a view would save its whole storage.
        tensors = {
            k: t if t.device.type == "cpu" and _is_whole(t) else t.cpu().contiguous().clone()
            for k, t in checkpoint.tensors.items()
        }
        save_tensors(tensors, aside / STATE)
        meta = {word: getattr(checkpoint, word) for word in WORDS} | checkpoint.numbers
        (aside / META).write_text(json.dumps(meta, indent=2) + "\n", encoding="utf-8")
        files = [STATE, META]
        for piece, path in checkpoint.piece_files.items():
            files.append(piece + SUFFIX)
            os.rename(path, aside / files[-1])
        sums = "".join(f"{sha256_of(aside / file)}  {file}\n" for file in files)
        (aside / SUMS).write_text(sums, encoding="utf-8")
        for file in (*files, SUMS):
            sync_file(aside / file)
        sync_folder(aside)
        final, before = folder / name, folder / f".{name}.before.partial"
        remove_if_exists(before)
        if final.exists():  # from a save that failed after this point, or another attempt
            os.rename(final, before)
        os.rename(aside, final)
        shutil.rmtree(before, ignore_errors=True)
        sync_folder(folder)
        write_atomically(folder / LATEST, name + "\n")
    except OSError as error:
        shutil.rmtree(aside, ignore_errors=True)
        raise CheckpointError(f"checkpoint of step {checkpoint.step} not saved: {error}") from error
    return final


def remove_old(folder: Path, keep_last: int) -> None:
    """Remove all checkpoints but the newest `keep_last` and the marked ones; 0 keeps all."""
    if keep_last:
        marked = [_named_by(folder / mark) for mark in (BEST, GOOD)]
        for old in (path for path in _by_step(folder)[keep_last:] if path not in marked):
            # Renamed first: nobody may see a checkpoint with half of its files.
            gone = folder / f".{old.name}.partial"
            os.rename(old, gone)
            shutil.rmtree(gone, ignore_errors=True)


def mark_checkpoint(folder: Path, mark: str, step: int) -> None:
    """Point `best` or `good` to a step's checkpoint, which is then kept. Raises: OSError."""
    write_atomically(folder / mark, checkpoint_name(step) + "\n")


def checkpoint_name(step: int) -> str:
    return f"step-{step:08d}"


def _named_by(pointer: Path) -> Path | None:
    try:
        name = read_small(pointer).strip()
    except (OSError, ValueError):
        return None
    return pointer.parent / name if name.startswith("step-") and "/" not in name else None


def best_step(run: Path) -> int | None:
    best = _named_by(run / "checkpoints" / BEST)
    number = "" if best is None or not best.is_dir() else best.name.removeprefix("step-")
    return int(number) if number.isdecimal() else None


def load_newest(where: Path) -> tuple[Checkpoint, list[str]]:
    """Load the newest checkpoint that verifies, and return why newer ones do not.

    where: a run folder, its checkpoints folder, one checkpoint, or a file that names one: `latest`,
    `best` or `good`. Raises: CheckpointError if there is none.
    """
    if where.name in POINTERS:
        where = _named_by(where) or where
    if (where / SUMS).is_file():
        return load_checkpoint(where), []
    folder = where / "checkpoints" if (where / "checkpoints").is_dir() else where
    damaged: list[str] = []
    for path in _by_step(folder):
        try:
            return load_checkpoint(path), damaged
        except CheckpointError as error:
            if not path.is_dir():  # a run in progress has removed it, and has newer ones
                return load_newest(where)
            damaged.append(str(error))
    if damaged:
        raise CheckpointError(f"{damaged[0]}; all {len(damaged)} checkpoints there are damaged")
    raise UnfitCheckpointError(f"{where}: no checkpoint there (a folder with {SUMS})")


def has_checkpoints(where: Path) -> bool:
    """Whether `where`, as for `load_newest`, names checkpoints, damaged or not."""
    if where.name in POINTERS:
        where = _named_by(where) or where
    folder = where / "checkpoints" if (where / "checkpoints").is_dir() else where
    return (where / SUMS).is_file() or bool(_by_step(folder))


def good_checkpoint(folder: Path, resumed: Path | None) -> str:
    """Return the path of the checkpoint marked good, or of the newest; empty if there is none.

    resumed: where the run began. It counts, too, as does the one marked good beside it.
    """
    folders = [folder] if resumed is None else [folder, resumed.parent]
    marked = (_named_by(one / GOOD) for one in folders)
    good = next((path for path in marked if path is not None and path.is_dir()), None)
    return str(good or next(iter(_by_step(folder)), resumed) or "")


def _by_step(folder: Path) -> list[Path]:
    folders = [path for path in folder.glob("step-*") if path.is_dir() and not path.is_symlink()]
    return sorted(folders, key=lambda path: (len(path.name), path.name), reverse=True)


def load_checkpoint(where: Path) -> Checkpoint:
    """Verify and read a checkpoint. Raises: CheckpointError if it is damaged or incomplete."""
    piece_files = [name for name in verify_checkpoint(where) if name not in (STATE, META)]
    # Numbers may be infinite. Python's json writes and reads infinities, which standard JSON lacks.
    meta: dict[str, Any] = {**read_file(where / META, Meta, CheckpointError, json.loads)}
    numbers: Any = {word: values for word, values in meta.items() if word not in WORDS}
    try:
        checked(numbers, dict[str, dict[str, Any]])
    except ValueError as error:
        raise CheckpointError(f"{where / META}: cannot be read ({error})") from error
    return Checkpoint(
        **{word: meta[word] for word in WORDS},
        tensors=TensorFile(where / STATE),
        numbers=numbers,
        piece_files={name.removesuffix(SUFFIX): where / name for name in piece_files},
        digest=sha256_of(where / SUMS),
        folder=where,
    )


def verify_checkpoint(where: Path) -> list[str]:
    """Compare all SHA-256 sums and return the names of the files. Raises: CheckpointError."""
    try:
        lines = read_small(where / SUMS).removesuffix("\n").split("\n")
        expected = {name: sha for sha, name in (line.split("  ", 1) for line in lines)}
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{where / SUMS}: cannot be read ({error})") from error
    files = list(dict.fromkeys([STATE, META, *expected]))
    for name in files:
        if not re.fullmatch(FILE_NAME, name):
            raise CheckpointError(f"{where / SUMS}: {name!r:.80} is no name of a checkpoint's file")
        if not (where / name).is_file():
            raise CheckpointError(f"{where / name}: is missing")
        digest = sha256_of(where / name)
        if digest != expected.get(name):
            raise CheckpointError(
                f"{where / name}: damaged; its SHA-256 is {digest[:12]}…, "
                f"SHA256SUMS says {expected.get(name, 'nothing')[:12]}…"
            )
    return files


def check_identity(checkpoint: Checkpoint, identity: dict[str, Any], steps: int) -> None:
    """Raise UnfitCheckpointError if a recipe that ends at step `steps` cannot resume a checkpoint.

    If one of the two lacks a setting, it is older than this setting, and used the default.
    """
    if checkpoint.step > steps:
        raise UnfitCheckpointError(
            f"the checkpoint is at step {checkpoint.step}, the recipe ends at step {steps}; "
            "raise train.steps or train.epochs, or resume an earlier one"
        )
    defaults = flatten(Recipe())
    for word in sorted(identity.keys() | checkpoint.identity.keys()):
        default = defaults.get(word)
        saved, asked = checkpoint.identity.get(word, default), identity.get(word, default)
        if wherever(word, saved) != wherever(word, asked):
            raise UnfitCheckpointError(
                f"{word} is {asked!r} in the recipe, {saved!r} in the checkpoint; "
                f"it decides bits, so a run cannot go on with another{_of_length(word, identity)}"
            )


def _of_length(word: str, identity: dict[str, Any]) -> str:
    policy = identity.get("solver.lr_policy")
    if word != "train.steps" or policy not in LENGTH_DEPENDENT:
        return ""
    return f" (solver.lr_policy {policy} spans the planned steps)"


def check_whole(checkpoint: Checkpoint, rounds: Rounds) -> None:
    """Raise UnfitCheckpointError if the checkpoint is within a round of the recipe's replicas."""
    if checkpoint.step and not rounds.is_whole(checkpoint.step):
        last = rounds.last_whole(checkpoint.step)
        raise UnfitCheckpointError(
            f"the checkpoint is at step {checkpoint.step}, the end of a training whose last round "
            f"was cut short: a longer one averages its replicas after step {last} and then later; "
            "resume an earlier checkpoint"
        )


def sums_digest(where: Path) -> str:
    """Return the digest of a checkpoint's SHA256SUMS; empty if this host does not see the file."""
    try:
        return sha256_of(where / SUMS)
    except OSError:
        return ""


def _is_whole(tensor: Tensor) -> bool:
    return tensor.is_contiguous() and tensor.untyped_storage().nbytes() == tensor.nbytes
