"""Small databases and lists of images, and the nets that read them.

`python -m tools.caffe_goldens.data_cases PYTHON` writes data.npz: what a real Caffe's data layers
make of them. PYTHON is one that can `import caffe`.
"""

import io
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import lmdb
import numpy as np
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from numpy.typing import NDArray
from PIL import Image

from tools.caffe_goldens.record import FOLDER

RECORDED = FOLDER / "data.npz"
COUNT = 3
"""Samples of each set."""

Array = NDArray[Any]


def pixels(shape: tuple[int, ...], sample: int) -> NDArray[np.uint8]:
    """Like noise, and always the same."""
    place = np.arange(np.prod(shape), dtype=np.int64).reshape(shape) + 1000 * sample
    return ((place * place * 31 + place * 17) // 7 % 256).astype(np.uint8)


FIELDS = (
    ("channels", 1, "INT32"),
    ("height", 2, "INT32"),
    ("width", 3, "INT32"),
    ("data", 4, "BYTES"),
    ("label", 5, "INT32"),
    ("float_data", 6, "FLOAT"),
    ("encoded", 7, "BOOL"),
)
REPEATED = ("FLOAT",)


@cache
def message_of(name: str, fields: tuple[tuple[str, int, str], ...]) -> Any:
    file = descriptor_pb2.FileDescriptorProto(name=f"{name}.proto", package="firecaffe")
    message = file.message_type.add(name=name)
    of_field = descriptor_pb2.FieldDescriptorProto
    for field, number, kind in fields:
        message.field.add(
            name=field,
            number=number,
            type=getattr(of_field, f"TYPE_{kind}"),
            label=of_field.LABEL_REPEATED if kind in REPEATED else of_field.LABEL_OPTIONAL,
        )
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName(f"firecaffe.{name}"))


def datum(**words: Any) -> bytes:
    content: bytes = message_of("Datum", FIELDS)(**words).SerializeToString()
    return content


def raw(image_CHW: Array, label: int) -> bytes:
    channels, height, width = image_CHW.shape
    words = {"channels": channels, "height": height, "width": width, "label": label}
    if image_CHW.dtype == np.uint8:
        return datum(data=image_CHW.tobytes(), **words)
    return datum(float_data=image_CHW.ravel().tolist(), **words)


def png(rows: int, columns: int, sample: int, mode: str = "RGB") -> bytes:
    file = io.BytesIO()
    image = Image.fromarray(pixels((rows, columns, 3), sample).repeat(2, axis=1))
    image.convert(mode).save(file, "PNG")
    return file.getvalue()


def write_lmdb(folder: Path, values: Sequence[bytes]) -> None:
    folder.mkdir(parents=True)
    with lmdb.open(str(folder), map_size=1 << 26) as base, base.begin(write=True) as view:
        for number, value in enumerate(values):
            view.put(b"%08d_name" % number, value)


def mean_image() -> Array:
    return pixels((3, 9, 12), 9).astype(np.float32) / np.float32(1.7)


def write_all(folder: Path) -> None:
    """What the cases name."""
    sets = {
        "color": [raw(pixels((3, 9, 12), each), 2 - each) for each in range(COUNT)],
        "gray": [raw(pixels((1, 9, 12), each), each + 5) for each in range(COUNT)],
        "float": [
            raw(pixels((2, 6, 5), each).astype(np.float32) / np.float32(77) - 1, each)
            for each in range(COUNT)
        ],
        "png": [datum(data=png(10, 7, each), label=each, encoded=True) for each in range(COUNT)],
        "png_gray": [
            datum(data=png(10, 7, each, "L"), label=each, encoded=True) for each in range(COUNT)
        ],
    }
    for name, values in sets.items():
        write_lmdb(folder / name, values)
    for each in range(COUNT):
        (folder / f"image {each}.png").write_bytes(png(11 + each, 8, each))
    lines = "".join(f"image {each}.png {each * each}\n" for each in range(COUNT))
    (folder / "list.txt").write_text(lines)
    (folder / "mean.binaryproto").write_bytes(blob(mean_image()))


def blob(values: Array) -> bytes:
    """A BlobProto in its old form."""
    fields = (
        ("num", 1, "INT32"),
        ("channels", 2, "INT32"),
        ("height", 3, "INT32"),
        ("width", 4, "INT32"),
        ("data", 5, "FLOAT"),
    )
    channels, height, width = values.shape
    made = message_of("Blob", fields)(num=1, channels=channels, height=height, width=width)
    made.data.extend(values.ravel().tolist())
    content: bytes = made.SerializeToString()
    return content


def data(source: str, transform: str = "", phase: str = "") -> str:
    include = f"include {{ phase: {phase} }}" if phase else ""
    return (
        f'layer {{ name: "data" type: "Data" top: "data" top: "label" {include}'
        f' data_param {{ source: "{source}" batch_size: {COUNT} backend: LMDB }}'
        f" transform_param {{ {transform} }} }}\n"
    )


def images(words: str = "", transform: str = "") -> str:
    return (
        'layer { name: "data" type: "ImageData" top: "data" top: "label"'
        f' image_data_param {{ source: "list.txt" batch_size: {COUNT} {words} }}'
        f" transform_param {{ {transform} }} }}\n"
    )


MEANS = "mean_value: 104 mean_value: 117.1 mean_value: 122.68"
CASES = {
    "plain": data("color"),
    "scale": data("color", "scale: 0.00390625"),
    "one mean": data("color", "mean_value: 33.3 scale: 0.017"),
    "a mean for each": data("color", f"{MEANS} crop_size: 7 scale: 0.017"),
    "mean file": data("color", 'mean_file: "mean.binaryproto" scale: 0.3'),
    "mean file, cut": data("color", 'mean_file: "mean.binaryproto" crop_size: 6 scale: 0.3'),
    "gray": data("gray", "crop_size: 4"),
    "float": data("float", "crop_size: 5 mean_value: 0.3 scale: 2.7"),
    "png": data("png", "crop_size: 9"),
    "png to gray": data("png", "force_gray: true"),
    "gray png": data("png_gray", "scale: 0.5"),
    "gray png to color": data("png_gray", "force_color: true"),
    "list": images(transform=f"crop_size: 10 {MEANS}"),
    "list, smaller": images("new_height: 7 new_width: 9", "scale: 0.1"),
    "list, larger": images("new_height: 23 new_width: 33", "crop_size: 20"),
    "list, half": images("new_height: 6 new_width: 8"),
    "list, gray": images("new_height: 12 new_width: 5 is_color: false"),
}
"""Prototxts, whose paths are from the current folder."""

IN_CAFFE = """
import sys, json, numpy, caffe
found = {}
for name, text in json.load(open("cases.json")).items():
    open("net.prototxt", "w").write(text)
    net = caffe.Net("net.prototxt", caffe.TEST)
    net.forward()
    for top in ("data", "label"):
        found[name + ":" + top] = net.blobs[top].data.copy()
numpy.savez_compressed(sys.argv[1], **found)
"""


def main(python: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        write_all(Path(folder))
        (Path(folder) / "cases.json").write_text(json.dumps(CASES))
        subprocess.run([python, "-c", IN_CAFFE, str(RECORDED)], cwd=folder, check=True)


if __name__ == "__main__":
    main(sys.argv[1])
