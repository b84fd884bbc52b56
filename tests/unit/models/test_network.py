"""The network that a recipe names: whose function is called, with what, and what it must return."""

import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from firecaffe.errors import OwnCodeError, RecipeError
from firecaffe.models.config import ModelConfig
from firecaffe.models.network import make_network, maker_of, with_outline
from tests.unit.models.own_nets import PLACE, Net, Reads


def made(member: str, **words: Any) -> nn.Module:
    return make_network(ModelConfig(f"{PLACE}:{member}", **words), 7, 3)


def test_a_function_is_called_with_its_arguments_and_what_the_data_say() -> None:
    network = made("Net", args={"width": 6})
    assert isinstance(network, Net)
    assert network.stem.weight.shape == (6, 3, 3, 3)
    assert network.head.weight.shape == (7, 6)
    other = made("Net", args={"num_classes": 2, "in_channels": 1})
    assert isinstance(other, Net)
    assert (other.head.out_features, other.stem.in_channels) == (2, 1)


def test_what_a_function_does_not_take_is_not_handed_over() -> None:
    assert isinstance(made("Reads"), Reads)


def test_a_row_of_the_table_takes_arguments_too() -> None:
    lenet = make_network(ModelConfig("lenet", args={"num_classes": 3}), 10, 1)
    assert lenet(torch.zeros(1, 1, 28, 28)).shape == (1, 3)


@pytest.mark.parametrize(
    ("member", "words", "said"),
    [
        ("Net", {"args": {"breadth": 3}}, ["breadth=3", "num_classes: int"]),
        ("number", {}, ["returned 3", "torch.nn.Module"]),
        ("lazy", {}, ["Lazy", "weight"]),
        ("Nett", {}, ["no 'Nett'", "Net"]),
        ("Net", {"freeze": ["*.wieght"]}, ["model.freeze", "'*.wieght'", "stem.weight"]),
        ("Net", {"freeze": ["*"]}, ["model.freeze", "none of the network's 6"]),
    ],
)
def test_what_is_wrong_is_one_line(member: str, words: dict[str, Any], said: list[str]) -> None:
    with pytest.raises(RecipeError) as caught:
        made(member, **words)
    line = str(caught.value)
    assert line.startswith("model.")
    assert "\n" not in line
    assert all(each in line for each in said), line


def test_what_a_users_code_raises_is_theirs_to_read() -> None:
    with pytest.raises(OwnCodeError, match="KeyError") as caught:
        made("fails")
    assert 'raise KeyError("no such layer")' in caught.value.traceback


def test_a_network_that_was_given_in_python_cannot_be_made_again() -> None:
    with pytest.raises(RecipeError, match=r"'own Net'.*path/file\.py:function"):
        maker_of("own Net")


@pytest.mark.parametrize("library", ["timm", "torchvision"])
def test_a_library_that_is_not_there_is_named(
    library: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(RecipeError, match=f"pip install {library}"):
        make_network(ModelConfig(f"{library}:resnet18"), 10, 3)


def test_a_library_of_another_torch_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As torchvision is that was built for another torch, and timm, which imports it."""
    (tmp_path / "timm.py").write_text('raise RuntimeError("operator nms does not\\nexist")')
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "timm", raising=False)
    with pytest.raises(
        RecipeError, match=f"nms does not exist.*torch {re.escape(torch.__version__)}"
    ) as seen:
        make_network(ModelConfig("timm:resnet18"), 10, 3)
    assert "\n" not in str(seen.value)


def test_the_outline_takes_no_memory_unless_the_code_reads_numbers() -> None:
    def device(network: nn.Module) -> str:
        network.eval()(torch.zeros(2, 1, 5, 5, device=next(network.parameters()).device))
        return str(next(network.parameters()).device)

    def device_or_fault(network: nn.Module) -> str:
        try:
            return device(network)
        except Exception as error:
            raise OwnCodeError("forward") from error

    for member, found in (("Net", "meta"), ("Reads", "cpu")):
        config = ModelConfig(f"{PLACE}:{member}")
        assert with_outline(config, 3, 1, device_or_fault) == found
    with pytest.raises(OwnCodeError):
        with_outline(ModelConfig(f"{PLACE}:Broken"), 3, 1, device_or_fault)
