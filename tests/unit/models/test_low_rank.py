"""Layers as two of lower rank: shapes, the nearest product, and names that cannot be."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from firecaffe.errors import RecipeError
from firecaffe.models import ModelConfig
from firecaffe.models.low_rank import low_rank_weights, make_low_rank, rank_of
from firecaffe.models.network import make_network, with_outline


def network() -> Any:
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Conv2d(2, 12, (3, 5), stride=2, padding=1, dilation=(1, 2), padding_mode="circular"),
        nn.Sequential(nn.Conv2d(12, 12, 1, groups=3), nn.Flatten()),
        nn.Linear(12 * 36, 7, bias=False),
    )


IMAGES = torch.randn(4, 2, 11, 17, generator=torch.Generator().manual_seed(0))


def low_rank(ranks: dict[str, int]) -> Any:
    net = network()
    changed = copy.deepcopy(net)
    make_low_rank(changed, ranks)
    changed.load_state_dict(low_rank_weights(net.state_dict(), ranks))
    return changed


def test_of_full_rank_it_computes_the_same() -> None:
    with torch.no_grad():
        torch.testing.assert_close(
            low_rank({"0": 12, "2": 7})(IMAGES), network()(IMAGES), rtol=1e-4, atol=1e-5
        )


def test_the_product_is_the_nearest_of_its_rank() -> None:
    """By Eckart and Young its distance is the root of the left out squared singular values."""
    state, whole = low_rank({"0": 4, "2": 3}).state_dict(), network().state_dict()
    assert state["0.reduce.weight"].shape == (4, 2, 3, 5)
    assert state["0.expand.weight"].shape == (12, 4, 1, 1)
    assert [name for name in state if name[0] == "2"] == ["2.reduce.weight", "2.expand.weight"]
    assert torch.equal(state["0.expand.bias"], whole["0.bias"])
    for layer, rank in {"0": 4, "2": 3}.items():
        matrix = whole[f"{layer}.weight"].flatten(1)
        reduce, expand = (state[f"{layer}.{part}.weight"] for part in ("reduce", "expand"))
        product = expand.flatten(1) @ reduce.flatten(1)
        left_out = torch.linalg.svdvals(matrix)[rank:].square().sum().sqrt()
        assert (matrix - product).norm().item() == pytest.approx(left_out.item(), rel=1e-5)


def test_the_rank_that_keeps_a_share_of_the_energy() -> None:
    weight = torch.diag(torch.tensor([3.0, 2.0, 1.0, 0.0]))  # 9, 4, 1, 0 of 14
    shares = {0.1: 1, 9 / 14 - 1e-6: 1, 0.7: 2, 13 / 14 + 1e-6: 3, 1.0: 3}
    assert {share: rank_of(weight, share) for share in shares} == shares
    assert rank_of(torch.randn(5, 3, 2, 2), 1.0) == 5


def test_every_network_that_a_recipe_names_has_it() -> None:
    config = ModelConfig("lenet", low_rank={"ip*": 10, "conv2": 3}, freeze=["ip1.reduce.*"])
    net = make_network(config)
    names = [name for name, _ in net.named_parameters()]
    conv2 = [f"conv2.{part}" for part in ("reduce.weight", "expand.weight", "expand.bias")]
    assert names[2:7] == [*conv2, "ip1.reduce.weight", "ip1.expand.weight"]
    assert not net.get_parameter("ip1.reduce.weight").requires_grad
    assert net(torch.zeros(1, 1, 28, 28)).shape == (1, 10)
    sizes = with_outline(config, None, None, lambda it: [*map(len, it.parameters())])
    assert sizes == [len(each) for each in net.parameters()]
    assert config.label != ModelConfig("lenet").label


def tied() -> Any:
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    net[1].weight = net[0].weight
    return net


def twice() -> Any:
    layer = nn.Linear(4, 4)
    return nn.Sequential(layer, nn.ReLU(), layer)


MISTAKES: list[tuple[Callable[[], Any], dict[str, int], str]] = [
    (network, {"fc": 3}, "has 'fc', .* called 0, 1.0, 2"),
    (network, {"1": 3}, "has '1', which no Linear or Conv2d"),
    (nn.Flatten, {"*": 3}, "has '\\*', .* it has none"),
    (network, {"1.0": 3}, "matches 1.0, a convolution in 3 groups"),
    (network, {"2": 8}, "of 2 is 8; it must be 1 to 7"),
    (network, {"0": 0}, "of 0 is 0; it must be 1 to 12"),
    (tied, {"1": 2}, "matches 1, whose weights have another place"),
    (twice, {"0": 2}, "matches 0, whose weights have another place"),
]


@pytest.mark.parametrize(("make", "ranks", "line"), MISTAKES)
def test_layers_that_cannot_be_had(make: Any, ranks: dict[str, int], line: str) -> None:
    with pytest.raises(RecipeError, match=f"model.low_rank {line}"):
        make_low_rank(make(), ranks)


def test_weights_that_are_not_there() -> None:
    with pytest.raises(RecipeError, match=r"there is no fc.weight to decompose"):
        low_rank_weights(network().state_dict(), {"fc": 3})
    with pytest.raises(RecipeError, match="of 2 is 8; it must be 1 to 7"):
        low_rank_weights(network().state_dict(), {"2": 8})
