"""First weights from a file: what fits is taken, what does not is told, no code is run."""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

from firecaffe.errors import RecipeError
from firecaffe.models.weights import load_weights
from tests.kit.models_refused import refused
from tests.unit.models.own_nets import Net, Tied

FILE = "w.pt"


def filled(network: nn.Module, value: float = 0.5) -> dict[str, Tensor]:
    """A state_dict whose floating point tensors all hold `value`."""
    state = network.state_dict()
    return {
        name: torch.full_like(each, value) if each.is_floating_point() else each
        for name, each in state.items()
    }


def save(path: Path, held: Any) -> str:
    if path.suffix == ".safetensors":
        safetensors.torch.save_file(held, path)
    else:
        torch.save(held, path)
    return str(path)


@pytest.mark.parametrize("name", ["w.pt", "w.safetensors"])
def test_all_of_a_file_is_taken(tmp_path: Path, name: str) -> None:
    network = Net(3)
    file = save(tmp_path / name, filled(network))
    found = load_weights(network, file)
    assert (found.taken, found.missing, found.unexpected) == (9, [], [])
    for each in (*network.parameters(), network.norm.state_dict()["running_mean"]):
        assert torch.equal(each, torch.full_like(each, 0.5))


@pytest.mark.parametrize(
    ("key", "prefix"),
    [("state_dict", "module."), ("model_state_dict", "module._orig_mod."), ("model", "model.")],
)
def test_wrappers_and_trainers_are_seen_through(tmp_path: Path, key: str, prefix: str) -> None:
    network = Net(3)
    state = OrderedDict((prefix + name, each) for name, each in filled(network).items())
    weights = load_weights(network, save(tmp_path / FILE, {key: state, "epoch": 3}))
    assert (weights.taken, weights.prefix, weights.state_keys) == (9, prefix, [key])
    assert repr(prefix) in weights.line
    assert repr(key) in weights.line


def test_a_checkpoint_of_ours_is_taken_without_what_is_not_the_networks(tmp_path: Path) -> None:
    network = Net(3)
    pieces: dict[str, Tensor] = {f"parameter/{n}": each for n, each in network.named_parameters()}
    pieces |= {f"buffer/{name}": each for name, each in network.named_buffers()}
    pieces["optimizer/stem.weight/momentum_buffer"] = torch.zeros(1)
    held = {name: each.detach().clone() for name, each in pieces.items()}
    found = load_weights(network, save(tmp_path / "state.safetensors", held))
    assert (found.taken, found.missing, found.unexpected) == (9, [], [])
    # A moving average takes the place of the parameters.
    held |= {"ema/head.bias": torch.full((3,), 7.0)}
    load_weights(network, save(tmp_path / "state.safetensors", held))
    assert network.head.bias.tolist() == [7.0] * 3


def test_a_new_head_stays_fresh_and_all_is_told(tmp_path: Path) -> None:
    state = filled(Net(1000))
    del state["stem.bias"]
    state["extra.weight"] = torch.zeros(2)
    network = Net(3)
    head = network.head.weight.detach().clone()
    found = load_weights(network, save(tmp_path / FILE, state))
    assert (found.taken, found.missing, found.unexpected) == (6, ["stem.bias"], ["extra.weight"])
    assert found.reshaped == {"head.weight": "1000x4 for 3x4", "head.bias": "1000 for 3"}
    assert torch.equal(network.head.weight, head)
    assert bool((network.stem.weight == 0.5).all())
    for said in ("6 of the network's 9", "head.weight 1000x4 for 3x4", "stem.bias", "extra.weight"):
        assert said in found.line
    assert asdict(found)["reshaped"] == found.reshaped


def test_values_are_converted_to_the_networks_type(tmp_path: Path) -> None:
    network = Net(3)
    half = {name: each.half() for name, each in filled(network, 0.1).items()}
    load_weights(network, save(tmp_path / FILE, half))
    assert network.head.weight.dtype == torch.float32
    assert network.head.weight[0, 0].item() == float(torch.tensor(0.1).half())


def test_a_weight_with_two_names_needs_one_of_them(tmp_path: Path) -> None:
    state = filled(Tied(3))
    del state["first.weight"]
    found = load_weights(Tied(3), save(tmp_path / FILE, state))
    assert (found.taken, found.missing, found.unexpected) == (5, [], [])


def test_shapes_alone_tell_what_fits(tmp_path: Path) -> None:
    with torch.device("meta"):
        outline = Net(3)
    assert load_weights(outline, save(tmp_path / FILE, filled(Net(5)))).taken == 7


class Holder:
    """What a whole module that is pickled runs when it is read."""


def cut(path: Path, held: Any) -> str:
    file = save(path, held)
    path.write_bytes(path.read_bytes()[:-200])
    return file


def text(path: Path, content: str) -> str:
    path.write_text(content)
    return str(path)


STATE = filled(Net(3))
TWO = {"generator": STATE, "discriminator": STATE}
UNDER_BOTH = {"model": STATE, "state_dict": STATE}
AFTER_BOTH = {f"{before}{name}": x for before in ("model.", "net.") for name, x in STATE.items()}

ITSELF: dict[str, Any] = {"epoch": 1}
ITSELF["state_dict"] = ITSELF
WRAPPED = {"module." * 100_000 + "x": torch.zeros(2)}


def with_first(convert: Callable[[Tensor], Tensor]) -> Callable[[Path], str]:
    """Returns what saves a state_dict whose first matrix is converted."""
    name = next(name for name, x in STATE.items() if x.ndim > 1)
    return lambda at: save(at / FILE, STATE | {name: convert(STATE[name])})


WRONG: dict[str, Any] = {
    "not there": lambda at: str(at / "none.pt"),
    "a folder": str,
    "more than tensors": lambda at: save(at / FILE, {"net": Holder()}),
    "whole file": lambda at: cut(at / FILE, STATE),
    "cut short": lambda at: cut(at / "w.safetensors", STATE),
    "neither": lambda at: text(at / FILE, "no weights"),
    "it begins with b'epoch,loss": lambda at: text(at / FILE, "epoch,loss\n1,0.5\n"),
    "w.safetensors": lambda at: text(at / "w.safetensors", ""),
    "no tensors by name": lambda at: save(at / FILE, [torch.zeros(2)]),
    "a dict of generator, discriminator": lambda at: save(at / FILE, TWO),
    "under 'state_dict' and under 'model'": lambda at: save(at / FILE, UNDER_BOTH),
    "after 'model.', and as many after 'net.'": lambda at: save(at / FILE, AFTER_BOTH),
    "none of its 1 tensors": lambda at: save(at / FILE, {"other.weight": torch.zeros(2)}),
    "a dict of epoch, state_dict": lambda at: save(at / FILE, ITSELF),
    "none of its 1": lambda at: save(at / FILE, WRAPPED),
    "is sparse": with_first(Tensor.to_sparse),
    "is nested": with_first(lambda x: torch.nested.nested_tensor([x[0], x[1]])),
    "is complex": with_first(lambda x: x.to(torch.complex64)),
    "is quantized": with_first(lambda x: torch.quantize_per_tensor(x, 0.1, 0, torch.qint8)),
    "is without values": with_first(lambda x: x.to("meta")),
}


@pytest.mark.filterwarnings("ignore:.*(nested|quantize|TypedStorage)")
@pytest.mark.parametrize("said", WRONG)
def test_a_file_that_will_not_do_is_refused_in_one_line(tmp_path: Path, said: str) -> None:
    file = WRONG[said](tmp_path)
    with refused(RecipeError, ["model.weights", said, file]):
        load_weights(Net(3), file)
