"""`firecaffe.split` in a script: bytes that travel, under DDP, and what ranks must have alike."""

from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import firecaffe
from firecaffe.cluster.agree import digest
from firecaffe.errors import AgreementError, RecipeError
from firecaffe.parallel.layer_split import Split
from firecaffe.planner.layer_traffic import layers_on
from tests.ranks.test_split_parts import WORDS, Small, sent_by
from tests.world import Ranks


def make() -> nn.Module:
    torch.manual_seed(3)
    return Small()


def sent_by_two(words: dict[str, str], batch: int) -> list[int]:
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8))
    return sent_by(model, words, torch.ones(batch, 16).requires_grad_())


def test_bytes_that_travel_are_those_of_the_formulas(ranks: Ranks) -> None:
    """docs/explanation/splitting.md: a sum is 2 (K - 1) / K of the tensor, one's parts of a sum, or
    a gathering, (K - 1) / K.
    """
    batch, share = 12, 3 / 4 * 4
    pair = ranks.shared(4, sent_by_two, {"0": "neurons", "2": "inputs"}, batch)
    assert pair == [[2 * share * batch * 8, 2 * share * batch * 16]] * 4
    alike = ranks.shared(4, sent_by_two, {"*": "neurons"}, batch)
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
            split = firecaffe.adapt.split_layers(nn.Sequential(layer), {"0": word})
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
        model = make()
        split = firecaffe.adapt.split_layers(model, WORDS, halves[rank // 2], parts=4)
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
    model = make()
    try:
        if what == "parts":
            firecaffe.adapt.split_layers(model, WORDS, parts=3)
        words = {"classifier.*": "neurons"}
        dist.init_process_group("gloo")
        own = dist.get_rank()
        if what == "words" and own == 1:
            words = {"classifier.*": "inputs"}
        split: Split = firecaffe.adapt.split_layers(model, words, parts=2)
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
