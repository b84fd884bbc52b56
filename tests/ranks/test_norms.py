"""BatchNorm statistics for evaluations: alike on any number of workers, and on all ranks."""

from pathlib import Path

import pytest
import torch

import firecaffe
from firecaffe import Recipe, Result, SynchronyConfig
from firecaffe.training.checkpoint import load_newest
from tests.unit.training.served.test_trainings import data, network
from tests.unit.training.test_norms import EVERY_STEP, REPLICAS, SAMPLES, made
from tests.world import Ranks


def fit(wanted: Recipe) -> tuple[Result, list[float]]:
    """What `train` returns, and what its network then says of some samples."""
    sets = data(300, 0), data(100, 1)
    result = firecaffe.train(wanted, network, *sets, validation_set=data(40, 2))
    with torch.no_grad():
        return result, result.model.eval()(data(9, 3).inputs).flatten().tolist()


@pytest.mark.parametrize(
    ("words", "workers"), [(EVERY_STEP, (1, 2, 3)), (REPLICAS, (1, 2))], ids=["every_step", "local"]
)
def test_workers_change_no_bit(
    ranks: Ranks, words: SynchronyConfig, workers: tuple[int, ...], tmp_path: Path
) -> None:
    found = []
    for count in workers:
        run = tmp_path / f"{count}"
        of_ranks = ranks.shared(count, fit, made(run, words, SAMPLES, steps=6, eval_every=3))
        assert len({repr(outputs) for _, outputs in of_ranks}) == 1
        stored = load_newest(run)[0].tensors
        norms = [stored[name].tolist() for name in stored if name.startswith("batch_norm/")]
        assert norms
        found.append((norms, of_ranks[0][0].test_loss, of_ranks[0][1]))
    assert all(each == found[0] for each in found)


def test_a_server_gives_its_workers_the_network_that_it_has_evaluated(
    ranks: Ranks, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    wanted = made(run, SynchronyConfig("asynchronous"), SAMPLES, steps=6, eval_every=3)
    (_, outputs), (_, others) = ranks.shared(2, fit, wanted)
    assert outputs == others
    with torch.no_grad():
        loaded = firecaffe.load(run, network)(data(9, 3).inputs).flatten().tolist()
    assert loaded == outputs
