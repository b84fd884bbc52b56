"""Parts with halos over 1, 2 and 4 ranks: the same bits, and the bytes of the formula."""

import torch
from torch import nn

from firecaffe.caffe.local_response_norm import LocalResponseNorm
from firecaffe.parallel.volumes import gather_numbers, halo_numbers
from tests.ranks.splitting import compare_ranks, sent_by
from tests.world import Ranks


def normalized() -> nn.Module:
    """In four parts, the first has 1, 2, 1 and 2 channels: halos are of several parts."""
    torch.manual_seed(3)
    return nn.Sequential(
        *(nn.Conv2d(3, 6, 3), nn.ReLU(), LocalResponseNorm(6, 0.5), nn.MaxPool2d(2)),
        *(nn.Conv2d(6, 11, 3), nn.LocalResponseNorm(3, 0.5), nn.Flatten(), nn.Linear(44, 5)),
    ).double()


def test_any_number_of_ranks_ends_in_the_same_bits(ranks: Ranks) -> None:
    words = {"0": "filters", "4": "filters", "7": "inputs"}
    compare_ranks(ranks, normalized, words, (3, 10, 10))


def sent() -> list[int]:
    model = nn.Sequential(nn.Conv2d(3, 12, 1), nn.LocalResponseNorm(5))
    return sent_by(model, {"0": "filters"}, torch.ones(2, 3, 5, 7))


def test_bytes_of_halos_are_those_of_the_formula(ranks: Ranks) -> None:
    """Two ranks stand at an end and send two channels, two others send four."""
    found = ranks.shared(4, sent)
    channel = 4 * 2 * 5 * 7
    gathered = 4 * gather_numbers(4, 2 * 12 * 5 * 7, 12)
    assert [each[0] - gathered for each in found] == [channel * n for n in (2, 4, 4, 2)]
    assert [each[1] for each in found] == [channel * n for n in (2, 4, 4, 2)]
    assert sum(each[1] for each in found) / 4 == 4 * halo_numbers(4, 2 * 12 * 5 * 7, 12, 4)
