"""What ranks that know parts of a step's sums find out, and norms of tensors in parts."""

import torch
from torch import nn

from firecaffe.cluster.group import Group
from firecaffe.parallel.cut import cut
from firecaffe.solvers.update_rules import Lamb
from firecaffe.training.updates.spread import (
    UNUSED,
    Among,
    LossScale,
    TensorPart,
    UpdatingScaler,
    total,
)


def in_parts(whole: torch.Tensor, parts: int) -> tuple[dict[str, nn.Parameter], Among]:
    """Columns of a weight, and a bias that is not in parts; on one rank."""
    columns = cut(whole.shape[1], parts)
    named = {
        f"0.parts.{part}.weight": nn.Parameter(each.clone())
        for part, each in enumerate(whole.tensor_split(list(columns[1:-1]), 1))
    }
    of = {name: TensorPart("0.weight", number, parts) for number, name in enumerate(named)}
    named["0.bias"] = nn.Parameter(torch.arange(3.0))
    of["0.bias"] = TensorPart("0.bias")
    row = Group(0, 1, torch.device("cpu"))
    network = {"0.weight": torch.float32, "0.bias": torch.float32}
    return named, Among([row], network, of, named)


def norm_of_gradient(spread: Among) -> torch.Tensor:
    """By what they agree on."""
    scaler = UpdatingScaler("cpu", enabled=False)
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))])
    scale = LossScale(scaler, optimizer, torch.device("cpu"))
    return spread.agree(torch.zeros(1), 0, torch.ones(5, dtype=torch.bool), True, scale).norm


def test_norms_of_whole_tensors() -> None:
    whole = torch.randn(3, 10, generator=torch.Generator().manual_seed(1))
    named, spread = in_parts(whole, 4)
    weights = list(named.values())
    [found] = spread.norms(weights, [[each.detach() for each in weights]])
    expected = [torch.linalg.vector_norm(whole)] * 4 + [torch.tensor(5.0).sqrt()]
    torch.testing.assert_close(list(found), expected)
    assert len({float(each) for each in found}) == 2
    for each in weights:
        each.grad = each.detach().clone()
    both = nn.utils.get_total_norm([whole, torch.arange(3.0)])
    torch.testing.assert_close(norm_of_gradient(spread), both)
    for name in ("0.parts.0.weight", "0.parts.1.weight", "0.parts.2.weight", "0.parts.3.weight"):
        named[name].grad = None
    assert norm_of_gradient(spread) == torch.arange(3.0).norm()


def test_a_layers_rate_is_that_of_the_whole() -> None:
    """Against the whole layer's own update."""
    whole = torch.randn(3, 10, generator=torch.Generator().manual_seed(2))
    gradient = torch.randn(3, 10, generator=torch.Generator().manual_seed(3))
    alone = nn.Parameter(whole.clone())
    named, spread = in_parts(whole, 4)
    parts = [each for name, each in named.items() if name != "0.bias"]
    words = (0.1, (0.9, 0.99), 1e-6, 0.01)
    of_whole, of_parts = Lamb([alone], *words), Lamb(parts, *words)
    of_parts.take_norms(spread.norms)
    for factor in (1.0, -0.5):
        alone.grad, place = gradient * factor, 0
        for each in parts:
            each.grad = alone.grad[:, place : (place := place + each.shape[1])].clone()
        of_whole.step()
        of_parts.step()
    torch.testing.assert_close(torch.cat([each.detach() for each in parts], 1), alone.detach())


def test_the_norm_of_all_is_torchs_own() -> None:
    kinds = [torch.float32, torch.float64, torch.float32, torch.bfloat16]
    drawn = torch.Generator().manual_seed(4)
    tensors = [torch.randn(99, generator=drawn).to(kind) for kind in kinds]
    told = torch.stack([each.norm().double() for each in tensors])
    assert total(told, kinds).equal(nn.utils.get_total_norm(tensors))
    told[1] = UNUSED
    assert total(told, kinds).equal(nn.utils.get_total_norm([tensors[0], *tensors[2:]]))
