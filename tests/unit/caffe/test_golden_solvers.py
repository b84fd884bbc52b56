"""A net and its solver, imported and trained, against the weights that a real Caffe comes to."""

from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
import torch

from tools.caffe_goldens.record import Record
from tools.caffe_goldens.solvers import LOOKS, TRAININGS, Training
from tools.caffe_goldens.trained import errors_of

TOLERANCE = 1e-5
ALIKE = {("nesterov", "old_form")}
"""Two forms of one solver."""


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.mark.parametrize("training", [pytest.param(each, id=each.name) for each in TRAININGS])
def test_weights_are_those_of_caffe(tmp_path: Path, training: Training) -> None:
    errors = errors_of(training, tmp_path)
    assert set(errors) == {*LOOKS}
    assert max(errors.values()) <= TOLERANCE, errors


def test_trainings_come_to_weights_of_their_own() -> None:
    """Were they alike, the test above would show less than it says."""
    for one, other in combinations([each.name for each in TRAININGS], 2):
        ours, others = (
            np.concatenate([each.ravel() for each in Record("solvers", name).kind("12").values()])
            for name in (one, other)
        )
        is_apart = np.linalg.norm(ours - others) > 100 * TOLERANCE * np.linalg.norm(ours)
        assert is_apart == ((one, other) not in ALIKE), (one, other)
