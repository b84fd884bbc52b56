"""From Caffe's files to an ONNX file: imported, trained on two workers, compressed, exported.

python examples/caffe_to_onnx.py

Each step is a command of firecaffe's, which is printed. The net and its solver are in
examples/caffe; the images are made up. Needs `pip install 'firecaffe[onnx]'`.
"""

import json
import subprocess
import sys
from pathlib import Path

import onnxruntime
import torch
from PIL import Image

from firecaffe.data import DataConfig, Dataset, open_data

TRAIN, TEST = 2000, 400
MEAN, SCALE = 128, 0.00390625
"""Of transform_param, in the net."""


def write_images(data: Dataset, count: int, folder: Path) -> None:
    """The first images as PNGs, and their list as Caffe's ImageData layer reads it."""
    folder.mkdir(parents=True, exist_ok=True)
    images, labels = data.batch(torch.arange(count))
    lines = []
    for number, (image_HW, label) in enumerate(zip(images[:, 0], labels, strict=True)):
        path = folder / f"{number}.png"
        Image.fromarray(image_HW.numpy()).save(path)
        lines.append(f"{path} {int(label)}\n")
    folder.with_suffix(".txt").write_text("".join(lines))


def firecaffe(*words: str) -> str:
    """Runs a command; returns what it says."""
    print("$ firecaffe", *words, flush=True)
    command = [sys.executable, "-m", "firecaffe", *words]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def correct_in_onnx(file: str, data: Dataset, count: int) -> float:
    """The share of the first images whose class onnxruntime finds."""
    session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
    images, labels = data.batch(torch.arange(count))
    (outputs,) = session.run(["outputs"], {"inputs": ((images.float() - MEAN) * SCALE).numpy()})
    return float((outputs.argmax(1) == labels.numpy()).mean())


def main() -> None:
    data = open_data(DataConfig("generated"))
    write_images(data.train, TRAIN, Path("patterns/train"))
    write_images(data.test, TEST, Path("patterns/test"))

    firecaffe("import", "examples/caffe/solver.prototxt", "--out", "road")
    firecaffe("train", "road/recipe.toml", "--nproc-per-node", "2", "--run.folder", "road/run")
    scheme = ("--scheme", "deep_compression", "--nproc-per-node", "2")
    print(firecaffe("compress", "road/run", *scheme, "--out", "road/net.fcz"))
    evaluated = json.loads(firecaffe("evaluate", "road/net.fcz", "--json"))
    firecaffe("export", "road/net.fcz", "--to", "onnx")

    in_onnx = correct_in_onnx("road/net.onnx", data.test, TEST)
    print(f"accuracy: {evaluated['accuracy']:.2%} of the file, {in_onnx:.2%} in onnxruntime")


if __name__ == "__main__":
    main()
