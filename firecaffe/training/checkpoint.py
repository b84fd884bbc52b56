"""Checkpoints: the whole state of a training, for any number of workers.

    checkpoints/step-00000100/state.safetensors       parameters, buffers, optimizer state
    checkpoints/step-00000100/compressor.safetensors  what a compressor has kept back, by node
    checkpoints/step-00000100/meta.json               step, recipe identity, scalars
    checkpoints/step-00000100/SHA256SUMS              `sha256sum -c` checks it
    checkpoints/latest                                the name of the newest whole one

A checkpoint is written under another name, synced, digested, renamed, and only then named by
`latest`. Nothing in it belongs to a worker: no generator state (random numbers are keyed), no
sampler state (the order is a function of the step). Nothing is ever unpickled.
"""

import hashlib
import json
import math
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn, optim

from firecaffe.errors import CheckpointError
from firecaffe.runs.files import read_small, sync_file, sync_folder, write_atomically
from firecaffe.training.tensor_file import TensorFile

KEPT_BACK = "compressor.safetensors"
"""Only there if the training has a compressor. Its tensors are never all in memory."""

STATE, META, SUMS, LATEST = "state.safetensors", "meta.json", "SHA256SUMS", "latest"


@dataclass
class Checkpoint:
    """What is saved. `step` updates were done; `history` digests all losses so far."""

    step: int
    identity: dict[str, Any]
    """The words of the recipe that decide bits."""
    probe: str
    history: str
    tensors: dict[str, Tensor]
    scalars: dict[str, Any]
    """Optimizer state that is no tensor."""
    scaler: dict[str, Any]
    """State of the float16 loss scale; empty without one."""
    doubts: list[str] = field(default_factory=list)
    """Why the training so far may not be the bits of other numbers of workers."""
    kept_back: Path | None = None
    """The file of what the compressors of all ranks have kept back. Saving moves it."""
    digest: str = ""
    """Of its SHA256SUMS, once it was read: tells checkpoints apart."""
    folder: Path | None = None
    """From where it was read."""


def state_tensors(model: nn.Module, optimizer: optim.Optimizer) -> dict[str, Tensor]:
    """All tensors that training changes, in network order, each once.

    parameter/NAME, buffer/NAME, optimizer/NAME/KEY. They are the live tensors, not copies.
    """
    tensors = {f"parameter/{name}": p.detach() for name, p in model.named_parameters()}
    tensors |= {f"buffer/{name}": b.detach() for name, b in model.named_buffers()}
    for name, parameter in model.named_parameters():
        for key, value in sorted(optimizer.state.get(parameter, {}).items()):
            if isinstance(value, Tensor):
                tensors[f"optimizer/{name}/{key}"] = value
    return tensors


def state_scalars(model: nn.Module, optimizer: optim.Optimizer) -> dict[str, Any]:
    """The rest of the optimizer's state: numbers and None by NAME/KEY."""
    return {
        f"{name}/{key}": value
        for name, parameter in model.named_parameters()
        for key, value in optimizer.state.get(parameter, {}).items()
        if not isinstance(value, Tensor)
    }


