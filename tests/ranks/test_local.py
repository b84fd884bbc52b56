"""Replicas that train by themselves: workers change no bit, and the rules are those of others.

The outer optimizer nesterov, fragments, averages under way, momentums, codecs and exchanges are in
the matrix too (`test_matrix.py`).
"""

import json
import os
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import (
    PostLocalSGDState,
    post_localSGD_hook,
)
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.nn.parallel import DistributedDataParallel

import firecaffe
from firecaffe import (
    CheckpointConfig,
    DataConfig,
    ExchangeConfig,
    Recipe,
    RunConfig,
    SolverConfig,
    SynchronyConfig,
    TrainConfig,
)
from firecaffe.cluster.world import join
from firecaffe.data import SampleOrder, TensorDataset
from firecaffe.schema import read_rows
from firecaffe.training.checkpoint import load_newest
from firecaffe.training.modes.replica_steps import Average, LocalOutcome, LocalStepper
from tests.kit.worlds import EVERYTHING, Trained, Training, changed, checkpoint_of, end
from tests.ranks.test_invariance import RECIPE as INVARIANT
from tests.ranks.test_stage_layouts import loud
from tests.world import Ranks

# 12 micro-batches of 4 over 100 samples, with BatchNorm, dropout and clipping. Steps 3, 6 and 9 end
# an epoch with 4 samples, all of replica 0; and the last round is cut short.
RECIPE = changed(
    INVARIANT,
    train={"global_batch_size": 48, "steps": 10},
    synchrony=SynchronyConfig("local", replicas=4, local_steps=4),
    checkpoint=CheckpointConfig(every=1, keep_last=0),
)

FRAGMENTS = {"fragments": 2, "overlap_steps": 1, "outer": "nesterov", "replicas": 6}
OVERLAP = {"outer": "nesterov", "overlap_steps": 2, "local_steps": 3, "replicas": 12}
RECIPES = {
    "average of four": RECIPE,
    "slowmo of six": changed(
        RECIPE, synchrony={"replicas": 6, "outer": "slowmo", "inner_momentum": "zero"}
    ),
    "overlap of twelve": changed(RECIPE, synchrony=OVERLAP),
    "coded fragments of six": changed(
        RECIPE, synchrony=FRAGMENTS, exchange={"compressor": "top_k"}
    ),
}


