"""One model over 1, 2 and 4 ranks: the same bits, and the values of the model that is not split."""

from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import firecaffe
from firecaffe.cluster.agree import digest
from firecaffe.errors import AgreementError, RecipeError
from firecaffe.models.googlenet import Inception
from firecaffe.parallel.split import Split
from firecaffe.plan.layer_traffic import layers_on
from tests.world import Ranks

WORDS = {
    "features.*": "filters",
    "features.4": "channels",
    "paths.*.conv": "filters",
    "classifier.*": "neurons",
    "classifier.3": "inputs",
}
STEPS = 4


class Small(nn.Module):
    """AlexNet in small: convolutions, one with groups, paths, and fc6, fc7, fc8 with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            *(nn.Conv2d(3, 10, 5, stride=2), nn.BatchNorm2d(10), nn.ReLU(inplace=True)),
            *(nn.MaxPool2d(3, 2, ceil_mode=True), nn.Conv2d(10, 8, 3, padding=1), nn.ReLU()),
            *(nn.Conv2d(8, 12, 3, padding=1, groups=4), nn.ReLU()),
        )
        self.paths = Inception(12, (4, 5, 6, 4, 4, 5), batch_norm=False)
        self.classifier = nn.Sequential(
            *(nn.Linear(19 * 25, 37), nn.ReLU(inplace=True), nn.Dropout(0.5)),
            *(nn.Linear(37, 22), nn.ReLU(inplace=True), nn.Linear(22, 5)),
        )

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.classifier(self.paths(self.features(x)).flatten(1))
        return y


def make(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(3)
    return Small().to(dtype)


def train(model: nn.Module, dtype: torch.dtype, steps: int = STEPS) -> list[float]:
    """Trains as any script does; returns the losses."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-3)
    torch.manual_seed(5)
    losses = []
    for _ in range(steps):
        loss = F.cross_entropy(model(torch.randn(6, 3, 24, 24, dtype=dtype)), torch.arange(6) % 5)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(loss.item())
    return losses


def trained(dtype: torch.dtype) -> tuple[list[float], dict[str, Tensor], int, int]:
    """Losses, the whole state on rank 0, the elements that this rank holds, the bytes it sent."""
    model = make(dtype)
    split = firecaffe.split(model, WORDS, parts=4)
    try:
        losses = train(split, dtype)
        held = sum(each.numel() for each in split.parameters())
        sent = split.group.group.traffic.sent_bytes
        assert sent is not None
        return losses, split.whole_state_dict(), held, sent
    finally:
        del split
        dist.destroy_process_group()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
def test_any_number_of_ranks_ends_in_the_same_bits(ranks: Ranks, dtype: torch.dtype) -> None:
    by_size = {size: ranks.shared(size, trained, dtype) for size in (1, 2, 4)}
    (losses, state, held, sent) = by_size[1][0]
    assert sent == 0
    assert held == sum(each.numel() for each in make(dtype).parameters())
    for size in (2, 4):
        for rank, (own_losses, own_state, own_held, own_sent) in enumerate(by_size[size]):
            assert own_losses == losses
            assert bool(own_state) == (rank == 0)
            assert own_held < held / size * 1.2
            assert own_sent > 0
        found = by_size[size][0][1]
        assert found.keys() == state.keys() == make(dtype).state_dict().keys()
        assert digest(sorted(found.items())) == digest(sorted(state.items())), size
    if dtype == torch.float64:
        model = make(dtype)
        expected_losses = train(model, dtype)
        torch.testing.assert_close(losses, expected_losses, rtol=1e-10, atol=0)
        for name, expected in model.state_dict().items():
            torch.testing.assert_close(state[name], expected, rtol=1e-9, atol=1e-11, msg=name)


