"""`firecaffe.parallelize` against DDP's own all_reduce, and torch's hooks in our trainer.

Cases that need the same number of ranks share one start of them, for a start takes longer.
"""

import gc
import os
import threading
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

import firecaffe
from firecaffe import ExchangeConfig, Recipe, SolverConfig, TrainConfig
from firecaffe.cluster.world import World
from firecaffe.errors import AgreementError, PeerLostError, RecipeError
from firecaffe.exchange.route import find_route
from firecaffe.gradients.compressors import COMPRESSORS
from firecaffe.script.script_exchange import DDPBucket, RankMean
from firecaffe.transport.exchange import Exchange
from tests.kit.worlds import Trained, Training
from tests.world import Ranks

EXCHANGES = ("tree", "ring", "native", "hierarchical(tree,ring)", "double_tree")
OPTIONS: dict[str, dict[str, Any]] = {
    "unused": {"find_unused_parameters": True},
    "static": {"static_graph": True},
    "views": {"gradient_as_bucket_view": True},
    "accumulate": {},
}
SMALL_BUCKETS: dict[str, Any] = {"bucket_cap_mb": 0.005}
Wrap = Callable[..., DistributedDataParallel]


class Network(nn.Module):
    """Several buckets of 5 kB, a weight with the channels innermost, and a parameter that only
    some inputs use."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 7, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.hidden = nn.Linear(7 * 16, 33)
        self.head = nn.Linear(33, 4)
        self.rare = nn.Parameter(torch.zeros(4))

    def forward(self, images: Tensor, use_rare: bool = True) -> Tensor:
        x = torch.relu(self.conv(images)).flatten(1)
        logits: Tensor = self.head(torch.relu(self.hidden(x)))
        return logits + self.rare if use_rare else logits


def batch(step: int) -> tuple[Tensor, Tensor]:
    rank = int(os.environ["RANK"])
    generator = torch.Generator().manual_seed(100 * step + rank)
    labels = torch.randint(0, 4, (6,), generator=generator)
    images = torch.randn(6, 3, 6, 6, generator=generator) + labels.view(-1, 1, 1, 1)
    return images, labels


def loss_of(model: nn.Module, step: int, use_rare: bool = True) -> Tensor:
    images, labels = batch(step)
    return nn.functional.cross_entropy(model(images, use_rare), labels)


def fit(wrap: Wrap, case: str = "", steps: int = 4, **options: Any) -> list[Tensor]:
    torch.manual_seed(0)
    model = wrap(Network(), **SMALL_BUCKETS, **OPTIONS.get(case, {}), **options)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    for step in range(steps):
        if case != "accumulate" or step % 2 == 0:
            optimizer.zero_grad()
        waits = case == "accumulate" and step % 2 == 0
        use_rare = case != "unused" or step % 2 == 0
        with model.no_sync() if waits else nullcontext():
            torch.autograd.backward(loss_of(model, step, use_rare))
        if not waits:
            optimizer.step()
    return [parameter.detach() for parameter in model.parameters()] + gradients_of(model)


def gradients_of(model: nn.Module) -> list[Tensor]:
    return [p.grad.to_dense().clone() for p in model.parameters() if p.grad is not None]


def fit_in_every_way() -> dict[str, list[Tensor]]:
    dist.init_process_group("gloo")
    results = {f"ddp {case}": fit(DistributedDataParallel, case) for case in ("", *OPTIONS)}
    for exchange in EXCHANGES:
        results[exchange] = fit(firecaffe.parallelize, exchange=exchange)
    for case in OPTIONS:
        results[case] = fit(firecaffe.parallelize, case)
    results["registered"] = fit(register, exchange="ring")
    return results


def register(model: nn.Module, exchange: str = "auto", **options: Any) -> DistributedDataParallel:
    """What someone does who builds DDP himself."""
    parallel = DistributedDataParallel(model, **options)
    group = options.get("process_group")
    parallel.register_comm_hook(*firecaffe.adapt.ddp_hook(exchange, process_group=group))
    return parallel


def test_gradients_are_those_of_ddp(ranks: Ranks) -> None:
    by_rank = ranks.run(4, fit_in_every_way, local_world_size=2)
    references = {name for name in by_rank[0] if name.startswith("ddp ")}
    for results in by_rank:
        for name, tensors in results.items():
            reference = results[name if name in references else f"ddp {name * (name in OPTIONS)}"]
            for tensor, expected in zip(tensors, reference, strict=True):
                assert (tensor - expected).norm() <= 1e-6 * expected.norm(), name
            for tensor, other in zip(tensors, by_rank[0][name], strict=True):
                assert torch.equal(tensor, other), name


def alone() -> None:
    """A world of one, first as a script would find it that no torchrun started."""
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name)
    os.environ["RANK"] = "0"  # for the batches
    parallel = firecaffe.parallelize(Network(), compressor="one_bit")
    assert not parallel._comm_hooks
    registered, bare = register(Network(), "tree"), Network()
    for model in (registered.module, bare):
        model.load_state_dict(parallel.module.state_dict())
    models = (parallel, registered, bare)
    for step in range(3):
        for model in models:
            model.zero_grad()
            torch.autograd.backward(loss_of(model, step))
    *wrapped, expected = map(gradients_of, models)
    assert len(expected) == len(list(bare.parameters()))
    for gradients in wrapped:
        assert all(map(torch.equal, gradients, expected))
        assert len(gradients) == len(expected)


def test_one_rank_needs_no_hook(ranks: Ranks) -> None:
    ranks.run(1, alone)


def encode_two_steps() -> list[tuple[list[Tensor], list[Tensor]]]:
    """Gradients of this rank alone and the means that came, in two steps of the same weights."""
    torch.manual_seed(0)
    bare = Network()
    model = firecaffe.parallelize(Network(), compressor="bfloat16", **SMALL_BUCKETS)
    bare.load_state_dict(model.module.state_dict())
    steps = []
    for step in range(2):
        gradients = list(torch.autograd.grad(loss_of(bare, step), list(bare.parameters())))
        model.zero_grad()
        torch.autograd.backward(loss_of(model, step))
        steps.append((gradients, gradients_of(model)))
    return steps


def test_bfloat16_is_a_rounding_from_the_second_step_on(ranks: Ranks) -> None:
    (first, second), (other_first, other_second) = ranks.run(2, encode_two_steps)
    for a, b, mean in zip(first[0], other_first[0], first[1], strict=True):
        torch.testing.assert_close(mean, (a + b) / 2)
    for a, b, mean, again in zip(
        second[0], other_second[0], second[1], other_second[1], strict=True
    ):
        sum_of_rounded = (a / 2).bfloat16().float() + (b / 2).bfloat16().float()
        assert torch.equal(mean, sum_of_rounded.bfloat16().float())
        assert torch.equal(mean, again)


def means_of(compressor: str, cuts: list[list[list[int]]]) -> list[list[Tensor]]:
    """What comes of the same gradients, step by step, with buckets that are cut so."""
    parameters = [torch.empty(shape) for shape in ((30, 20), (300,), (5,), (16, 40))]
    route = find_route("tree", None, 1, codec=compressor)
    mean = RankMean(Exchange(World(0, 1, torch.device("cpu")), route))
    generator = torch.Generator().manual_seed(0)
    steps = []
    for cut in cuts:
        gradients = [torch.randn(p.shape, generator=generator) for p in parameters]
        for index, members in enumerate(cut):
            flat = torch.cat([gradients[member].view(-1) for member in members])
            own = [parameters[member] for member in members]
            flat = mean(DDPBucket(index, index == len(cut) - 1, flat, own))
            parts = flat.split_with_sizes([parameter.numel() for parameter in own])
            for member, part in zip(members, parts, strict=True):
                gradients[member] = part.view(parameters[member].shape)
        steps.append(gradients)
    return steps


@pytest.mark.parametrize("compressor", COMPRESSORS)
def test_memory_follows_the_parameters_into_other_buckets(compressor: str) -> None:
    first, second, third = [[0, 1, 2, 3]], [[0, 1], [2], [3]], [[0, 1], [3, 2]]
    never = means_of(compressor, [first] * 6)
    again = means_of(compressor, [first, first, second, second, third, third])
    for step, gradients in enumerate(again):
        assert all(torch.equal(a, b) for a, b in zip(gradients, never[step], strict=True))


def test_what_is_not_sent_arrives_later() -> None:
    """The control of the test above: memory there is, and it does what it is for."""
    cuts = [[[0, 1, 2, 3]]] * 40
    sent, brought = means_of("one_bit", cuts)[1:], means_of("bfloat16", cuts)[1:]
    for member in range(4):
        rest = sum(ours[member] - whole[member] for ours, whole in zip(sent, brought, strict=True))
        # One step's own error, not that of 39 steps, which would be 6 times as large.
        assert torch.as_tensor(rest).norm() < 2 * brought[0][member].norm()
    # And something was kept back: no step's mean is the one that was brought.
    assert (sent[0][3] - brought[0][3]).norm() > 0.1 * brought[0][3].norm()


def lose_a_rank() -> str:
    model = firecaffe.parallelize(Network(), timeout_s=30)
    for step in range(4):
        if dist.get_rank() == 1 and step == 2:
            return "left"
        try:
            torch.autograd.backward(loss_of(model, step))
        except PeerLostError as error:
            return str(error)
    return "nobody was missed"


def test_a_lost_rank_comes_out_of_backward(ranks: Ranks) -> None:
    message, left = ranks.run(2, lose_a_rank)
    assert left == "left"
    assert "rank 1" in message


def exchange_threads() -> int:
    return sum(thread.name == "exchange" for thread in threading.enumerate())


def drop_a_model() -> tuple[int, int, int]:
    model = firecaffe.parallelize(Network())
    torch.autograd.backward(loss_of(model, 0))
    group_count = len(dist.distributed_c10d._world.pg_map)
    alive = exchange_threads()
    del model
    gc.collect()
    return alive, exchange_threads(), group_count - len(dist.distributed_c10d._world.pg_map)


def test_the_thread_and_its_group_end_with_the_model(ranks: Ranks) -> None:
    assert ranks.run(2, drop_a_model) == [(1, 0, 1)] * 2


def refusal(exchange_by_rank: list[str]) -> str:
    exchange = exchange_by_rank[int(os.environ["RANK"])]
    with pytest.raises((RecipeError, AgreementError)) as caught:
        firecaffe.parallelize(Network(), exchange=exchange, timeout_s=300)
    return str(caught.value)


def test_what_hosts_or_other_ranks_do_not_fit_is_refused(ranks: Ranks) -> None:
    """A hierarchical exchange on unequal hosts, and ranks that were told different things."""
    name = "hierarchical(tree,ring)"
    texts = ranks.run(3, refusal, [name] * 3, local_world_size=2)
    assert all(name in text and "2, 1" in text for text in texts)
    texts = ranks.run(2, refusal, ["tree", "ring"])
    assert all("exchange: ring on rank 1" in text for text in texts)


@dataclass(frozen=True)
class Hooked(Training):
    name: str = ""

    def parts(self) -> dict[str, Any]:
        return {**super().parts(), "comm_hook": hook_of(self.name)}


def hook_of(name: str) -> Any:
    if name == "ours":
        return firecaffe.adapt.ddp_hook()
    if name == "allreduce":
        return None, default_hooks.allreduce_hook
    state = powerSGD_hook.PowerSGDState(
        None,
        matrix_approximation_rank=2,
        start_powerSGD_iter=2,
        min_compression_rate=0.5,
        orthogonalization_epsilon=1e-8,  # a gradient of rank 1 is divided by 0 without
    )
    return state, default_hooks.bf16_compress_wrapper(powerSGD_hook.powerSGD_hook)


@pytest.mark.parametrize(
    ("name", "channels_last"),
    [("allreduce", False), ("ours", True), ("powerSGD in bfloat16", True)],
)
def test_torchs_hooks_sum_in_our_trainer(trained: Trained, name: str, channels_last: bool) -> None:
    recipe = Recipe(
        train=TrainConfig(24, 6, steps=6, channels_last=channels_last),
        solver=SolverConfig(base_lr=0.2),
        exchange=ExchangeConfig(bucket_bytes=200, timeout_s=300),
    )
    plain = trained(2, recipe, Training(samples=96))
    hooked, alone = (trained(workers, recipe, Hooked(samples=96, name=name)) for workers in (2, 1))
    assert hooked.drifted_ranks == []
    is_lossless = "powerSGD" not in name
    for loss in (hooked.loss, alone.loss):
        assert loss == pytest.approx(plain.loss, rel=1e-5 if is_lossless else 0.02)
    assert is_lossless or hooked.weights_sha256 != plain.weights_sha256
