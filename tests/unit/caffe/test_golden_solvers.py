"""A net and its solver, imported and trained, against the weights that a real Caffe comes to."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import firecaffe
from firecaffe import Recipe, RunConfig
from firecaffe.caffe import weights
from firecaffe.data import SampleOrder, TensorDataset
from firecaffe.from_caffe.recipe import Asked, read
from firecaffe.from_caffe.write import files_of, write_folder
from tests.golden.caffe import solvers
from tests.golden.caffe.record import Record
from tests.golden.caffe.solvers import ITERATIONS, LOOKS, TRAININGS, Training

TOLERANCE = 1e-5
PLACES = ("weight", "bias")
"""The names of a layer's parameters by Caffe's places: the net has no others."""

each_training = pytest.mark.parametrize(
    "training", [pytest.param(each, id=each.name) for each in TRAININGS]
)


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@each_training
def test_weights_are_those_of_caffe(tmp_path: Path, training: Training) -> None:
    recipe = imported(training, tmp_path)
    data = in_the_order_of(recipe, training)
    firecaffe.train(recipe, train_set=data, test_set=data)
    for look in LOOKS:
        file = tmp_path / "run/checkpoints" / f"step-{look:08d}" / "state.safetensors"
        found = load_file(file)
        record = Record("solvers", training.name).kind(str(look))
        ours, theirs = [], []
        for name, expected in record.items():
            layer, _, place = name.rpartition("/")
            module = layer.replace("/", "_")
            ours.append(found[f"parameter/{module}.{PLACES[int(place)]}"].numpy().ravel())
            theirs.append(expected.ravel())
        difference = np.concatenate(ours) - np.concatenate(theirs)
        error = np.linalg.norm(difference) / np.linalg.norm(np.concatenate(theirs))
        assert error <= TOLERANCE, f"after {look} iterations: {error:.2g}"


def test_trainings_come_to_weights_of_their_own() -> None:
    """Were they alike, the test above would show less than it says."""
    alike = {"nesterov": "old_form"}
    found = {
        each.name: np.concatenate(
            [values.ravel() for values in Record("solvers", each.name).kind("12").values()]
        )
        for each in TRAININGS
    }
    for one in found:
        for other in found:
            if one < other and alike.get(one) != other:
                size = np.linalg.norm(found[one])
                assert np.linalg.norm(found[one] - found[other]) > 100 * TOLERANCE * size


def imported(training: Training, folder: Path) -> Recipe:
    """The recipe of `firecaffe import SOLVER --weights CAFFEMODEL`, with each step saved."""
    source = folder / "solver.prototxt"
    source.write_text(f'net: "net.prototxt"\n{training.solver}')
    (folder / "net.prototxt").write_text(training.net)
    held: dict[str, list[np.ndarray]] = {}
    for name, values in Record("solvers", "start").kind("start").items():
        held.setdefault(name.rpartition("/")[0], []).append(values)
    layers = [weights.Layer(name, "", blobs) for name, blobs in held.items()]
    weights.write(folder / "start.caffemodel", layers)
    asked = Asked(str(folder / "out"), weights=str(folder / "start.caffemodel"))
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
    return TensorDataset(torch.tensor(images)[back], torch.tensor(labels).long()[back], 5)