def sent_by(words: dict[str, str], batch: int) -> list[int]:
    """Bytes that this rank sends in forward and in backward of two Linear layers."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8))
    split = firecaffe.split(model, words, parts=4)
    traffic = split.group.group.traffic
    x = torch.randn(batch, 16, requires_grad=True)
    try:
        split(x)
        start = traffic.sent_bytes
        loss = split(x).sum()
        middle = traffic.sent_bytes
        loss.backward()
        end = traffic.sent_bytes
        assert start is not None
        assert middle is not None
        assert end is not None
        return [middle - start, end - middle]
    finally:
        del split
        dist.destroy_process_group()


def test_bytes_that_travel_are_those_of_the_formulas(ranks: Ranks) -> None:
    """docs/parallel.md: a sum is 2 (K - 1) / K of the tensor, one's parts of a sum, or a gathering,
    (K - 1) / K.
    """
    batch, share = 12, 3 / 4 * 4
    pair = ranks.shared(4, sent_by, {"0": "neurons", "2": "inputs"}, batch)
    assert pair == [[2 * share * batch * 8, 2 * share * batch * 16]] * 4
    alike = ranks.shared(4, sent_by, {"*": "neurons"}, batch)
    assert alike == [[share * batch * (32 + 8), share * batch * (32 + 2 * 16)]] * 4


def alone() -> list[tuple[str, nn.Module, tuple[int, ...]]]:
    """A word, the layer that it splits, and an input. 37, 10 and 6 are not divided by 4 ranks."""
    return [
        ("neurons", nn.Linear(37, 10), (3, 37)),
        ("inputs", nn.Linear(37, 10), (3, 37)),
        ("filters", nn.Conv2d(5, 6, 3), (3, 5, 7, 7)),
        ("channels", nn.Conv2d(5, 6, 3), (3, 5, 7, 7)),
        ("filters", nn.Conv2d(12, 6, 3, groups=6), (3, 12, 7, 7)),
        ("channels", nn.Conv2d(12, 6, 3, groups=6), (3, 12, 7, 7)),
        ("filters", nn.BatchNorm2d(6), (3, 6, 7, 7)),
        ("neurons", nn.BatchNorm1d(6), (3, 6)),
    ]


def sent_alone() -> list[list[int]]:
    """Bytes that this rank sends for each layer: as a network's first one, and as a later one."""
    sent = []
    dist.init_process_group("gloo")
    try:
        for word, layer, shape in alone():
            split = firecaffe.split(nn.Sequential(layer), {"0": word})
            split(torch.ones(shape))
            ends = [split.group.group.traffic.sent_bytes or 0]
            for has_gradient in (False, True):
                split(torch.ones(shape).requires_grad_(has_gradient)).sum().backward()
                ends.append(split.group.group.traffic.sent_bytes or 0)
            sent.append([after - before for before, after in pairwise(ends)])
            del split
        return sent
    finally:
        dist.destroy_process_group()


def test_bytes_of_each_layer_are_those_of_the_profile(ranks: Ranks) -> None:
    """The mean over ranks, for in a sum those with more of the vector send less."""
    by_rank = ranks.shared(4, sent_alone)
    for number, (word, layer, shape) in enumerate(alone()):
        for is_later in (0, 1):
            x = torch.ones(shape).requires_grad_(bool(is_later))
            [found] = layers_on(nn.Sequential(layer), x)
            expected = 4 * shape[0] * found.words[word](found.sizes, 4)
            assert sum(sent[number][is_later] for sent in by_rank) / 4 == expected, (word, layer)


def pairs_of_ranks() -> list[tuple[int, str]]:
    """Two pairs of ranks with halves of a batch, each pair one model: DDP sums between them."""
    dist.init_process_group("gloo")
    try:
        rank = dist.get_rank()
        halves = [dist.new_group(each) for each in ([0, 1], [2, 3])]
        across = [dist.new_group(each) for each in ([0, 2], [1, 3])]
        model = make(torch.float32)
        split = firecaffe.split(model, WORDS, halves[rank // 2], parts=4)
        both = nn.parallel.DistributedDataParallel(split, process_group=across[rank % 2])
        torch.manual_seed(rank // 2)
        x = torch.randn(4, 3, 24, 24)
        both.eval()  # without dropout and statistics, the gradients are those of all samples
        F.cross_entropy(both(x), torch.arange(4) % 5).backward()  # type: ignore[no-untyped-call]
        gradients = {
            name: each.grad for name, each in split.named_parameters() if each.grad is not None
        }
        del both, split
        return [(rank % 2, digest(sorted(gradients.items())))]
    finally:
        dist.destroy_process_group()


def test_pairs_of_ranks_under_ddp(ranks: Ranks) -> None:
    found = ranks.run(4, pairs_of_ranks)
    assert found[:2] == found[2:]
    assert found[0] != found[1]


def wrong(what: str) -> str:
    model = make(torch.float32)
    try:
        if what == "parts":
            firecaffe.split(model, WORDS, parts=3)
        words = {"classifier.*": "neurons"}
        dist.init_process_group("gloo")
        own = dist.get_rank()
        if what == "words" and own == 1:
            words = {"classifier.*": "inputs"}
        split: Split = firecaffe.split(model, words, parts=2)
        torch.manual_seed(own if what == "random" else 0)
        images = torch.ones(2, 3, 24, 24) * (own if what == "input" else 1)
        split(images)
        return "nothing"
    except (RecipeError, AgreementError) as error:
        return str(error)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


@pytest.mark.parametrize(
    ("what", "told"),
    [
        ("parts", "2 ranks cannot hold 3 parts equally; take parts=2 or 4"),
        ("words", "differs from the others in the words of split"),
        ("input", "what it gives the split network"),
        ("random", "random numbers"),
    ],
)
def test_what_ranks_must_have_alike(ranks: Ranks, what: str, told: str) -> None:
    assert all(told in each for each in ranks.shared(2, wrong, what))
