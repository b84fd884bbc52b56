"""Each rank updates a shard of the weights: the bits of one worker, in every way to update."""

import os
import signal
from itertools import pairwise, product
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn

from firecaffe import Recipe
from firecaffe.cluster.world import join
from firecaffe.errors import PeerLostError
from firecaffe.exchange.fold import inputs_of
from firecaffe.exchange.leaves import equal_shares
from firecaffe.exchange.route import find_route
from firecaffe.exchange.schedule import shard
from firecaffe.gradients.buckets import offsets
from firecaffe.gradients.reducer import GradientReducer
from firecaffe.gradients.shards import make_shards
from firecaffe.runs.run_folder import read_run_file
from firecaffe.transport.exchange import Exchange
from tests.kit.training import recipe_with
from tests.kit.worlds import Trained, Training, changed, checkpoint_of, end
from tests.ranks.networks import Everything
from tests.world import Ranks

# 8 micro-batches of 4 over 70 samples: steps 3 and 6 end an epoch with one micro-batch of 4, one of
# 2, and six that are empty. 2, 3 and 4 workers: with one node of the tree each, or several.
RECIPE = recipe_with("""
train.global_batch_size=32 train.micro_batch_size=4 train.steps=4 train.seed=5 train.device=cpu
train.ema_decay=0.8 train.eval_every=3 solver.base_lr=0.02 solver.momentum=0.9
solver.weight_decay=1e-3 solver.decay_mult={"@vector":0.0} solver.lr_mult={"head.*":2.0}
exchange.bucket_bytes=1500 exchange.update_at=shards checkpoint.every=2
""")

CYCLE = {"lr_policy": "one_cycle", "base_momentum": 0.8}
SOLVERS: dict[str, dict[str, Any]] = {
    "caffe": {"type": "nesterov", "momentum_form": "caffe", "momentum_correction": True},
    "caffes_adam": {"type": "adam", "momentum_form": "caffe"},
    "decoupled": {"decay_form": "decoupled", **CYCLE},
    "l1": {"type": "nesterov", "decay_form": "l1", "clip_gradients": 0.05},
    "adagrad": {"type": "adagrad"},
    "adadelta": {"type": "adadelta"},
    "rmsprop": {"type": "rmsprop"},
    "adam": {"type": "adam"},
    "adamw": {"type": "adamw", **CYCLE},
    "lamb": {"type": "lamb", "clip_gradients": 0.05},
}
"""`sgd` and `lars` are in the matrix (`test_matrix.py`)."""


