"""Parts with halos over 1, 2 and 4 ranks: the same bits, and the bytes of the formula."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import firecaffe
from firecaffe.cluster.digest import digest
from firecaffe.models.local_response_norm import LocalResponseNorm
from firecaffe.parallel.volumes import gather_numbers, halo_numbers
from tests.world import Ranks


def normalized() -> nn.Module:
    """In four parts, the first has 1, 2, 1 and 2 channels: halos are of several parts."""
    torch.manual_seed(3)
    return nn.Sequential(
        *(nn.Conv2d(3, 6, 3), nn.ReLU(), LocalResponseNorm(6, 0.5), nn.MaxPool2d(2)),
        *(nn.Conv2d(6, 11, 3), nn.LocalResponseNorm(3, 0.5), nn.Flatten(), nn.Linear(44, 5)),
    ).double()


def trained(words: dict[str, str]) -> tuple[list[float], dict[str, Tensor]]:
    """Losses, and the whole state on rank 0. Without words, of the network that is not split."""
    model = normalized()
    split = firecaffe.split(model, words, parts=4) if words else None
    try:
        network = model if split is None else split
        optimizer = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9)
        torch.manual_seed(5)
        losses = []
        for _ in range(3):
            x = torch.randn(4, 3, 10, 10).double()
            loss = F.cross_entropy(network(x), torch.arange(4))
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            losses.append(loss.item())
        return losses, model.state_dict() if split is None else split.whole_state_dict()
    finally:
        del split
        if dist.is_initialized():
            dist.destroy_process_group()


def test_any_number_of_ranks_ends_in_the_same_bits(ranks: Ranks) -> None:
    words = {"0": "filters", "4": "filters", "7": "inputs"}
    [(losses, state)] = ranks.shared(1, trained, words)
    for size in (2, 4):
        found = ranks.shared(size, trained, words)
        assert all(own_losses == losses for own_losses, _ in found)
        assert digest(sorted(found[0][1].items())) == digest(sorted(state.items())), size
    [(expected_losses, expected)] = ranks.shared(1, trained, {})
    torch.testing.assert_close(losses, expected_losses, rtol=1e-10, atol=0)
    for name, each in expected.items():
        torch.testing.assert_close(state[name], each, rtol=1e-9, atol=1e-11, msg=name)


def sent() -> list[int]:
    """Bytes that this rank sends in forward and in backward."""
    model = nn.Sequential(nn.Conv2d(3, 12, 1), nn.LocalResponseNorm(5))
    split = firecaffe.split(model, {"0": "filters"}, parts=4)
    traffic = split.group.group.traffic
    try:
        split(torch.ones(2, 3, 5, 7))
        ends = [traffic.sent_bytes or 0]
        y = split(torch.ones(2, 3, 5, 7))
        ends.append(traffic.sent_bytes or 0)
        y.sum().backward()
        ends.append(traffic.sent_bytes or 0)
        return [ends[1] - ends[0], ends[2] - ends[1]]
    finally:
        del split
        dist.destroy_process_group()


def test_bytes_of_halos_are_those_of_the_formula(ranks: Ranks) -> None:
    """Two ranks stand at an end and send two channels, two others send four."""
    found = ranks.shared(4, sent)
    channel = 4 * 2 * 5 * 7
    gathered = 4 * gather_numbers(4, 2 * 12 * 5 * 7, 12)
    assert [each[0] - gathered for each in found] == [channel * n for n in (2, 4, 4, 2)]
    assert [each[1] for each in found] == [channel * n for n in (2, 4, 4, 2)]
    assert sum(each[1] for each in found) / 4 == 4 * halo_numbers(4, 2 * 12 * 5 * 7, 12, 4)
