"""Post-local SGD on real ranks: ours and torch's own come to the same weights."""

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import (
    PostLocalSGDState,
    post_localSGD_hook,
)
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.nn.parallel import DistributedDataParallel

import firecaffe
from firecaffe import Recipe, RunConfig, SolverConfig, SynchronyConfig, TrainConfig
from firecaffe.cluster.world import join
from firecaffe.data import SampleOrder, TensorDataset
from firecaffe.training.checkpoint import load_newest
from tests.world import Ranks

RANKS, SYNCHRONOUS, H, STEPS, RATE, MOMENTUM = 4, 4, 3, 10, 0.2, 0.9
TRAIN = TrainConfig(global_batch_size=32, micro_batch_size=4, steps=STEPS, seed=4)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 3))
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.linspace(-0.5, 0.5, parameter.numel()).view_as(parameter))

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.layers(inputs)
        return outputs


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
    firecaffe.train(recipe, Net, samples(), samples())


def torchs() -> dict[str, Tensor]:
    """Rank r takes the samples of replica r. The averager counts from its warm-up's end, and its
    first average comes with that step.
    """
    data = samples()
    order = SampleOrder(TRAIN.seed, len(data), TRAIN.global_batch_size, TRAIN.micro_batch_size)
    each = order.num_micro_batches // RANKS
    with join("cpu") as world:
        net = Net()
        model = DistributedDataParallel(net, process_group=world.group)
        state = PostLocalSGDState(world.group, world.group, SYNCHRONOUS, False)  # type: ignore[no-untyped-call]
        model.register_comm_hook(state, post_localSGD_hook)
        optimizer = torch.optim.SGD(net.parameters(), RATE, MOMENTUM)
        averager = PeriodicModelAverager(H, SYNCHRONOUS + H - 1, world.group)
        for step in range(STEPS):
            own = range(world.rank * each, (world.rank + 1) * each)
            which = torch.cat([order.micro_batch(step, leaf) for leaf in own])
            optimizer.zero_grad()
            loss = F.cross_entropy(model(data.inputs[which]), data.targets[which])
            torch.autograd.backward(loss)
            optimizer.step()
            averager.average_parameters(net.parameters())
        return {name: each.detach().clone() for name, each in net.named_parameters()}


def test_weights_are_those_of_torch(ranks: Ranks, tmp_path: Path) -> None:
    expected, *others = ranks.shared(RANKS, torchs)
    for other in others:
        assert all(torch.equal(other[name], each) for name, each in expected.items())
    ranks.shared(RANKS, ours, str(tmp_path / "run"))
    found = load_newest(tmp_path / "run")[0].tensors
    for name, each in expected.items():
        torch.testing.assert_close(found[f"parameter/{name}"], each, rtol=1e-4, atol=1e-5)
    start = dict(Net().named_parameters())
    assert not any(torch.allclose(start[name], each, atol=0.05) for name, each in expected.items())
