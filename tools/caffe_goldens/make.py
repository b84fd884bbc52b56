"""Writes the records: what a real Caffe makes of the cases and of the trainings, as .npz files.

    PYTHON tools/caffe_goldens/make.py [--out FOLDER] [FAMILY …]

PYTHON is one that has a real Caffe: Python 3.9 with PyPI's kendryte-caffe 1.0.0.20210829, numpy
1.23.5 and protobuf below 3.21. Debian's bullseye suite has Python 3.9 (packages python3.9-minimal,
libpython3.9-minimal, libpython3.9-stdlib and libffi7, which can be unpacked with dpkg-deb -x
beside a newer Python; PYTHONHOME then names their usr folder).
    pip download --python-version 3.9 --only-binary :all: kendryte-caffe==1.0.0.20210829 \\
        numpy==1.23.5 "protobuf<3.21"
gives the wheels.

A record's arrays are named CASE:KIND:NAME. Kinds of a case: param, before the pass; head, the
gradient of an output that is no loss; blob and after, blobs and parameters when the forward pass is
over; diff and grad, the gradients of blobs and parameters; weight, of a loss. Kinds of a training:
the iterations that were made.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

import caffe
import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tools.caffe_goldens import layers, losses, nets, solvers  # noqa: E402
from tools.caffe_goldens.cases import Case, drawn  # noqa: E402
from tools.caffe_goldens.record import FOLDER  # noqa: E402

FAMILIES = {**layers.FAMILIES, **losses.FAMILIES, **nets.FAMILIES}
UNNAMED = re.compile(r"_\d+_split_\d+$|^\(automatic\)$|^_")
"""What Caffe itself has put into the net, or a case's stand-in."""

Arrays = dict[str, np.ndarray]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("family", nargs="*", help="else all of them")
    parser.add_argument("--out", type=Path, default=FOLDER)
    options = parser.parse_args()
    caffe.set_mode_cpu()
    for family in options.family or [*FAMILIES, "solvers"]:
        if family == "solvers":
            arrays = trained()
        else:
            arrays = {}
            for case in FAMILIES[family]:
                print(f"{family} {case.name}", flush=True)  # a check that fails ends the process
                for name, value in passed(case).items():
                    arrays[f"{case.name}:{name}"] = np.array(value, np.float32)
        file = options.out / f"{family}.npz"
        np.savez_compressed(file, **arrays)  # type: ignore[arg-type]


def passed(case: Case) -> Arrays:
    """What a forward pass, and a backward one, of a case give."""
    net = loaded(case)
    found: Arrays = {}
    for name in net.inputs:
        net.blobs[name].data[...] = drawn(case, name, tuple(net.blobs[name].shape))
    parameters = {
        f"{layer}/{place}": blob
        for layer, blobs in net.params.items()
        for place, blob in enumerate(blobs)
    }
    for name, blob in parameters.items():
        blob.data[...] = drawn(case, name, tuple(blob.shape))
    for name, blob in parameters.items():
        found[f"param:{name}"] = blob.data.copy()
    net.forward()
    blobs = {name: blob for name, blob in net.blobs.items() if not UNNAMED.search(name)}
    for name, blob in blobs.items():
        found[f"blob:{name}"] = blob.data.copy()
    for name, blob in parameters.items():
        if (blob.data != found[f"param:{name}"]).any():
            found[f"after:{name}"] = blob.data.copy()
    for name, weight in net.blob_loss_weights.items():
        if weight and name in blobs:
            found[f"weight:{name}"] = weight
    if case.passes == "forward":
        return found
    for name in (each for each in net.outputs if each in blobs):
        is_loss = net.blob_loss_weights[name] and blobs[name].count == 1
        if not is_loss and name not in case.headless and name not in net.inputs:
            head = drawn(case, f"{name}/head", tuple(blobs[name].shape))
            blobs[name].diff[...] = found[f"head:{name}"] = head
    net.clear_param_diffs()
    net.backward()
    for name, blob in blobs.items():
        if name not in case.skipped:
            found[f"diff:{name}"] = blob.diff.copy()
    for name, blob in parameters.items():
        found[f"grad:{name}"] = blob.diff.copy()
    return found


def loaded(case: Case) -> Any:
    with tempfile.NamedTemporaryFile("w", suffix=".prototxt") as file:
        file.write(case.stand_in or case.net)
        if case.passes == "force":
            file.write("\nforce_backward: true\n")
        file.flush()
        return caffe.Net(file.name, getattr(caffe, case.phase), stages=list(case.stages))


def trained() -> Arrays:
    """The weights of each training, at the start (of all) and after some iterations."""
    found: Arrays = {}
    for training in solvers.TRAININGS:
        print(f"solvers {training.name}", flush=True)
        with tempfile.TemporaryDirectory() as folder:
            net, solver = Path(folder, "net.prototxt"), Path(folder, "solver.prototxt")
            net.write_text(training.net)
            solver.write_text(f'net: "{net}"\n{training.solver}')
            made = caffe.get_solver(str(solver))
        images, labels = solvers.samples(training)
        made.net.set_input_arrays(images, labels)
        parameters = {
            f"{layer}/{place}": blob
            for layer, blobs in made.net.params.items()
            for place, blob in enumerate(blobs)
        }
        for name, blob in parameters.items():
            blob.data[...] = solvers.start(name, tuple(blob.shape))
            found[f"start:start:{name}"] = blob.data.copy()
        for look in solvers.LOOKS:
            made.step(look - made.iter)
            for name, blob in parameters.items():
                found[f"{training.name}:{look}:{name}"] = blob.data.copy()
    return found


if __name__ == "__main__":
    main()
