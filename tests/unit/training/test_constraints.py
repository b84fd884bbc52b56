"""Masks and shared weights under every solver, on one worker, without a training around."""

import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from firecaffe import ModelConfig, PruneConfig, Recipe, ShareConfig, SolverConfig
from firecaffe.errors import RecipeError
from firecaffe.models.network import freeze
from firecaffe.solvers.config import BY_ELEMENT
from firecaffe.solvers.optimizer import SOLVERS, make_optimizer, set_rate
from firecaffe.training.constraints import Sharing, make_constraints
from firecaffe.training.evaluation_weights import Ema
from firecaffe.training.piece import LocalWholes


def network() -> Any:
    torch.manual_seed(4)
    return nn.Sequential(nn.Linear(7, 9), nn.BatchNorm1d(9), nn.ReLU(), nn.Linear(9, 3))


def constraints_of(net: nn.Module, **sections: Any) -> list[Any]:
    named = dict(net.named_parameters())
    return make_constraints(Recipe(**sections), named, named, LocalWholes())


class Trained:
    """A network that is trained under a recipe's constraints, on random samples."""

    def __init__(self, net: nn.Module, solver: str | SolverConfig, **sections: Any) -> None:
        self.net, self.done = net, 0
        self.constraints = constraints_of(net, **sections)
        if isinstance(solver, str):
            solver = SolverConfig(solver, base_lr=0.05, momentum=0.9, weight_decay=0.01)
        self.named = dict(net.named_parameters())
        self.optimizer = make_optimizer(self.named, solver)
        self.ema = Ema(self.named, 0.9)
        for each in self.constraints:
            each.begin()

    def step(self, is_skipped: bool = False) -> None:
        inputs = torch.randn(6, 7, generator=torch.Generator().manual_seed(self.done))
        self.net.zero_grad()
        self.net(inputs.to(next(self.net.parameters()).dtype)).square().mean().backward()
        set_rate(self.optimizer, 0.05)
        for each in self.constraints:
            each.before_update(self.done)
        if not is_skipped:  # as float16 skips a step whose gradient is not finite
            self.optimizer.step()
        for each in self.constraints:
            each.after_update(self.done)
        self.ema.update(self.done)
        for each in self.constraints:
            each.restrict(self.ema.average)
        self.done += 1

    @property
    def first(self) -> Any:
        return self.constraints[0]


def check_masked(trained: Trained, masks: dict[str, Tensor]) -> None:
    for name, mask in masks.items():
        assert torch.equal(trained.named[name] != 0, mask)
        assert torch.equal(trained.ema.average[name] != 0, mask)


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("decay_form", ["l2", "l1", "decoupled"])
def test_pruned_weights_stay_zero_and_shared_ones_shared(solver: str, decay_form: Any) -> None:
    words = SolverConfig(solver, momentum=0.9, weight_decay=0.01, decay_form=decay_form, trust=1.0)
    pruned = Trained(network(), words, prune=PruneConfig({"*": 0.3}))
    shared = Trained(network(), words, share=ShareConfig({"*": 2}))
    masks = {name: mask.clone() for name, mask in pruned.first.masks.items()}
    assert [int(mask.sum()) for mask in masks.values()] == [19, 8]
    before = [copy.deepcopy(each.net.state_dict()) for each in (pruned, shared)]
    for _ in range(5):
        pruned.step()
        check_masked(pruned, masks)
        shared.step()
        for name, codes in shared.first.codes.items():
            for of in (shared.named[name], shared.ema.average[name]):
                assert len(torch.unique(of)) == len(torch.unique(codes)) == 4
    for name, mask in masks.items():
        assert (pruned.named[name][mask] != before[0][name][mask]).all()
        assert (shared.named[name] != before[1][name]).all()


class Codebooks(nn.Module):
    """Codebooks as parameters, whose gradients autograd finds."""

    def __init__(self, net: nn.Module, sharing: Sharing) -> None:
        super().__init__()
        self.net = [net]  # no module of this one
        self.codes = sharing.codes
        self.values, self.others = nn.ParameterDict(), nn.ParameterDict()
        for name, weight in net.named_parameters():
            if name not in self.codes:
                self.others[name.replace(".", "-")] = nn.Parameter(weight.detach().clone())
                continue
            codes = range(1, int(self.codes[name].max()) + 1)
            first = [weight[self.codes[name] == code][0] for code in codes]
            self.values[name.replace(".", "-")] = nn.Parameter(torch.stack(first).detach())

    def weights(self) -> dict[str, Tensor]:
        found = {name.replace("-", "."): each for name, each in self.others.items()}
        for key, values in self.values.items():
            codes = self.codes[key.replace("-", ".")]
            with_zero = torch.cat([values.new_zeros(1), values])
            found[key.replace("-", ".")] = with_zero[codes.long()]
        return found

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = torch.func.functional_call(self.net[0], self.weights(), inputs)
        return outputs


