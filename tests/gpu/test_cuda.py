"""On CUDA: the same bits every time, on any number of workers. Skips without."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import HashStore
from torch.nn.parallel import DistributedDataParallel

import firecaffe
from firecaffe import ExchangeConfig, Recipe, RunConfig, SolverConfig, TrainConfig
from firecaffe.cluster.world import join
from firecaffe.data import Batches, DataConfig, SampleOrder, open_data
from firecaffe.data.batches import PrefetchedBatches
from firecaffe.exchange import ALGORITHMS
from firecaffe.exchange.route import keeps_tree_order
from firecaffe.gradients.compressors import COMPRESSORS
from firecaffe.measure.known_sum import interpret
from firecaffe.models import build_model
from firecaffe.runs.run_folder import read_run_file
from firecaffe.transport.exchange import Exchange
from tests.kit.data_photos import make_folder, pack
from tests.ranks import matrix
from tests.ranks.networks import Everything, small_data
from tests.world import Ranks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
needs_two = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")

RECIPE = Recipe(
    train=TrainConfig(
        global_batch_size=24, micro_batch_size=4, steps=5, seed=3, device="cuda", eval_batch_size=7
    ),
    solver=SolverConfig(type="adam", base_lr=0.01, clip_gradients=0.5),
    exchange=ExchangeConfig(bucket_bytes=200, timeout_s=300),
)


def fit(recipe: Recipe, folder: str) -> firecaffe.Result:
    recipe = dataclasses.replace(recipe, run=RunConfig(folder=folder, tensorboard=False))
    return firecaffe.train(recipe, Everything, small_data(100), small_data(30, 1))


@pytest.mark.parametrize(
    "words",
    [{}, {"channels_last": True}, {"autocast": "bfloat16"}, {"autocast": "float16"}],
    ids=["float32", "channels_last", "bfloat16", "float16"],
)
def test_one_gpu_gives_the_same_bits_twice(
    ranks: Ranks, words: dict[str, object], tmp_path: Path
) -> None:
    train = dataclasses.replace(RECIPE.train, **words)  # type: ignore[arg-type]
    recipe = dataclasses.replace(RECIPE, train=train)
    first, second = (ranks.run(1, fit, recipe, str(tmp_path / name))[0] for name in "ab")
    assert first.state_sha256 == second.state_sha256
    assert read_run_file(tmp_path / "a", "result.json")["cost_of_determinism"] > 0


@needs_two
@pytest.mark.parametrize(
    "words",
    [
        *({"algorithm": name} for name in ALGORITHMS if keeps_tree_order(name)),
        *({"compressor": name} for name in COMPRESSORS),
    ],
    ids=str,
)
def test_two_gpus_give_the_bits_of_one(ranks: Ranks, words: dict[str, str], tmp_path: Path) -> None:
    exchange = dataclasses.replace(RECIPE.exchange, **words)  # type: ignore[arg-type]
    recipe = dataclasses.replace(RECIPE, exchange=exchange)
    one = ranks.run(1, fit, recipe, str(tmp_path / "1"))[0]
    two = ranks.run(2, fit, recipe, str(tmp_path / "2"))[0]
    assert one.state_sha256 == two.state_sha256


def on_gpu(recipe: Recipe) -> Recipe:
    return dataclasses.replace(recipe, train=dataclasses.replace(recipe.train, device="cuda"))


@needs_two
@pytest.mark.parametrize("holding", ["split", "trick", "stages"])
def test_a_network_on_two_gpus_gives_the_bits_of_one(
    ranks: Ranks, holding: str, tmp_path: Path
) -> None:
    case = matrix.full({"holding": holding})
    one = ranks.run(1, matrix.fit, on_gpu(matrix.alone(case)[0]), tmp_path / "1")[0]
    two = ranks.run(2, matrix.fit, on_gpu(matrix.recipe_of(case, matrix.FIRST)), tmp_path / "2")[0]
    assert one.state_sha256 == two.state_sha256


@pytest.mark.parametrize("mode", ["local", "backup", "stale", "asynchronous"])
def test_a_mode_goes_on_from_its_checkpoint(ranks: Ranks, mode: str, tmp_path: Path) -> None:
    # With `again`, gradients of backup wait in its checkpoint.
    words = {"mode": mode, "synchrony.in_flight": 2, "synchrony.dropped": "again"}
    recipe = on_gpu(matrix.recipe_of(matrix.full(words), matrix.FIRST))
    ranks.run(1, matrix.fit, recipe, tmp_path / "first")
    saved = min((tmp_path / "first" / "checkpoints").glob("step-*"))
    again = ranks.run(1, matrix.fit, recipe, tmp_path / "then", 0, str(saved))[0]
    assert again.steps == matrix.STEPS


def exchange_on_gpu(algorithm: str) -> torch.Tensor:
    with join("cuda") as world:
        assert world.needs_one_order
        vector = torch.arange(1009.0, device=world.device) * (world.rank + 0.1)
        Exchange.of_vectors(world, algorithm).all_reduce(vector)
        return vector.cpu()


@needs_two
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_exchange_over_nccl(ranks: Ranks, algorithm: str) -> None:
    vectors = [torch.arange(1009.0) * (rank + 0.1) for rank in range(2)]
    expected = interpret(ALGORITHMS[algorithm](2, 1009), vectors)
    for rank, result in enumerate(ranks.run(2, exchange_on_gpu, algorithm)):
        assert torch.equal(result, expected[rank])


@pytest.mark.parametrize("name", ["googlenet", "resnet50", "alexnet"])
def test_every_layer_has_a_deterministic_kernel(name: str) -> None:
    torch.use_deterministic_algorithms(True)
    try:
        model = build_model(name).cuda()
        size = 227 if name == "alexnet" else 224
        outputs = model(torch.randn(2, 3, size, size, device="cuda"))
        logits = outputs if isinstance(outputs, torch.Tensor) else outputs[0]
        torch.autograd.backward(logits.sum())
    finally:
        torch.use_deterministic_algorithms(False)


def gradients(model: nn.Module, device: torch.device, rank: int) -> list[Tensor]:
    """The gradients of three steps; the buckets are cut anew after the first."""
    found: list[Tensor] = []
    for step in range(3):
        generator = torch.Generator().manual_seed(10 * step + rank)
        batch = torch.randn(4, 8, generator=generator).to(device)
        model.zero_grad()
        torch.autograd.backward(model(batch).square().mean())
        found += [p.grad.cpu().clone() for p in model.parameters() if p.grad is not None]
    return found


def network(device: torch.device) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 300), nn.ReLU(), nn.Linear(300, 5)).to(device)


def alone() -> None:
    device = torch.device("cuda", 0)
    dist.init_process_group("cpu:gloo,cuda:nccl", store=HashStore(), rank=0, world_size=1)
    expected = gradients(network(device), device, 0)
    parallel = DistributedDataParallel(network(device), device_ids=[0])
    parallel.register_comm_hook(*firecaffe.adapt.ddp_hook())
    wrapped = firecaffe.parallelize(network(device))
    for model in (parallel, wrapped):
        for own, reference in zip(gradients(model, device, 0), expected, strict=True):
            assert torch.equal(own, reference)
    dist.destroy_process_group()


def test_a_bucket_of_one_rank_is_a_future_on_its_device(ranks: Ranks) -> None:
    ranks.run(1, alone)


def together() -> None:
    dist.init_process_group("nccl")
    rank = dist.get_rank()
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    expected = gradients(DistributedDataParallel(network(device), [rank]), device, rank)
    for exchange in ("tree", "ring", "native"):
        model = firecaffe.parallelize(network(device), exchange=exchange, bucket_cap_mb=0.005)
        for own, reference in zip(gradients(model, device, rank), expected, strict=True):
            assert (own - reference).norm() <= 1e-5 * reference.norm(), exchange
    dist.destroy_process_group()


@needs_two
def test_gradients_are_those_of_ddp_over_nccl(ranks: Ranks) -> None:
    ranks.run(2, together)


@pytest.mark.parametrize("augment", ["caffe", "inception"])
def test_batches_on_the_gpu_are_those_of_the_cpu(tmp_path: Path, augment: str) -> None:
    pack(make_folder(tmp_path / "photos"), tmp_path / "packed")
    sizes: Any = {"resize": 16, "crop": 12, "mirror": True, "augment": augment}
    colors: Any = {"mean": [0.5, 0.4, 0.3], "std": [0.2, 0.3, 0.4]}
    config = DataConfig("packed", str(tmp_path / "packed"), **sizes, **colors)
    train, order = open_data(config).train, SampleOrder(5, 30, 8, 4)
    there = PrefetchedBatches(Batches(train, order, config, "cuda"), range(2), 0, 8)
    here = Batches(train, order, config, "cpu")
    for step in range(8):
        for leaf in range(2):
            images, labels = there.train_batch(step, leaf)
            expected, expected_labels = here.train_batch(step, leaf)
            assert images.device.type == labels.device.type == "cuda"
            torch.testing.assert_close(images.cpu(), expected, rtol=1e-6, atol=1e-6)
            assert torch.equal(labels.cpu(), expected_labels)
    there.close()