def save_checkpoint(folder: Path, checkpoint: Checkpoint) -> Path:
    """Writes a checkpoint below `folder` and points `latest` to it, for people and scripts.

    Raises: CheckpointError where the disk does not take it; older checkpoints stay whole.
    """
    name = f"step-{checkpoint.step:08d}"
    aside = folder / f".{name}.partial"
    try:
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
        # A view would be saved with all that it is a view of.
        tensors = {
            k: t if t.device.type == "cpu" and _is_whole(t) else t.cpu().contiguous().clone()
            for k, t in checkpoint.tensors.items()
        }
        save_file(tensors, aside / STATE)
        meta = {
            "step": checkpoint.step,
            "identity": checkpoint.identity,
            "probe": checkpoint.probe,
            "history": checkpoint.history,
            "doubts": checkpoint.doubts,
            "scalars": checkpoint.scalars,
            "scaler": checkpoint.scaler,
        }
        (aside / META).write_text(json.dumps(meta, indent=2) + "\n", encoding="utf-8")
        files = [STATE, META]
        if checkpoint.kept_back is not None:
            os.rename(checkpoint.kept_back, aside / KEPT_BACK)
            files.append(KEPT_BACK)
        sums = "".join(f"{_sha256(aside / file)}  {file}\n" for file in files)
        (aside / SUMS).write_text(sums, encoding="utf-8")
        for file in (*files, SUMS):
            sync_file(aside / file)
        sync_folder(aside)
        final, before = folder / name, folder / f".{name}.before.partial"
        shutil.rmtree(before, ignore_errors=True)
        if final.exists():  # left by a save that failed after this point, or by another attempt
            os.rename(final, before)
        os.rename(aside, final)
        shutil.rmtree(before, ignore_errors=True)
        sync_folder(folder)
        write_atomically(folder / LATEST, name + "\n")
    except (OSError, SafetensorError) as error:
        shutil.rmtree(aside, ignore_errors=True)
        raise CheckpointError(f"checkpoint of step {checkpoint.step} not saved: {error}") from error
    return final


def remove_old(folder: Path, keep_last: int) -> None:
    """Removes all checkpoints but the newest `keep_last`; 0 keeps all."""
    if keep_last:
        for old in _by_step(folder)[keep_last:]:
            # First another name: a checkpoint with half of its files is none.
            gone = folder / f".{old.name}.partial"
            os.rename(old, gone)
            shutil.rmtree(gone, ignore_errors=True)


def load_newest(where: Path) -> tuple[Checkpoint, list[str]]:
    """The newest checkpoint that verifies, and why newer ones do not.

    where: a run folder, its checkpoints folder, or a checkpoint, which then is the only one.

    Raises: CheckpointError where there is none.
    """
    if (where / SUMS).is_file():
        return load_checkpoint(where), []
    folder = where / "checkpoints" if (where / "checkpoints").is_dir() else where
    damaged: list[str] = []
    for each in _by_step(folder):
        try:
            return load_checkpoint(each), damaged
        except CheckpointError as error:
            damaged.append(str(error))
    if damaged:
        raise CheckpointError(f"{damaged[0]}; all {len(damaged)} checkpoints there are damaged")
    raise CheckpointError(f"{where}: no checkpoint there (a folder with {SUMS})")


def newest_name(folder: Path) -> str:
    """The path of the newest checkpoint in a folder; empty where there is none."""
    return next((str(path) for path in _by_step(folder)), "")


def _by_step(folder: Path) -> list[Path]:
    """The checkpoints in a folder, whole or not, the newest first."""
    found = [path for path in folder.glob("step-*") if path.is_dir() and not path.is_symlink()]
    return sorted(found, key=lambda path: (len(path.name), path.name), reverse=True)


def load_checkpoint(where: Path) -> Checkpoint:
    """Reads a checkpoint after comparing its digests.

    Raises: CheckpointError where a file is missing, was changed, or is no checkpoint.
    """
    files = verify_checkpoint(where)
    try:
        meta = json.loads(read_small(where / META))
        with safe_open(where / STATE, framework="pt") as file:
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
        return Checkpoint(
            step=int(meta["step"]),
            identity=dict(meta["identity"]),
            probe=str(meta["probe"]),
            history=str(meta["history"]),
            doubts=[str(doubt) for doubt in meta["doubts"]],
            tensors=tensors,
            scalars=dict(meta["scalars"]),
            scaler=dict(meta["scaler"]),
            kept_back=where / KEPT_BACK if KEPT_BACK in files else None,
            digest=_sha256(where / SUMS),
            folder=where,
        )
    except (OSError, ValueError, KeyError, TypeError, RecursionError, SafetensorError) as error:
        raise CheckpointError(f"{where}: is no checkpoint of this program ({error})") from error