@pytest.mark.parametrize("solver", BY_ELEMENT)
def test_it_is_a_solver_with_the_values_as_parameters(solver: str) -> None:
    net = network().double()
    with torch.no_grad():
        net[0].weight[:, :3] = 0  # pruned
    ours = Trained(net, solver, share=ShareConfig({"*": 2}))
    theirs = Trained(Codebooks(copy.deepcopy(net), ours.first), solver)
    for _ in range(6):
        ours.step()
        theirs.step()
    assert isinstance(theirs.net, Codebooks)
    for name, weight in theirs.net.weights().items():
        torch.testing.assert_close(ours.named[name].detach(), weight, rtol=1e-9, atol=1e-12)
    weight = ours.named["0.weight"]
    assert weight.grad is not None
    assert not weight[:, :3].any()
    assert not weight.grad[:, :3].any()


@pytest.mark.parametrize("solver", ["sgd", "adam", "lamb"])
def test_values_that_are_not_trained_stay(solver: str) -> None:
    trained = Trained(network(), solver, share=ShareConfig({"0": 3}, train=False))
    before = copy.deepcopy(trained.net.state_dict())
    for _ in range(3):
        trained.step()
    after = trained.net.state_dict()
    assert torch.equal(after["0.weight"], before["0.weight"])
    assert torch.equal(trained.ema.average["0.weight"], before["0.weight"])
    assert not torch.equal(after["3.weight"], before["3.weight"])
    assert not torch.equal(after["0.bias"], before["0.bias"])


def test_gradual_pruning_goes_to_the_share_and_no_weight_comes_back() -> None:
    words = PruneConfig({"0": 0.1, "3": 0.5}, how="gradual", steps=10, every=4)
    trained = Trained(network(), "sgd", prune=words)
    kept = [{name: mask.clone() for name, mask in trained.first.masks.items()}]
    for _ in range(12):
        trained.step()
        check_masked(trained, trained.first.masks)
        kept.append({name: mask.clone() for name, mask in trained.first.masks.items()})
    assert [int(each["0.weight"].sum()) for each in kept] == [
        *[63] * 4,  # all until step 4
        *[round(63 * (0.1 + 0.9 * 0.6**3))] * 4,
        *[round(63 * (0.1 + 0.9 * 0.2**3))] * 2,
        *[round(63 * 0.1)] * 3,
    ]
    assert int(kept[-1]["3.weight"].sum()) == 14  # of 27, to the even one
    for before, after in itertools.pairwise(kept):
        assert not any((after[name] & ~before[name]).any() for name in after)


def test_with_surgery_weights_come_back_until_the_masks_are_fixed() -> None:
    net: Any = nn.Sequential(nn.Linear(3, 1, bias=False))
    weight = net[0].weight
    words = PruneConfig({"0": 0.34}, how="surgery", steps=3, every=1)
    [pruning] = constraints_of(net, prune=words)
    with torch.no_grad():  # as model.weights gives them
        weight.copy_(torch.tensor([[3.0, 1.0, -0.5]]))
    optimizer = torch.optim.SGD(net.parameters(), 1.0)

    def update(step: int, gradient: list[float]) -> list[float]:
        weight.grad = torch.tensor([gradient]).float()
        pruning.before_update(step)
        optimizer.step()
        pruning.after_update(step)
        found: list[float] = weight.detach()[0].tolist()
        return found

    pruning.begin()
    assert weight.tolist() == [[3, 0, 0]]
    assert update(0, [0, -2.5, 0]) == [3, 0, 0]  # 3.5 is not larger by the margin
    assert update(1, [0, -1, 0]) == [0, 4.5, 0]
    assert pruning.dense["0.weight"].tolist() == [[3, 4.5, -0.5]]
    assert update(2, [-9, 0, 0]) == [12, 0, 0]
    assert update(3, [1, -99, -99]) == [11, 0, 0]  # fixed
    assert update(4, [1, -99, -99]) == [10, 0, 0]
    assert pruning.dense["0.weight"].tolist() == [[12, 4.5, -0.5]]


@pytest.mark.parametrize("how", ["magnitude", "surgery"])
def test_a_step_that_is_skipped_changes_nothing(how: Any) -> None:
    words = PruneConfig({"*": 0.3}, how=how, steps=0 if how == "magnitude" else 9)
    trained = Trained(network(), "adam", prune=words)
    trained.step()
    before = copy.deepcopy(trained.net.state_dict())
    trained.step(is_skipped=True)
    for name in trained.first.masks:
        assert torch.equal(trained.net.state_dict()[name], before[name])


def test_memory_in_another_order() -> None:
    """As train.channels_last has it: the same weights have the same codes, sums and masks."""

    def made(layout: torch.memory_format) -> dict[str, Tensor]:
        torch.manual_seed(1)
        net: Any = nn.Sequential(nn.Conv2d(3, 8, 3)).to(memory_format=layout)  # type: ignore[call-overload]
        words = {"prune": PruneConfig({"0": 0.5}), "share": ShareConfig({"0": 2})}
        constraints = constraints_of(net, **words)
        for each in constraints:
            each.begin()
        net[0].weight.grad = torch.sin(torch.arange(216.0)).view(8, 3, 3, 3)
        for each in constraints:
            each.before_update(0)
        assert torch.equal(net[0].weight.grad != 0, net[0].weight != 0)
        return {**net.state_dict(), "grad": net[0].weight.grad}

    one, other = made(torch.contiguous_format), made(torch.channels_last)
    assert all(torch.equal(one[name], other[name]) for name in one)


