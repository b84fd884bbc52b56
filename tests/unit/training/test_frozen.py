"""A run says what it has frozen, and warns of what is frozen and fresh."""

from pathlib import Path

import pytest
import torch
from torch import nn

from firecaffe.models.config import ModelConfig
from firecaffe.models.freeze import freeze, frozen_of
from firecaffe.models.weights import load_weights
from tests.unit.models.own_nets import Net, Tied

FREEZE = ["stem.*", "head.*"]


def all_names(network: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return list(network.named_parameters(remove_duplicate=False))


def test_what_is_frozen_and_fresh_is_told(tmp_path: Path) -> None:
    network, file = Net(3), str(tmp_path / "w.pt")
    state = Net(5).state_dict()  # with another head
    del state["stem.bias"]
    torch.save(state, file)
    freeze(network, FREEZE)
    frozen = frozen_of(all_names(network), config := ModelConfig(freeze=FREEZE), None)
    assert (len(frozen.names), frozen.of, frozen.fresh) == (4, 6, frozen.names)
    said, warning = frozen.notes(config)
    assert "4 of 6 parameters" in said
    for word in ("4 of 4", "stem.weight", "model.weights", "empty"):
        assert word in warning

    config = ModelConfig(weights=file, freeze=FREEZE)
    frozen = frozen_of(all_names(network), config, load_weights(network, file))
    assert frozen.fresh == ["stem.bias", "head.weight", "head.bias"]
    warning = frozen.notes(config)[1]
    assert "3 of 4" in warning
    assert "stem.bias" in warning


@pytest.mark.parametrize(
    ("words", "is_resumed"), [({}, True), ({"pretrained": True}, False), ({"weights": "X"}, False)]
)
def test_no_warning_of_what_a_checkpoint_or_a_library_gives(
    words: dict[str, object], is_resumed: bool
) -> None:
    network = Net(3)
    freeze(network, FREEZE)
    config = ModelConfig(args=words, freeze=FREEZE)
    assert len(frozen_of(all_names(network), config, None, is_resumed).notes(config)) == 1
    assert frozen_of(all_names(Net(3)), ModelConfig(), None).notes(ModelConfig()) == []


def test_a_tied_parameter_needs_one_of_its_names(tmp_path: Path) -> None:
    network, state = Tied(3), Tied(3).state_dict()
    del state["first.weight"]
    torch.save(state, tmp_path / "w.pt")
    freeze(network, ["first.weight"])
    taken = load_weights(network, str(tmp_path / "w.pt"))
    assert frozen_of(all_names(network), ModelConfig(freeze=["first.weight"]), taken).fresh == []
