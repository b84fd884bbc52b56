"""What a real Caffe makes of a net: the shape of every blob, and of every parameter, as JSON.

    python shapes.py NET.prototxt [--phase TRAIN] [--input data=1,3,224,224] [--image 3,224,224]

It runs under the Python of a real Caffe (see make.py). Nothing is read but the net: layers that
read data are replaced by inputs. Their shape is that of --input, else batch_size and crop_size say
it (three channels), else --image does. Fillers are left out, which changes no shape.

Printed: phase; inputs and blobs, each by its name; params, the shapes of the blobs of each layer;
count, of numbers in them, with shared ones counted once. Where Caffe does not take the net: error,
its line, and the exit code is 1.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from typing import Any

SPLIT = re.compile(r"_\d+_split_\d+$")
"""How Caffe names what it inserts where two layers read one blob."""
DATA = {"Data", "ImageData", "HDF5Data", "MemoryData", "WindowData"}
V1_DATA = {"DATA", "IMAGE_DATA", "HDF5_DATA", "MEMORY_DATA", "WINDOW_DATA"}
V0_DATA = {"data", "images", "hdf5_data", "memory_data", "window_data"}

Shapes = dict[str, list[int]]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("net")
    parser.add_argument("--phase", choices=["TRAIN", "TEST"], default="TEST")
    parser.add_argument("--stage", action="append", default=[])
    parser.add_argument("--level", type=int, default=0)
    parser.add_argument("--input", action="append", default=[], metavar="BLOB=N,C,H,W")
    parser.add_argument("--image", metavar="C,H,W", help="of data layers that do not say it")
    parser.add_argument("--batch", type=int, help="instead of what data layers say")
    parser.add_argument("--inside", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.inside:
        inside(options)
        return 0
    # Caffe ends the process where a net is wrong.
    with tempfile.TemporaryDirectory() as folder:
        answer = os.path.join(folder, "answer.json")
        command = [sys.executable, os.path.abspath(__file__), *sys.argv[1:], "--inside", answer]
        done = subprocess.run(command, stderr=subprocess.PIPE, text=True)
        if done.returncode == 0:
            with open(answer) as file:
                print(file.read())
            return 0
    lines = [each for each in done.stderr.splitlines() if each.strip()]
    # What Python raised is said last, what Caffe checks is the first line of a stack.
    fatal = [each for each in lines if re.match(r"F\d+ ", each)]
    print(json.dumps({"error": (fatal or lines[-1:] or [str(done.returncode)])[0]}))
    return 1


def inside(options: argparse.Namespace) -> None:
    import caffe
    from caffe.proto import caffe_pb2
    from google.protobuf import text_format

    net = caffe_pb2.NetParameter()
    with open(options.net) as file:
        text_format.Merge(file.read(), net)
    given: Shapes = {}
    for each in options.input:
        name, shape = each.rsplit("=", 1)
        given[name] = sizes(shape)
    inputs = without_data(net, options, given)
    without_fillers(net)
    with tempfile.NamedTemporaryFile("w", suffix=".prototxt") as file:
        file.write(text_format.MessageToString(net))
        file.flush()
        phase = getattr(caffe, options.phase)
        made = caffe.Net(file.name, phase, level=options.level, stages=options.stage)
    counts = {}
    for blobs in made.params.values():
        for blob in blobs:
            counts[blob.data.__array_interface__["data"][0]] = blob.count
    found = {
        "phase": options.phase,
        "inputs": inputs,
        "blobs": {
            name: list(blob.shape)
            for name, blob in made.blobs.items()
            if not SPLIT.search(name) and name != "(automatic)"
        },
        "params": {name: [list(b.shape) for b in blobs] for name, blobs in made.params.items()},
        "count": sum(counts.values()),
    }
    with open(options.inside, "w") as file:
        json.dump(found, file)


def sizes(text: str) -> list[int]:
    return [int(each) for each in text.split(",")]


def without_data(net: Any, options: argparse.Namespace, given: Shapes) -> Shapes:
    """Layers that read data go, and inputs of the same names come; their shapes, by name."""
    if net.input_dim:
        for place in range(0, len(net.input_dim), 4):
            net.input_shape.add().dim.extend(net.input_dim[place : place + 4])
        del net.input_dim[:]
    inputs: Shapes = {}
    for place, shape in enumerate(net.input_shape):
        name = net.input[place]
        inputs[name] = given.get(name, list(shape.dim))
    for layers in (net.layer, net.layers):
        kept = []
        for layer in layers:
            is_input = not layer.bottom and layer.top and all(top in given for top in layer.top)
            if not is_input and not reads_data(layer):
                kept.append(layer)
            elif runs(layer, options):
                inputs.update(shapes_of(layer, options, given))
        keep(layers, kept)
    del net.input[:]
    del net.input_shape[:]
    is_v0 = any(layer.HasField("layer") for layer in net.layers)
    for name, shape in inputs.items():
        net.input.append(name)
        if is_v0:  # its upgrade drops input_shape
            net.input_dim.extend([*shape, 1, 1, 1][:4])
        else:
            net.input_shape.add().dim.extend(shape)
    return inputs


def keep(layers: Any, kept: list[Any]) -> None:
    copies = [type(each).FromString(each.SerializePartialToString()) for each in kept]
    del layers[:]
    layers.extend(copies)


def reads_data(layer: Any) -> bool:
    if hasattr(layer, "LayerType"):
        name = layer.LayerType.Name(layer.type)
        return name in V1_DATA or layer.layer.type in V0_DATA
    return layer.type in DATA


def runs(layer: Any, options: argparse.Namespace) -> bool:
    """Whether the layer is in the net that is asked for."""
    from caffe.proto import caffe_pb2

    def fits(rule: Any) -> bool:
        if rule.HasField("phase") and caffe_pb2.Phase.Name(rule.phase) != options.phase:
            return False
        if rule.HasField("min_level") and options.level < rule.min_level:
            return False
        if rule.HasField("max_level") and options.level > rule.max_level:
            return False
        needed, unwanted = set(rule.stage), set(rule.not_stage)
        return needed <= set(options.stage) and not unwanted & set(options.stage)

    if len(layer.include):
        return any(map(fits, layer.include))
    return not any(map(fits, layer.exclude))


def shapes_of(layer: Any, options: argparse.Namespace, given: Shapes) -> Shapes:
    """The shape of each top of a layer that reads data."""
    v0 = getattr(layer, "layer", None)
    params = [
        getattr(layer, name)
        for name in (
            "data_param",
            "image_data_param",
            "hdf5_data_param",
            "memory_data_param",
            "window_data_param",
            "transform_param",
        )
        if layer.HasField(name)
    ]

    def word(name: str, v0_name: str = "") -> int:
        found = [getattr(each, name) for each in params if hasattr(each, name)]
        if v0 is not None and v0_name:
            found.append(getattr(v0, v0_name))
        return next((each for each in found if each), 0)

    batch = options.batch or word("batch_size", "batchsize") or 1
    batch = next((given[top][0] for top in layer.top if top in given), batch)
    crop = word("crop_size", "cropsize")
    image = sizes(options.image) if options.image else None
    if word("height"):
        image = [word("channels"), word("height"), word("width")]
    elif word("new_height"):
        image = [3, word("new_height"), word("new_width")]
    if crop:
        image = [image[0] if image else 3, crop, crop]
    found: Shapes = {}
    for place, top in enumerate(layer.top):
        if top in given:
            found[top] = given[top]
        elif place == 0 or (place > 1 and image):
            if image is None:
                raise SystemExit(f"{layer.name}: nothing says the shape of {top}; give --input")
            found[top] = [batch, *image]
        else:
            found[top] = [batch]
    return found


def without_fillers(message: Any) -> None:
    for field, value in message.ListFields():
        if field.type != field.TYPE_MESSAGE:
            continue
        if field.message_type.name == "FillerParameter":
            if field.label != field.LABEL_REPEATED:
                message.ClearField(field.name)
        else:
            for each in value if field.label == field.LABEL_REPEATED else [value]:
                without_fillers(each)


if __name__ == "__main__":
    sys.exit(main())