class Net(Everything):
    """With rows of an odd length, one number, a weight that is not one row after the other in
    memory, and one without elements.
    """

    def __init__(self) -> None:
        super().__init__()
        self.again = nn.Conv2d(6, 37, 3)
        self.head = nn.Linear(37, 4)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.turned = nn.Parameter(torch.linspace(-1, 1, 20).view(4, 5).t())
        self.nothing = nn.Parameter(torch.zeros(3, 0))

    def forward(self, images: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.mean_of_inputs = 0.9 * self.mean_of_inputs + 0.1 * images.mean()
        x = torch.relu(self.norm(self.conv(images)))
        x = self.dropout(torch.relu(self.again(x)).mean((2, 3)))
        logits: Tensor = self.head(x) * self.frozen * self.scale + self.nothing.sum()
        if images.mean() > 0:  # a parameter that some micro-batches use, and some steps
            logits = logits + self.rare
        return logits + self.turned.square().sum(0) * images.mean()


NET = Training(Net, 70, 20)
Where = Literal["all", "shards"]


def at(update_at: Where, recipe: Recipe = RECIPE) -> Recipe:
    return changed(recipe, exchange={"update_at": update_at})


def with_solver(name: str) -> Recipe:
    return changed(RECIPE, solver=SOLVERS[name])


@pytest.mark.parametrize("name", SOLVERS)
def test_the_bits_of_one_worker(trained: Trained, name: str) -> None:
    alone = trained(1, at("all", with_solver(name)), NET)
    # Any number of shards with two solvers; with the others, shards that are not equal.
    for workers in (2, 3, 4) if name in ("adam", "lamb") else (3,):
        result = trained(workers, with_solver(name), NET)
        assert end(result) == end(alone), workers
        assert [row["loss"] for row in result.history] == [row["loss"] for row in alone.history]


def test_a_codec_that_all_encode_with(trained: Trained) -> None:
    recipe = changed(RECIPE, exchange={"compressor": "power_sgd"})
    assert end(trained(3, recipe, NET)) == end(trained(1, at("all", recipe), NET))


class Doubled(nn.Module):
    """In float64: its norm is not to be rounded on the way."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(36, 9), nn.Tanh(), nn.Linear(9, 4))
        self.double()

    def forward(self, images: Tensor) -> Tensor:
        y: Tensor = self.layers(images.double())
        return y


def test_a_norm_in_float64(trained: Trained) -> None:
    solver = {"clip_gradients": 0.05, "lr_mult": {}}
    recipe = changed(RECIPE, solver=solver, train={"eval_every": 0})
    doubled = Training(Doubled, 70)
    assert end(trained(3, recipe, doubled)) == end(trained(1, at("all", recipe), doubled))


def test_a_layout_goes_on_from_any_other(trained: Trained) -> None:
    """After step 2, each time, with a solver that counts its steps."""
    adam = with_solver("adam")
    layouts: list[tuple[int, Where]] = [(1, "all"), (3, "shards"), (2, "all")]
    for (workers, before), (others, now) in pairwise(layouts):
        checkpoint = checkpoint_of(trained(workers, at(before, adam), NET), 2)
        result = trained(others, at(now, adam), NET, checkpoint)
        assert end(result) == end(trained(1, at("all", adam), NET)), (others, now)


@pytest.mark.parametrize("name", ["adam", "lamb"])
def test_a_rank_holds_its_share_of_the_optimizers_state(trained: Trained, name: str) -> None:
    """Two vectors of the weights, and Adam's count of steps for each tensor, in bytes."""
    named = {n: weight for n, weight in Net().named_parameters() if weight.requires_grad}
    used = {n: weight.numel() for n, weight in named.items() if n != "unused"}
    for workers in (2, 4):
        result = trained(workers, with_solver(name), NET)
        in_all, steps = 2 * 4 * sum(used.values()), 4 * len(used) * (name == "adam")
        assert in_all <= sum(result.optimizer_bytes_by_rank) <= in_all + workers * steps
        if name == "adam":  # in rows
            assert max(result.optimizer_bytes_by_rank) <= 1.15 * in_all / workers
        else:  # whole, of which the largest is its owner's alone
            assert max(result.optimizer_bytes_by_rank) == 2 * 4 * max(used.values())
        record = read_run_file(result.folder, "result.json")
        assert record["optimizer_bytes_by_rank"] == result.optimizer_bytes_by_rank
        assert record["route"] == "fold to the owners of shards"
        files = {path.name for path in checkpoint_of(result, 2).iterdir()}
        assert {"optimizer.safetensors", "ema.safetensors"} <= files


def test_all_ranks_say_which_gradient_is_not_finite(ranks: Ranks, tmp_path: Path) -> None:
    """It may be in the shard of one of them alone; as one worker that updates all says it."""
    recipe = changed(RECIPE, solver={"base_lr": 1e30})
    [expected] = ranks.shared(1, NET.error, at("all", recipe), tmp_path / "all")
    assert "the first gradient in network order that is not finite is that of" in expected
    assert ranks.shared(4, NET.error, recipe, tmp_path / "shards") == [expected] * 4


SHAPES = [(48, 16), (5, 32), (16,), (7, 16, 3)]


def one_step(whole: bool, num_leaves: int, lost: int | None = None) -> Any:
    """What a rank sends in the sum and in the gather, its shard, and the tail, in bytes; or whom it
    has lost.
    """
    with join("cpu", timeout_s=60.0, silent_s=1.5) as world:
        weights = [nn.Parameter(torch.full(shape, float(world.rank == 0))) for shape in SHAPES]
        named = {str(place): each for place, each in enumerate(weights)}
        size, rank = world.world_size, world.rank
        shards = make_shards(named, range(4), 2000, size, rank, whole)
        exchange = Exchange(world, find_route("tree", num_leaves, size, to_owners=True))
        tail, counts = [torch.zeros(3)], torch.zeros(2)
        words = named, range(4), tail, counts, num_leaves, exchange, 2000
        reducer = GradientReducer(*words, shards=shards)
        leaves = exchange.route.order(num_leaves, equal_shares(num_leaves, size)[rank])
        sent = [world.traffic.sent_bytes or 0]
        try:
            with reducer:
                reducer.begin_step(float(num_leaves), leaves, lambda: counts)
                for leaf in leaves:
                    loss = sum(((each * leaf).sum() for each in weights), torch.zeros(()))
                    reducer.add(leaf, loss, tail)
                reducer.finish_step()
                sent.append(world.traffic.sent_bytes or 0)
                mean = (num_leaves - 1) / 2
                for each in shards.own.values():
                    assert each.grad is not None
                    assert each.grad.eq(mean).all()
                with torch.no_grad():
                    for each in shards.own.values():
                        each.fill_(rank + 1.0)
                if rank == lost:
                    os.kill(os.getpid(), signal.SIGKILL)
                reducer.gather_weights()
                sent.append(world.traffic.sent_bytes or 0)
        except PeerLostError as error:
            return error.kind, error.rank
        for name, each in named.items():
            rows = shards.rows[name]
            for owner in range(size):
                part = each[rows[owner] : rows[owner + 1]] if rows[-1] == len(each) else each
                if rows[owner] < rows[owner + 1]:
                    assert part.eq(owner + 1.0).all()
        own = sum(cuts[rank + 1] - cuts[rank] for cuts in shards.cuts.values())
        return sent[1] - sent[0], sent[2] - sent[1], own


def steps_of(world_size: int) -> list[tuple[bool, int]]:
    """Whether parameters are whole, and micro-batches: a node for each rank, two, or others."""
    return [*product((False, True), (world_size, 2 * world_size, 7))]


def all_steps(world_size: int) -> list[Any]:
    return [one_step(*words) for words in steps_of(world_size)]


@pytest.mark.parametrize("workers", [2, 3, 4])
def test_bytes_are_those_of_the_formula(ranks: Ranks, workers: int) -> None:
    """(P - 1) / P of the weights to their owners and as much back, of each rank on average; of m
    nodes of the tree a rank sends each to the owners.
    """
    elements = sum(offsets([torch.empty(shape)])[-1] for shape in SHAPES)
    tail = offsets([torch.empty(3), torch.empty(len(SHAPES) + 2)])[-1]
    others = workers - 1
    by_step = zip(*ranks.shared(workers, all_steps, workers), strict=True)
    for (_, leaves), by_rank in zip(steps_of(workers), by_step, strict=True):
        nodes = list(map(len, inputs_of(leaves, equal_shares(leaves, workers))))
        assert sum(own for *_, own in by_rank) == elements
        assert sum(back for _, back, _ in by_rank) == 4 * others * elements
        if set(nodes) == {1}:
            assert sum(to for to, *_ in by_rank) == 4 * others * (elements + 2 * tail)
        for rank, (to, back, own) in enumerate(by_rank):
            start, stop = shard(tail, workers, rank)
            of_tail = nodes[rank] * (tail - stop + start) + others * (stop - start)
            assert to == 4 * (nodes[rank] * (elements - own) + of_tail)
            assert back == 4 * others * own


def test_a_killed_rank_is_named_in_the_gather(ranks: Ranks) -> None:
    first, _, last = ranks.run(3, one_step, False, 6, 1, lost={1})
    assert first == last == ("gone", 1)