def frozen() -> Any:
    net = network()
    freeze(net, ["0.*"])
    return net


def zeros(name: str) -> Any:
    net = network()
    nn.init.zeros_(net.get_submodule(name).weight)
    return net


def small_last() -> Any:
    net = network()
    net[3].weight.data.mul_(1e-3)
    return net


@pytest.mark.parametrize(
    ("make", "words", "line"),
    [
        (network, PruneConfig({"fc": 0.1}), "prune.keep has 'fc', which no layer with weights"),
        (network, PruneConfig({"1": 0.1}), "prune.keep has '1', .*they are called 0, 3"),
        (network, PruneConfig({"4.bias": 0.5}), r"'4\.bias', which no bias matches"),
        (network, ShareConfig({"fc*": 4}), "share.bits has 'fc\\*', which no layer with weights"),
        (lambda: nn.Sequential(network()), PruneConfig({"0": 0.1}), "no layer .*; say '0.\\*'"),
        (network, PruneConfig({"*": 0.1}, {"0": 1.0}), "keep and prune.threshold both match 0"),
        (frozen, PruneConfig({"*": 0.1}), "prune.keep matches 0, .*, or say '0' = 1 after"),
        (frozen, PruneConfig({}, {"*": 1}), "prune.threshold matches 0, which is frozen"),
        (frozen, ShareConfig({"*": 4}), "share.bits matches 0, which is frozen"),
        (
            nn.Flatten,
            ShareConfig({"*": 4}),
            "share.bits has '\\*', but no layer in the network has",
        ),
        # Weights that cannot be brought to it.
        (lambda: zeros("3"), PruneConfig({"*": 0.1}), "prune: the weights of 3 are all zero"),
        (lambda: zeros("0"), ShareConfig({"*": 2}), "share: the weights of 0 are all zero"),
        (network, PruneConfig({}, {"0": 9}), "prune.threshold 9 keeps no weight of 0"),
        (small_last, PruneConfig({"*": 0.1}, scope="all"), "prune.scope all keeps no weight of 3"),
    ],
)
def test_layers_that_cannot_be_had(make: Callable[[], nn.Module], words: Any, line: str) -> None:
    section = "prune" if isinstance(words, PruneConfig) else "share"
    with pytest.raises(RecipeError, match=line):
        constraints_of(make(), **{section: words})[0].begin()


def test_a_mean_is_the_derivative_by_the_value_over_its_weights() -> None:
    found = {}
    for gradient in ("sum", "mean"):
        words = ShareConfig({"*": 2}, gradient=gradient)
        trained = Trained(network().double(), SolverConfig(momentum=0.0), share=words)
        trained.net(torch.ones(6, 7).double()).square().mean().backward()
        trained.first.before_update(0)
        found[gradient] = {name: trained.named[name].grad for name in trained.first.codes}
    for name, codes in trained.first.codes.items():
        members = codes.flatten().bincount()[codes.long()]
        torch.testing.assert_close(found["sum"][name] / members, found["mean"][name])


def test_biases_are_meant_by_their_own_names() -> None:
    prune, share = PruneConfig({"*": 0.5, "*.bias": 0.4}), ShareConfig({"0.bias": 1, "3": 1})
    pruning, sharing = constraints_of(network(), prune=prune, share=share)
    assert list(pruning.masks) == ["0.weight", "0.bias", "1.bias", "3.weight", "3.bias"]
    assert list(sharing.codes) == ["0.bias", "3.weight"]
    # What is frozen is left alone.
    assert constraints_of(network(), model=ModelConfig(freeze=["0.*"])) == []
    [pruning] = constraints_of(frozen(), prune=PruneConfig({"*": 0.1, "0": 1.0}))
    assert [*pruning.masks] == ["3.weight"]


@pytest.mark.parametrize("old", [False, True])
@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize(
    "prune",
    [PruneConfig({"*": 0.1}), PruneConfig({}, {"*": 1.5}), PruneConfig({"*": 0.1}, how="surgery")],
)
@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
def test_no_row_of_weight_norm_loses_all_its_weights(
    prune: PruneConfig, dim: int, old: bool
) -> None:
    net = network()
    (nn.utils.weight_norm if old else parametrizations.weight_norm)(net[0], dim=dim)
    direction = net[0].weight_v if old else net[0].parametrizations.weight.original1
    with torch.no_grad():  # rows of different scale, so that the smallest lose all their weights
        direction.mul_(
            torch.arange(1.0, 64).view(7, 9).T if dim else torch.arange(1.0, 64).view(9, 7)
        )
    trained = Trained(net, "sgd", prune=prune)
    for _ in range(2):
        trained.step()
    assert direction.ne(0).any(1 - dim).all()
    assert direction.eq(0).sum() > 40
    assert not [name for name in trained.first.masks if name.endswith(("_g", "original0"))]
    assert all(parameter.isfinite().all() for parameter in net.parameters())
