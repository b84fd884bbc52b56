"""Exports a run's network to a file for other programs, and checks it before renaming it."""

import contextlib
import io
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from firecaffe.caffe import caffemodel
from firecaffe.caffe.net import Net
from firecaffe.caffe.text import as_text
from firecaffe.caffe.trained import TrainedNet, deployed
from firecaffe.cluster.agree import digest
from firecaffe.errors import NotIdenticalError, RecipeError
from firecaffe.files import atomic_replace, replace_together
from firecaffe.models.extra_state import release_extra_state
from firecaffe.resume_advice import option
from firecaffe.tasks.outputs import prediction_of
from firecaffe.training.tensor_file import save_tensors

# An output may differ by ABSOLUTE times the largest, plus RELATIVE times itself: other kernels add
# in another order.
RELATIVE, ABSOLUTE = 1e-3, 1e-4

RUNS = "onnxruntime does not run"

NEEDED = ("onnx", "onnxscript", "onnxruntime")

# the name of the dimension that may have any length
BATCH = "batch"


@dataclass(frozen=True)
class ExportedFile:
    path: Path
    compared: str
    """A phrase: what the file was compared with, and by how much it differed."""


class PredictionOnly(nn.Module):
    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        release_extra_state(network)  # an exporter cannot trace it
        self.network = network

    def forward(self, inputs: Tensor) -> Tensor:
        return prediction_of(self.network(inputs))


def export_safetensors(network: nn.Module, inputs: Tensor | None, path: Path) -> ExportedFile:
    """Write the state_dict, tied tensors by all names. Raises: OSError; NotIdenticalError."""
    weights = {
        name: tensor.detach().cpu().contiguous().clone()
        for name, tensor in network.state_dict().items()
        if isinstance(tensor, Tensor)
    }
    with atomic_replace(path) as aside:
        save_tensors(weights, aside, {"format": "pt"})
        if digest(sorted(load_file(aside).items())) != digest(sorted(weights.items())):
            raise NotIdenticalError(f"{path}: what was written is not the network's weights")
    return ExportedFile(path, f"{len(weights)} tensors, read again: the same bits")


def export_onnx(network: nn.Module, inputs: Tensor | None, path: Path) -> ExportedFile:
    """Write the network with torch's exporter, and run the file in onnxruntime.

    Raises: RecipeError if a package is missing, or torch cannot export it; NotIdenticalError.
    """
    inputs = _needed(inputs)
    runtime = _onnx()
    predicting = PredictionOnly(network).eval()
    shapes = {"inputs": {0: torch.export.Dim(BATCH)}}
    with atomic_replace(path) as aside:
        with _quiet(), _explained("onnx"):
            program = torch.onnx.export(
                predicting,
                (inputs,),
                input_names=["inputs"],
                output_names=["outputs"],
                dynamic_shapes=shapes,
                dynamo=True,
                verbose=False,
            )
            assert program is not None
            program.save(str(aside), external_data=False)
        with _explained("onnx", RUNS):
            session = runtime.InferenceSession(str(aside), providers=["CPUExecutionProvider"])

        def run(batch: Tensor) -> Tensor:
            with _explained("onnx", RUNS):
                (outputs,) = session.run(["outputs"], {"inputs": batch.numpy()})
            return torch.from_numpy(outputs)

        most = _compare(predicting, run, inputs, path, f"onnxruntime {runtime.__version__}")
    return ExportedFile(path, most)


def export_program(network: nn.Module, inputs: Tensor | None, path: Path) -> ExportedFile:
    """Write the network with torch.export, and load it. Raises: RecipeError; NotIdenticalError."""
    inputs = _needed(inputs)
    predicting = PredictionOnly(network).eval()
    with atomic_replace(path) as aside:
        with _quiet(), _explained("torch_export"):
            program = torch.export.export(
                predicting, (inputs,), dynamic_shapes={"inputs": {0: torch.export.Dim(BATCH)}}
            )
            written = io.BytesIO()  # torch aborts the process if a disk is full
            torch.export.save(program, written)
            aside.write_bytes(written.getbuffer())
        loaded = torch.export.load(aside).module()
        most = _compare(predicting, loaded, inputs, path, "torch.export.load")
    return ExportedFile(path, most)


