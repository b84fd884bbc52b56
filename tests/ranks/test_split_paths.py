"""Paths over 1, 2 and 4 ranks: the same bits, the weights of own paths alone, counted bytes."""

import torch
import torch.distributed as dist
from torch import Tensor, nn

import firecaffe
from firecaffe.models.googlenet import Inception
from firecaffe.models.squeezenet import Fire
from firecaffe.parallel.volumes import by_paths
from firecaffe.plan.layer_traffic import paths_on
from tests.ranks.splitting import compare_ranks, sent_by
from tests.world import Ranks

WIDTHS = (4, 3, 6, 2, 3, 5)


def inceptions() -> nn.Module:
    """The first has a path without weights that need a gradient, behind inputs without."""
    torch.manual_seed(3)
    first = Inception(3, WIDTHS, batch_norm=False)
    for each in first.branch3.parameters():
        each.requires_grad_(False)
    return nn.Sequential(
        *(first, nn.LocalResponseNorm(5, 0.5), nn.MaxPool2d(2)),
        *(Inception(18, WIDTHS, batch_norm=True), nn.Flatten(), nn.Linear(18 * 9, 5)),
    ).double()


def test_any_number_of_ranks_ends_in_the_same_bits(ranks: Ranks) -> None:
    words = {"0": "paths", "3": "paths", "5": "inputs"}
    held = compare_ranks(ranks, inceptions, words, (3, 6, 6))
    [whole], halves, quarters = held[1], held[2], held[4]
    bias = 5
    assert sum(halves) - bias == sum(quarters) - 3 * bias == whole
    assert max(halves) < whole
    assert max(quarters) < max(halves)


def sent() -> list[int]:
    x = torch.ones(2, 8, 5, 7).requires_grad_()
    return sent_by(nn.Sequential(Inception(8, WIDTHS, batch_norm=False)), {"0": "paths"}, x)


def test_bytes_of_paths_are_those_of_the_formula(ranks: Ranks) -> None:
    """Of 4, 6, 3 and 5 channels, all send as much as 6."""
    found = ranks.shared(4, sent)
    sample = 2 * 5 * 7
    assert found == [found[0]] * 4
    assert sum(found[0]) == 4 * by_paths(4, 8 * sample, 6 * sample)
    network = nn.Sequential(nn.Conv2d(3, 8, 1), Inception(8, WIDTHS, batch_norm=False))
    [module] = paths_on(network, torch.ones(2, 3, 5, 7))
    planned = module.volumes(2, 4)
    assert (planned.name, planned.paths) == ("1", 4)
    assert planned.by_paths == by_paths(4, 8 * sample, 6 * sample)
    assert (planned.inputs, planned.outputs) == (8 * 35, 18 * 35)
    assert module.volumes(2, 5).by_paths is None
    assert planned.cheapest == "data"
    assert planned.by_data == 2 * 3 / 4 * sum(each.numel() for each in network[1].parameters())


def loaded(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """What was saved of two parts on one rank, in two parts on two."""
    split = firecaffe.split(nn.Sequential(Fire(6, 3, 5)), {"0": "paths"}, parts=2)
    try:
        split.load_whole_state_dict(state)
        return split.whole_state_dict()
    finally:
        del split
        dist.destroy_process_group()


def test_tensors_that_some_ranks_have_are_saved_and_loaded(ranks: Ranks) -> None:
    state = nn.Sequential(Fire(6, 3, 5)).state_dict()
    found, of_second = ranks.shared(2, loaded, state)
    assert list(found) == list(state)
    assert all(torch.equal(found[name], state[name]) for name in state)
    assert not of_second
