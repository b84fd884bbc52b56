"""Readers of Caffe's files."""

import contextlib
import re
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from benchmarks.faults.fuzzed.reader import Reader
from firecaffe.caffe import binary, caffemodel
from firecaffe.caffe.graph import PHASES
from firecaffe.caffe.judge import read_judges
from firecaffe.caffe.net import Net
from firecaffe.caffe.trained import TrainedNet
from firecaffe.errors import FirecaffeError
from firecaffe.from_caffe.recipe import ImportRequest, files_of, read
from tools.caffe_goldens.nets import WHOLE
from tools.caffe_goldens.passes import FAMILIES
from tools.caffe_goldens.solvers import TRAININGS

MADE = Path(__file__).parents[3] / "tests" / "golden" / "caffe" / "files"


def _of_each_type() -> dict[str, bytes]:
    """The first small net that has a layer of a type, for each type."""
    found, types = {}, set[str]()
    for cases in FAMILIES.values():
        for case in cases:
            new = {*re.findall(r'type: "?(\w+)', case.net)} - types
            if new:
                found[f"{case.name}.prototxt"] = case.net.encode()
            types |= new
    return found


LAYERS = _of_each_type()

IMAGES = """
layer { name: "data" type: "ImageData" top: "data" top: "label"
  transform_param { mirror: true crop_size: 10 mean_file: "mean.binaryproto" scale: 0.5 }
  image_data_param { source: "list.txt" batch_size: 4 new_height: 12 new_width: 12 } }
"""

SOLVER = 'net: "net.prototxt" max_iter: 40 test_iter: 2 test_interval: 5 snapshot: 20\n'


def make_layers(folder: Path) -> None:
    for name, net in LAYERS.items():
        (folder / name).write_bytes(net)


def read_layers(folder: Path) -> None:
    """Those that are not as they were made; all if all are."""
    changed = [name for name, net in LAYERS.items() if not _holds(folder / name, net)]
    for name in changed or LAYERS:
        read_net(folder / name)


def _holds(path: Path, content: bytes) -> bool:
    return not path.is_symlink() and path.is_file() and path.read_bytes() == content


def read_net(path: Path) -> None:
    """All that takes a prototxt, each after the other. Raises what the last says if all refuse."""
    readers = (import_from, *_NETS, read_judges)
    refused: list[FirecaffeError] = []
    for each in readers:
        try:
            each(path)
        except FirecaffeError as error:
            refused.append(error)
    if len(refused) == len(readers):
        raise refused[-1]


def import_from(path: Path) -> None:
    imported = read(path, ImportRequest(str(path.parent / "out"), root=str(path.parent)))
    files_of(imported, path)
    list(imported.report.lines())


def _on_meta(make: Callable[[Path], Any]) -> Callable[[Path], None]:
    """A net of the size that the file asks for: what it would take is the file's own."""

    def read(path: Path) -> None:
        with torch.device("meta"):
            make(path)

    return read


_NETS = (
    *(_on_meta(partial(Net, phase=phase)) for phase in PHASES),
    _on_meta(TrainedNet),
)


def make_net(folder: Path) -> None:
    (folder / "net.prototxt").write_text(WHOLE.replace("DATA", IMAGES))
    binary.write_mean(folder / "mean.binaryproto", np.full((3, 12, 12), 7, np.float32))
    Image.new("RGB", (14, 13), (200, 30, 90)).save(folder / "a.png")
    (folder / "list.txt").write_text("a.png 0\n" * 8)


def make_solver(folder: Path) -> None:
    make_net(folder)
    words = " ".join(each.solver for each in TRAININGS if each.name in ("clip", "multistep"))
    (folder / "solver.prototxt").write_text(SOLVER + words)


def copied(name: str) -> Callable[[Path], object]:
    return lambda folder: [shutil.copy(path, folder) for path in MADE.glob(name)]


def each_of(name: str, read: Callable[[Path], object]) -> Callable[[Path], None]:
    """Reads every file; raises what the last refused one says."""

    def all_of(folder: Path) -> None:
        with contextlib.ExitStack() as stack:
            for path in MADE.glob(name):
                stack.callback(read, folder / path.name)

    return all_of


READERS = {
    "prototxt, layers": Reader(make_layers, read_layers),
    "prototxt, a net": Reader(make_net, lambda folder: read_net(folder / "net.prototxt")),
    "prototxt, a solver": Reader(
        make_solver, lambda folder: import_from(folder / "solver.prototxt"), damaged="*.prototxt"
    ),
    "caffemodel": Reader(copied("*.caffemodel"), each_of("*.caffemodel", caffemodel.read)),
    "caffemodel, HDF5": Reader(copied("*.h5"), each_of("*.h5", caffemodel.read)),
    "binaryproto": Reader(copied("*.binaryproto"), each_of("*.binaryproto", binary.read_mean)),
    "solverstate": Reader(
        copied("*.solverstate"), each_of("*.solverstate", binary.read_solverstate)
    ),
}
