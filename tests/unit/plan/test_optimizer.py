"""The vectors of optimizers, against what their sources say; and when an update's are the peak."""

from dataclasses import replace

import pytest

from firecaffe.models.config import ModelConfig
from firecaffe.plan.chain import chain_of
from firecaffe.plan.held import memory_of
from firecaffe.plan.layouts import Layout
from firecaffe.plan.memory import memory_bytes
from firecaffe.plan.of_recipe import workload_of_model
from firecaffe.plan.workload import vectors_of
from firecaffe.solvers.config import SolverConfig
from firecaffe.solvers.optimizer import SOLVERS

MADE = {
    "sgd": (0, 1),  # gradients with the decay
    "nesterov": (0, 1),
    "adagrad": (2, 2),  # the root, and the gradient times the rate; the decay in the latter's place
    "adadelta": (2, 3),  # two roots
    "rmsprop": (1, 2),  # the root
    "adam": (1, 1),  # gradients with the decay are let go before the root is made
    "adamw": (1, 1),
    "lars": (1, 1),  # gradients with the decay, in any case
    "lamb": (2, 2),  # the root, and the direction
}
"""What torch 2.13's `foreach` forms make, and ours; without a decay, and with one."""


def test_what_an_update_makes() -> None:
    assert set(MADE) == set(SOLVERS)
    for name, expected in MADE.items():
        solvers = (SolverConfig(type=name, weight_decay=decay) for decay in (0.0, 0.1))
        assert tuple(vectors_of(each).made for each in solvers) == expected, name
    caffe = SolverConfig(momentum_form="caffe")
    assert vectors_of(caffe).made == 1
    # Of Nesterov's in Caffe's words: what moves, the history before, and how far it goes ahead.
    assert vectors_of(replace(caffe, type="nesterov")).made == 3
    assert vectors_of(SolverConfig("adam", momentum_form="caffe")) == (2, 1)  # the root
    signs = SolverConfig("rmsprop", weight_decay=0.1, decay_form="l1")
    assert vectors_of(signs).made == 1  # the signs are let go before the root is made
    kept = {name: vectors_of(SolverConfig(type=name)).kept for name in MADE}
    twice = {"adam", "adamw", "lamb", "adadelta"}
    assert kept == {name: 1 + (name in twice) for name in MADE}


def test_an_update_is_the_peak_if_it_makes_more_than_a_micro_batch() -> None:
    """The running micro-batch's gradients are as long as the weights, so one vector is no more."""
    work = replace(workload_of_model(ModelConfig("alexnet"), None, 8, 8), activation_bytes=1e5)
    weights, activations = work.parameter_bytes, 8e5
    base = memory_bytes(work, 1, is_whole=False)
    assert base["running"] == weights
    assert base["updating"] == 0
    under_way = base["running"] + base["sums"] + activations
    for vectors in (1, 4):
        found = memory_bytes(replace(work, update_vectors=vectors), 1, is_whole=False)
        assert found["updating"] == max(0, vectors * weights - under_way)
    # A checkpoint is another time: of both the one that takes more counts.
    whole = memory_bytes(replace(work, update_vectors=4), 1)
    assert whole["saving"] > 0 or base["sums"] >= weights
    assert whole["saving"] + whole["updating"] == 4 * weights - under_way


@pytest.mark.parametrize("vectors", [0, 4])
def test_an_update_is_of_own_parts(vectors: int) -> None:
    config = ModelConfig("alexnet")
    work = replace(
        workload_of_model(config, None, 8, 8), activation_bytes=0.0, update_vectors=vectors
    )
    chain = chain_of(config, work)
    layouts = [Layout(outputs=2) if unit.is_dense else Layout(copies=2) for unit in chain]
    found = memory_of(work, chain, layouts)
    under_way = found["running"] + found["sums"] + found["activations"]
    assert found["updating"] == max(0, vectors * found["parameters"] - under_way)
    assert found["parameters"] < 0.6 * work.parameter_bytes