def verify_checkpoint(where: Path) -> list[str]:
    """The names of its files. Raises: CheckpointError where a file's SHA-256 is not the one in
    SHA256SUMS.
    """
    try:
        lines = read_small(where / SUMS).removesuffix("\n").split("\n")
        expected = {name: sha for sha, name in (line.split("  ", 1) for line in lines)}
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{where / SUMS}: cannot be read ({error})") from error
    files = [STATE, META, *({KEPT_BACK} & expected.keys())]
    for name in files:
        if not (where / name).is_file():
            raise CheckpointError(f"{where / name}: is missing")
        found = _sha256(where / name)
        if found != expected.get(name):
            raise CheckpointError(
                f"{where / name}: damaged; its SHA-256 is {found[:12]}…, "
                f"SHA256SUMS says {expected.get(name, 'nothing')[:12]}…"
            )
    return files


def restore(checkpoint: Checkpoint, model: nn.Module, optimizer: optim.Optimizer) -> None:
    """Puts a checkpoint's tensors into the model and the optimizer.

    Raises: CheckpointError where names or shapes are not the model's.
    """
    rest = dict(checkpoint.tensors)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            _copy(parameter, rest.pop(f"parameter/{name}", None), name)
        for name, buffer in model.named_buffers():
            _copy(buffer, rest.pop(f"buffer/{name}", None), name)
    parameters = dict(model.named_parameters())
    for key, value in rest.items():
        prefix, _, path = key.partition("/")
        name, _, word = path.rpartition("/")
        if prefix != "optimizer" or name not in parameters:
            raise CheckpointError(f"checkpoint holds {key}, which the model does not have")
        # torch keeps an optimizer's count of steps on the CPU.
        state = value if word == "step" else _like(value, parameters[name])
        optimizer.state[parameters[name]][word] = state
    for path, scalar in checkpoint.scalars.items():
        name, _, word = path.rpartition("/")
        if name not in parameters:
            raise CheckpointError(f"checkpoint holds {path}, which the model does not have")
        optimizer.state[parameters[name]][word] = scalar


def compressor_state(checkpoint: Checkpoint) -> Mapping[str, Tensor]:
    """What the compressors of all ranks had kept back, read as it is asked for."""
    return {} if checkpoint.kept_back is None else TensorFile(checkpoint.kept_back)


def check_identity(checkpoint: Checkpoint, identity: dict[str, Any], steps: int) -> None:
    """steps: at which the recipe ends.

    Raises: CheckpointError where the checkpoint is beyond; else naming the first word of the recipe
    that differs.
    """
    if checkpoint.step > steps:
        raise CheckpointError(
            f"the checkpoint is at step {checkpoint.step}, the recipe ends at step {steps}; "
            "raise train.steps or train.epochs, or resume an earlier one"
        )
    for word in sorted(identity.keys() | checkpoint.identity.keys()):
        saved, asked = checkpoint.identity.get(word), identity.get(word)
        if saved != asked:
            raise CheckpointError(
                f"{word} is {asked!r} in the recipe, {saved!r} in the checkpoint; "
                "it decides bits, so a run cannot go on with another"
            )


def extend_history(history: str, loss: float) -> str:
    """The digest of all losses so far: SHA-256 of the one before and the loss's exact value."""
    exact = loss.hex() if math.isfinite(loss) else repr(loss)
    return hashlib.sha256(f"{history} {exact}".encode()).hexdigest()


def _copy(target: Tensor, source: Tensor | None, name: str) -> None:
    if source is None:
        raise CheckpointError(f"checkpoint lacks {name}, which the model has")
    if source.shape != target.shape or source.dtype != target.dtype:
        raise CheckpointError(
            f"{name} is {source.dtype} {tuple(source.shape)} in the checkpoint, "
            f"{target.dtype} {tuple(target.shape)} in the model"
        )
    target.copy_(source)


def _like(value: Tensor, parameter: Tensor) -> Tensor:
    """Optimizer state as the optimizer would have made it: on the device, in the same layout."""
    if value.shape != parameter.shape:
        return value
    return torch.empty_like(parameter, dtype=value.dtype).copy_(value)


def _is_whole(tensor: Tensor) -> bool:
    return tensor.is_contiguous() and tensor.untyped_storage().nbytes() == tensor.nbytes


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
