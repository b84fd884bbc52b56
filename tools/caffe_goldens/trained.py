"""A training of firecaffe's, by what it imports of a solver, beside a real Caffe's weights."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file

import firecaffe
from firecaffe import Recipe, RunConfig
from firecaffe.caffe import caffemodel
from firecaffe.data import SampleOrder, TensorDataset
from firecaffe.from_caffe.recipe import ImportRequest, files_of, read, write_folder
from tools.caffe_goldens import solvers
from tools.caffe_goldens.record import Record
from tools.caffe_goldens.solvers import CLASSES, ITERATIONS, LOOKS, Training

PLACES = ("weight", "bias")
"""The names of a layer's parameters by Caffe's places: the net has no others."""


def errors_of(training: Training, folder: Path) -> dict[int, float]:
    """How far its weights are from Caffe's, over their norm, after some iterations. folder: an
    empty one.
    """
    recipe = imported(training, folder)
    data = in_the_order_of(recipe, training)
    firecaffe.train(recipe, train_set=data, test_set=data)
    found = {}
    for look in LOOKS:
        file = folder / "run/checkpoints" / f"step-{look:08d}" / "state.safetensors"
        tensors = load_file(file)
        ours, caffes = [], []
        for name, expected in Record("solvers", training.name).kind(str(look)).items():
            layer, _, place = name.rpartition("/")
            parameter = f"{layer.replace('/', '_')}.{PLACES[int(place)]}"
            ours.append(tensors[f"parameter/{parameter}"].numpy().ravel())
            caffes.append(expected.ravel())
        difference = np.concatenate(ours) - np.concatenate(caffes)
        found[look] = float(np.linalg.norm(difference) / np.linalg.norm(np.concatenate(caffes)))
    return found


def imported(training: Training, folder: Path) -> Recipe:
    """The recipe of `firecaffe import SOLVER --weights CAFFEMODEL`, with each step saved."""
    source = folder / "solver.prototxt"
    source.write_text(f'net: "net.prototxt"\n{training.solver}')
    (folder / "net.prototxt").write_text(training.net)
    held: dict[str, list[np.ndarray]] = {}
    for name, values in Record("solvers", "start").kind("start").items():
        held.setdefault(name.rpartition("/")[0], []).append(values)
    layers = [caffemodel.TrainedLayer(name, "", blobs) for name, blobs in held.items()]
    caffemodel.write(folder / "start.caffemodel", layers)
    asked = ImportRequest(str(folder / "out"), weights=str(folder / "start.caffemodel"))
    found = read(source, asked)
    # Only the data are missing: a program fills a MemoryData layer.
    assert all("MemoryData" in each.what for each in found.report.left_out)
    write_folder(folder / "out", files_of(found, source))
    recipe = found.recipe
    assert recipe.train.steps == ITERATIONS
    return replace(
        recipe,
        run=RunConfig(folder=str(folder / "run"), tensorboard=False),
        checkpoint=replace(recipe.checkpoint, every=1, keep_last=0),
    )


def in_the_order_of(recipe: Recipe, training: Training) -> TensorDataset:
    """The samples placed so that the recipe's order takes them as Caffe did."""
    images, labels = solvers.samples(training)
    train = recipe.train
    order = SampleOrder(train.seed, len(images), train.global_batch_size, train.micro_batch_size)
    taken = torch.cat(
        [
            order.micro_batch(step, leaf)
            for step in range(ITERATIONS)
            for leaf in range(order.num_micro_batches)
        ]
    )
    back = taken.argsort()
    return TensorDataset(torch.tensor(images)[back], torch.tensor(labels).long()[back], CLASSES)
