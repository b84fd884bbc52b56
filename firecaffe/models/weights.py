"""Initial weights from a file, read without running code, and copied if name and shape fit."""

import re
import zipfile
from collections.abc import Container, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from firecaffe.errors import CheckpointError, RecipeError
from firecaffe.files import sha256_of
from firecaffe.value_checks import some_of

STATE_KEYS = ("state_dict", "model_state_dict", "model")
"""Keys under which programs store a state_dict."""

PREFIXES = ("module.", "_orig_mod.", "model.", "net.", "network.")
"""Prefixes that wrappers add to names: DataParallel, torch.compile, trainers."""

# Estimated statistics replace buffers, a moving average parameters: evaluations used these.
NETWORK_PIECES = ("parameter/", "buffer/", "batch_norm/", "ema/")
"""Prefixes of the network's tensors in a checkpoint; later ones replace earlier ones."""

FCZ = ".fcz"

STATE = "state.safetensors"

MAX_SHOWN = 16

MAX_WRAPPED = 8
"""Maximum wrappers around names or a state_dict, since a file may contain itself."""


@dataclass(frozen=True)
class FirstWeights:
    """The names that were loaded from a file, and those that were not."""

    file: str
    sha256: str
    state_keys: list[str]
    prefix: str
    """Prefix that was removed from the file's names."""
    taken: int
    missing: list[str]
    """Names of the network that the file lacks. These tensors stay as initialized."""
    unexpected: list[str]
    reshaped: dict[str, str]
    """Names with another shape in the file, which stay as initialized; and both shapes."""

    @property
    def line(self) -> str:
        of_network = self.taken + len(self.missing) + len(self.reshaped)
        said = [f"model.weights {self.file}: {self.taken} of the network's {of_network} tensors"]
        reshaped = [f"{name} {shapes}" for name, shapes in self.reshaped.items()]
        for what, names in (
            ("of another shape, left fresh", reshaped),
            ("missing in the file, left fresh", self.missing),
            ("that the network does not have", self.unexpected),
        ):
            if names:
                said.append(f"{len(names)} {what} ({some_of(names)})")
        if self.state_keys:
            said.append(f"the file holds them under {' in '.join(map(repr, self.state_keys))}")
        if self.prefix:
            said.append(f"{self.prefix!r} before the file's names was left out")
        return "; ".join(said)


Outline = dict[str, tuple[list[str], torch.Size]]
"""A network's tensors by name: possible names in a file, several if tied, and the shape."""


def load_weights(network: nn.Module, file: str) -> FirstWeights:
    """Copy a file's tensors into a network, with conversion. Raises RecipeError if none fits."""
    taken, fitting = read_weights(outline_of(network), file)
    named = _named(network)
    with torch.no_grad():
        for name, tensor in fitting.items():
            named[name][1].copy_(tensor)
    return taken


def outline_of(network: nn.Module) -> Outline:
    return {name: (names, tensor.shape) for name, (names, tensor) in _named(network).items()}


def read_weights(
    outline: Outline, file: str, sha256: str = ""
) -> tuple[FirstWeights, dict[str, Tensor]]:
    """Return a report, and the file's tensors that fit, by network names. Raises RecipeError."""
    tensors, state_keys = _read(file)
    known = {name for names, _ in outline.values() for name in names}
    prefix = _prefix(file, tensors, known)
    tensors = {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}
    missing, reshaped, fitting = [], {}, {}
    for first, (names, shape) in outline.items():
        name = next((candidate for candidate in names if candidate in tensors), None)
        if name is None:
            missing.append(first)
        elif kind := _unread_kind(tensors[name]):
            raise RecipeError(
                f"model.weights {file}: {name} is {kind}; expected a dense tensor with its values"
            )
        elif tensors[name].shape == shape:
            fitting[first] = tensors[name]
        else:
            shapes = (_by(sizes) for sizes in (tensors[name].shape, shape))
            reshaped[name] = "{} for {}".format(*shapes)
    if not fitting:
        raise RecipeError(
            f"model.weights {file}: none of its {len(tensors)} tensors fits the network; it has "
            f"{some_of(list(tensors))}, the network {some_of(list(outline))}"
        )
    unexpected = [name for name in tensors if name not in known]
    report = FirstWeights(
        file, sha256, state_keys, prefix, len(fitting), missing, unexpected, reshaped
    )
    return report, fitting


def file_digest(file: str) -> str:
    _check_file(file)
    return sha256_of(file)


def _check_file(file: str) -> None:
    path = Path(file)
    if not path.is_file():
        what = "a folder" if path.is_dir() else "not there"
        raise RecipeError(
            f"model.weights is {file!r}, which is {what}; expected a file of weights, "
            "a run's folder or a checkpoint"
        )


def _read(file: str) -> tuple[dict[str, Tensor], list[str]]:
    _check_file(file)
    path = Path(file)
    try:
        if path.suffix == FCZ:
            return _decoded(path), []
        if path.suffix == ".safetensors":
            return _without_pieces({**load_file(path), **_beside(path)}), []
        is_zip = zipfile.is_zipfile(path)
        held = torch.load(path, map_location="cpu", weights_only=True, mmap=is_zip or None)
    except CheckpointError as error:  # of a .fcz file
        raise RecipeError(f"model.weights {error}") from error
    except OSError as error:
        raise RecipeError(f"model.weights {file}: {error.strerror or error}") from error
    except SafetensorError as error:
        raise RecipeError(
            f"model.weights {file} is no safetensors file, or is cut short: {error}"
        ) from error
    except Exception as error:  # of any kind, since the bytes may be anything
        raise RecipeError(_explain_error(file, error)) from error
    return _tensors(file, held)