def export_caffemodel(network: nn.Module, inputs: Tensor | None, path: Path) -> ExportedFile:
    """Write a network imported from Caffe: its weights, and its deploy prototxt of the same name.

    Both are read again and run. Raises: RecipeError if it was not imported; NotIdenticalError.
    """
    if not isinstance(network, TrainedNet):
        raise RecipeError(
            f"{option('to')} caffemodel: the network is {type(network).__name__}, and Caffe has no "
            "layers "
            "for it; networks that were imported go back (model.name = caffe:NET.prototxt)"
        )
    converted = deployed(network)
    text = path.with_suffix(".prototxt")
    with replace_together((text, path)) as (aside_text, aside):
        aside_text.write_text(as_text(converted.net))
        caffemodel.write(aside, converted.layers, converted.net.text("name"))
        again = Net(aside_text, aside)
        seeded = torch.Generator().manual_seed(0)
        samples = torch.rand(again.shapes[again.inputs[0]], generator=seeded)
        was_training = network.training
        with torch.no_grad():
            expected = prediction_of(network.eval()(samples))
            if converted.softmax_axis is not None:
                expected = expected.softmax(converted.softmax_axis)
            answer = again(samples)[converted.output]
        network.train(was_training)
        if not torch.equal(answer, expected):
            raise NotIdenticalError(f"{path}: what was written comes to other outputs; no file")
    return ExportedFile(path, f"with {text}, read again and run: the same bits")


@dataclass(frozen=True)
class Format:
    write: Callable[[nn.Module, Tensor | None, Path], ExportedFile]
    suffix: str
    takes_inputs: bool
    # the suffix of a second file with the same name
    beside: str = ""


FORMATS: Mapping[str, Format] = {
    "safetensors": Format(export_safetensors, ".safetensors", takes_inputs=False),
    "onnx": Format(export_onnx, ".onnx", takes_inputs=True),
    "torch_export": Format(export_program, ".pt2", takes_inputs=True),
    "caffemodel": Format(export_caffemodel, ".caffemodel", takes_inputs=False, beside=".prototxt"),
}


def check_installed(name: str) -> None:
    """Raise RecipeError if a format needs a package that is missing."""
    if name == "onnx":
        _onnx()


def _onnx() -> Any:
    for name in NEEDED:
        try:
            import_module(name)
        except ImportError as error:
            raise RecipeError(
                f"{option('to')} onnx needs {name}, which cannot be imported ({error}); "
                "pip install 'firecaffe[onnx]'"
            ) from error
    return import_module("onnxruntime")


def _needed(inputs: Tensor | None) -> Tensor:
    if inputs is None:
        raise RecipeError("an export of the whole network needs inputs of one tensor")
    return inputs if len(inputs) > 1 else torch.cat([inputs] * 2)  # torch fixes a batch size of 1


def _compare(
    network: nn.Module, other: Callable[[Tensor], Any], inputs: Tensor, path: Path, by: str
) -> str:
    # Also compares one sample, to show that the batch may have another size.
    furthest = 0.0
    for batch in (inputs, inputs[:1]):
        with torch.no_grad():
            expected = network(batch).float()
            (actual,) = tree_leaves(other(batch))
        scale = float(expected.nan_to_num(0, 0, 0).abs().max())
        room = ABSOLUTE * scale + RELATIVE * expected.abs()
        if actual.shape != expected.shape:
            raise NotIdenticalError(
                f"{path}: {by} comes to outputs of shape {tuple(actual.shape)}, the network to "
                f"{tuple(expected.shape)}; no file was written"
            )
        same = torch.isclose(actual.float(), expected, 0, 0, equal_nan=True)  # infinities, too
        apart = (actual.float() - expected).abs().masked_fill(same, 0)
        if not bool((same | (apart <= room)).all()):
            raise NotIdenticalError(
                f"{path}: {by} comes to other outputs than the network, by up to "
                f"{float(apart.max()):.2g} of {scale:.2g}; no file was written"
            )
        furthest = max(furthest, float(apart.max()) / scale if scale else 0.0)
    return (
        f"{by} on {len(inputs)} samples and on one: outputs differ by at most {furthest:.1g} of "
        f"the largest (allowed: {ABSOLUTE:g}, and {RELATIVE:g} of each)"
    )


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


@contextlib.contextmanager
def _explained(name: str, what: str = "torch cannot export") -> Iterator[None]:
    try:
        yield
    except OSError:
        raise
    except Exception as error:  # of many types, because the network may be a user's
        cause: BaseException = error  # torch's outer error is about its export steps
        while cause.__cause__ is not None:
            cause = cause.__cause__
        lines = [line for line in str(cause).splitlines() if line.strip()]
        said = lines[0].strip() if lines else type(cause).__name__
        raise RecipeError(f"{option('to')} {name}: {what} this network: {said:.300}") from error
