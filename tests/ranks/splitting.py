"""A split network that is trained on 1, 2 and 4 ranks, for tests of what can be split."""

from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import firecaffe
from firecaffe.cluster.agree import digest
from tests.world import Ranks

Make = Callable[[], nn.Module]
"""A network, with the same weights in each call, in float64; and of 5 classes."""


def trained(
    make: Make, words: dict[str, str], shape: tuple[int, ...]
) -> tuple[list[float], dict[str, Tensor], int]:
    """Losses, the whole state on rank 0, and the elements that this rank holds. Without words, of
    the network that is not split.
    """
    model = make()
    split = firecaffe.split(model, words, parts=4) if words else None
    network = model if split is None else split
    try:
        optimizer = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9)
        torch.manual_seed(5)
        losses = []
        for _ in range(3):
            loss = F.cross_entropy(network(torch.randn(4, *shape).double()), torch.arange(4))
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            losses.append(loss.item())
        state = model.state_dict() if split is None else split.whole_state_dict()
        return losses, state, sum(each.numel() for each in network.parameters())
    finally:
        del split, network
        if dist.is_initialized():
            dist.destroy_process_group()


def compare_ranks(
    ranks: Ranks, make: Make, words: dict[str, str], shape: tuple[int, ...]
) -> dict[int, list[int]]:
    """Compares bits on 1, 2 and 4 ranks, and values with the network that is not split. Returns the
    elements that each rank holds.
    """
    [(losses, state, held)] = ranks.shared(1, trained, make, words, shape)
    elements = {1: [held]}
    for size in (2, 4):
        found = ranks.shared(size, trained, make, words, shape)
        assert all(own_losses == losses for own_losses, _, _ in found)
        assert list(found[0][1]) == list(state)
        assert digest(sorted(found[0][1].items())) == digest(sorted(state.items())), size
        elements[size] = [held for _, _, held in found]
    [(expected_losses, expected, _)] = ranks.shared(1, trained, make, {}, shape)
    torch.testing.assert_close(losses, expected_losses, rtol=1e-10, atol=0)
    for name, each in expected.items():
        torch.testing.assert_close(state[name], each, rtol=1e-9, atol=1e-11, msg=name)
    return elements


def sent_by(model: nn.Module, words: dict[str, str], x: Tensor, parts: int = 4) -> list[int]:
    """Bytes that this rank sends in forward and in backward."""
    split = firecaffe.split(model, words, parts=parts)
    traffic = split.group.group.traffic
    try:
        split(x)
        ends = [traffic.sent_bytes or 0]
        y = split(x)
        ends.append(traffic.sent_bytes or 0)
        y.sum().backward()
        ends.append(traffic.sent_bytes or 0)
        return [ends[1] - ends[0], ends[2] - ends[1]]
    finally:
        del split
        dist.destroy_process_group()