@pytest.mark.parametrize("name", RECIPES)
def test_workers_before_and_after_a_resume_change_no_bit(trained: Trained, name: str) -> None:
    """Also if they host unequal numbers of replicas: of four on three workers, of six on four. From
    a checkpoint after an average, or between them if they are under way. So the replicas of a
    worker that is lost go to others. What a codec keeps back is of replicas, not of workers.
    """
    recipe = RECIPES[name]
    alone, four = trained(1, recipe), trained(4, recipe)
    assert end(four) == end(alone)
    saved = sorted((four.folder / "checkpoints").glob("step-*"))
    assert len(saved) > 2
    assert end(trained(3, recipe, resume=saved[len(saved) // 2])) == end(alone)


def test_replicas_count_their_own_batches(trained: Trained) -> None:
    """Replica 0 alone has samples in the third step; what is evaluated counts as it does."""
    result = trained(2, changed(RECIPE, synchrony={"overlap_steps": 1}))
    saved = load_newest(checkpoint_of(result, 5))[0]
    of_replicas = load_file(saved.piece_files["replica"])
    name = "buffer/norm.num_batches_tracked"
    assert [int(of_replicas[f"{number}/{name}"]) for number in range(4)] == [5, 4, 4, 4]
    assert saved.tensors[name] == 4  # the average was taken a step before


def test_a_moving_average_is_that_of_all_replicas(trained: Trained) -> None:
    """By the weights after each average. Caffe's momentum is scaled by the rate of the update
    before, which is no tensor, and goes along too.
    """
    solver = SolverConfig(
        momentum_form="caffe", momentum_correction=True, lr_policy="exp", gamma=0.7
    )
    recipe = changed(RECIPE, train={"ema_decay": 0.8}, solver=solver)
    alone = trained(1, recipe)
    assert end(trained(3, recipe, resume=checkpoint_of(alone, 4))) == end(alone)
    after = []
    for step in (4, 8, 10):
        tensors = load_newest(checkpoint_of(alone, step))[0].tensors
        names = [key.removeprefix("ema/") for key in tensors if key.startswith("ema/")]
        kinds = ("ema", "parameter")
        after.append([{key: tensors[f"{kind}/{key}"] for key in names} for kind in kinds])
    (expected, first), *others = after
    assert all(each.equal(first[key]) for key, each in expected.items())
    for (average, weights), steps in zip(others, (4, 2), strict=True):
        for key, each in average.items():
            torch.testing.assert_close(each, expected[key].lerp(weights[key], 1 - 0.8**steps))
        expected = average


def test_each_replica_has_a_loss_scale_of_its_own(trained: Trained) -> None:
    """By a loss whose gradients overflow in float16, in warm steps and after them."""
    words = {"warm_steps": 3, "local_steps": 2}
    recipe = changed(RECIPE, train={"autocast": "float16"}, synchrony=words)
    training = Training(loss=loud)
    alone = trained(1, recipe, training)
    saved = sorted((alone.folder / "checkpoints").glob("step-*"))
    last = load_file(load_newest(saved[-1])[0].piece_files["replica"])
    kept = [json.loads(last[f"{number}/scale"].numpy().tobytes()) for number in range(4)]
    assert all(each["scale"] < 65_536 for each in kept)
    # Replica 0 alone has samples in an epoch's last step.
    assert kept[0]["_growth_tracker"] > kept[1]["_growth_tracker"]
    assert end(trained(3, recipe, training)) == end(alone)
    assert end(trained(2, recipe, training, saved[len(saved) // 2])) == end(alone)


@pytest.mark.parametrize(("overlap", "whole"), [(0, [4, 8, 10]), (1, [5, 9, 10])])
def test_what_is_due_within_a_round_is_done_at_its_end(
    trained: Trained, overlap: int, whole: list[int]
) -> None:
    recipe = changed(
        RECIPE,
        train={"eval_every": 3},
        data=DataConfig(hold_out=0.1),
        checkpoint={"every": 2},
        synchrony={"overlap_steps": overlap},
    )
    folder = trained(1, recipe).folder
    rows = list(read_rows(folder / "metrics.jsonl", dict))
    of_kind = {
        kind: [row["step"] for row in rows if row["kind"] == kind]
        for kind in ("train", "validation")
    }
    assert of_kind == {"train": list(range(1, 11)), "validation": whole}
    saved = sorted(path.name for path in (folder / "checkpoints").glob("step-*"))
    assert [int(path[5:]) for path in saved] == whole


def test_an_average_costs_what_a_gradient_does(trained: Trained) -> None:
    """So a step costs an Hth of it, but for the losses of a round. In two fragments, an average
    costs half: of ten steps, after 2, 5 and 7, and twice after 10.
    """
    rounds = changed(
        RECIPE,
        train={"global_batch_size": 16},
        exchange=ExchangeConfig("tree", shared_memory=False),
        synchrony={"local_steps": 5},
    )
    halves = changed(rounds, synchrony={"fragments": 2})
    every = changed(rounds, synchrony=SynchronyConfig())
    sent = [trained(2, each).sent_bytes_per_step_by_rank for each in (rounds, halves, every)]
    for local, half, whole in zip(*sent, strict=True):
        assert local == pytest.approx((whole or 0) / 5, rel=0.2)
        assert half == pytest.approx((whole or 0) * 5 / 2 / 10, rel=0.2)


def fit_while_held(recipe: Recipe, folder: Path, pipe: Path) -> str:
    """Rank 1 brings its first differences once rank 0 has begun the step after."""
    begin, train = Average.begin, LocalStepper._train

    def held(average: Average, *sums: Any) -> None:
        if os.environ["RANK"] == "1" and pipe.exists():
            pipe.read_text()
            pipe.unlink()
        begin(average, *sums)

    def told(stepper: LocalStepper, step: int, rate: float) -> LocalOutcome:
        if os.environ["RANK"] == "0" and step == recipe.synchrony.local_steps:
            pipe.write_text("")
        return train(stepper, step, rate)

    with patch.object(Average, "begin", held), patch.object(LocalStepper, "_train", told):
        return EVERYTHING(recipe, folder).state_sha256


def test_replicas_go_on_while_their_average_is_under_way(
    ranks: Ranks, trained: Trained, tmp_path: Path
) -> None:
    """If they did not, rank 0 would wait for rank 1 and it for rank 0, until the time is over."""
    recipe = changed(RECIPES["overlap of twelve"], exchange={"timeout_s": 60})
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    states = ranks.run(2, fit_while_held, recipe, tmp_path / "run", pipe)
    assert states == [trained(1, RECIPES["overlap of twelve"]).state_sha256] * 2


RANKS, SYNCHRONOUS, H, STEPS, RATE, MOMENTUM = 4, 4, 3, 10, 0.2, 0.9
TRAIN = TrainConfig(global_batch_size=32, micro_batch_size=4, steps=STEPS, seed=4)


def net() -> nn.Module:
    made = nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 3))
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(torch.linspace(-0.5, 0.5, parameter.numel()).view_as(parameter))
    return made


def samples(count: int = 160) -> TensorDataset:
    inputs = torch.randn(count, 5, generator=torch.Generator().manual_seed(6))
    return TensorDataset(inputs, inputs[:, :3].argmax(1))


def ours(folder: str) -> None:
    recipe = Recipe(
        train=TRAIN,
        solver=SolverConfig(base_lr=RATE, momentum=MOMENTUM),
        run=RunConfig(folder=folder, tensorboard=False),
        synchrony=SynchronyConfig("local", replicas=RANKS, local_steps=H, warm_steps=SYNCHRONOUS),
    )
    firecaffe.train(recipe, net, samples(), samples())


def torchs() -> dict[str, Tensor]:
    """Rank r takes the samples of replica r. The averager counts from its warm-up's end, and its
    first average comes with that step.
    """
    data = samples()
    order = SampleOrder(TRAIN.seed, len(data), TRAIN.global_batch_size, TRAIN.micro_batch_size)
    each = order.num_micro_batches // RANKS
    with join("cpu") as world:
        network = net()
        model = DistributedDataParallel(network, process_group=world.group)
        state = PostLocalSGDState(world.group, world.group, SYNCHRONOUS, False)  # type: ignore[no-untyped-call]
        model.register_comm_hook(state, post_localSGD_hook)
        optimizer = torch.optim.SGD(network.parameters(), RATE, MOMENTUM)
        averager = PeriodicModelAverager(H, SYNCHRONOUS + H - 1, world.group)
        for step in range(STEPS):
            own = range(world.rank * each, (world.rank + 1) * each)
            which = torch.cat([order.micro_batch(step, leaf) for leaf in own])
            optimizer.zero_grad()
            loss = F.cross_entropy(model(data.inputs[which]), data.targets[which])
            torch.autograd.backward(loss)
            optimizer.step()
            averager.average_parameters(network.parameters())
        return {name: each.detach().clone() for name, each in network.named_parameters()}


def test_weights_are_those_of_post_local_sgd_of_torch(ranks: Ranks, tmp_path: Path) -> None:
    expected, *others = ranks.shared(RANKS, torchs)
    for other in others:
        assert all(torch.equal(other[name], each) for name, each in expected.items())
    ranks.shared(RANKS, ours, str(tmp_path / "run"))
    tensors = load_newest(tmp_path / "run")[0].tensors
    for name, each in expected.items():
        torch.testing.assert_close(tensors[f"parameter/{name}"], each, rtol=1e-4, atol=1e-5)
    start = dict(net().named_parameters())
    assert not any(torch.allclose(start[name], each, atol=0.05) for name, each in expected.items())