def _decoded(path: Path) -> dict[str, Tensor]:
    from firecaffe.compression import fcz  # imported only if it is used: it needs a coder

    with fcz.read(path) as file:
        return {name: torch.from_numpy(array) for name, array in file.tensors()}


def _beside(path: Path) -> dict[str, Tensor]:
    # Pieces that were sharded among ranks are in separate files of the checkpoint.
    if path.name != STATE:
        return {}
    files = {
        piece: path.with_name(piece.removesuffix("/") + path.suffix) for piece in NETWORK_PIECES
    }
    return {
        piece + name: tensor
        for piece, file in files.items()
        if file.is_file()
        for name, tensor in load_file(file).items()
    }


def _explain_error(file: str, error: Exception) -> str:
    code = re.search(r"GLOBAL (\S+)", str(error))
    if code:
        return (
            f"model.weights {file} holds more than tensors ({code[1]}), which would run code when "
            "it is read; save the network's state_dict() alone"
        )
    with open(file, "rb") as opened:
        start = opened.read(MAX_SHOWN)
    reason = f"it begins with {start!r}" if start else "it is empty"
    if isinstance(error, RuntimeError) and str(error):  # torch's messages; others are internal
        reason = str(error).splitlines()[0]
    return (
        f"model.weights {file} is neither a safetensors file nor a .fcz file (whose names end so) "
        f"nor a whole file of torch.save: {reason:.200}"
    )


def _tensors(file: str, held: Any) -> tuple[dict[str, Tensor], list[str]]:
    state_keys: list[str] = []
    while isinstance(held, Mapping) and len(state_keys) < MAX_WRAPPED:
        there = [word for word in STATE_KEYS if isinstance(held.get(word), Mapping) and held[word]]
        if len(there) > 1:
            raise RecipeError(
                f"model.weights {file} holds weights under {' and under '.join(map(repr, there))}; "
                "expected one of them: save that state_dict alone"
            )
        if not there:
            break
        state_keys.append(there[0])
        held = held[there[0]]
    tensors = {}
    if isinstance(held, Mapping):
        tensors = {str(name): tensor for name, tensor in held.items() if isinstance(tensor, Tensor)}
    if not tensors:
        what = f"a {type(held).__name__}"
        if isinstance(held, Mapping) and held:
            what += f" of {some_of(list(map(str, held)))}"
        *others, last = map(repr, STATE_KEYS)
        raise RecipeError(
            f"model.weights {file} holds no tensors by name but {what}; expected a state_dict, or "
            f"one under {', '.join(others)} or {last}"
        )
    return tensors, state_keys


def _without_pieces(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    if not all("/" in name for name in tensors):  # names of a module's tensors have no slash
        return tensors
    return {
        name.removeprefix(piece): tensor
        for piece in NETWORK_PIECES
        for name, tensor in tensors.items()
        if name.startswith(piece)
    }


def _named(network: nn.Module) -> dict[str, tuple[list[str], Tensor]]:
    # Tied tensors have several names in the state_dict.
    module_names = {
        id(tensor): n for n, tensor in (*network.named_parameters(), *network.named_buffers())
    }
    named: dict[str, tuple[list[str], Tensor]] = {}
    for name, tensor in network.state_dict(keep_vars=True).items():
        if isinstance(tensor, Tensor):
            named.setdefault(module_names.get(id(tensor), name), ([], tensor))[0].append(name)
    return named


def _prefix(file: str, tensors: Mapping[str, Tensor], names: Container[str]) -> str:
    tried, longest = [""], [""]
    for _ in range(MAX_WRAPPED):
        longer = [before + part for before in longest for part in PREFIXES]
        longest = [
            candidate for candidate in longer if any(name.startswith(candidate) for name in tensors)
        ]
        tried += longest

    def fitting(prefix: str) -> int:
        return sum(name.startswith(prefix) and name[len(prefix) :] in names for name in tensors)

    counts = {prefix: fitting(prefix) for prefix in tried}
    most = max(counts.values())
    best = [prefix for prefix, count in counts.items() if count == most]
    if most and "" not in best and len(best) > 1:
        raise RecipeError(
            f"model.weights {file} has {most} names of the network after {best[0]!r}, and as many "
            f"after {best[1]!r}; expected one of them: save that network's state_dict alone"
        )
    return best[0]  # empty if nothing fits


def _unread_kind(tensor: Tensor) -> str:
    if tensor.is_nested or tensor.layout != torch.strided:
        return "nested" if tensor.is_nested else "sparse"
    if tensor.is_quantized or tensor.is_complex():
        return "quantized" if tensor.is_quantized else "complex"
    return "without values" if tensor.is_meta else ""


def _by(shape: torch.Size) -> str:
    return "x".join(map(str, shape)) or "a number"
