"""Networks of Hugging Face and of timm in our trainer: the same bits on any number of workers."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import firecaffe
from firecaffe import DataConfig, ModelConfig, Recipe, RunConfig, SolverConfig, TrainConfig
from firecaffe.data import TensorDataset
from firecaffe.errors import RecipeError
from firecaffe.parallel.stages import cut_stages
from tests.kit.worlds import NAMED
from tests.unit.parallel.in_stages import check_same_bits
from tests.world import Ranks

GENERATOR = torch.Generator().manual_seed(3)
WORDS = torch.randint(0, 30, (40, 6), generator=GENERATOR)
CLASSES = WORDS[:, 0] % 3


def bert() -> nn.Module:
    import transformers

    config = transformers.BertConfig(
        vocab_size=30,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        num_labels=3,
    )
    network: nn.Module = transformers.BertForSequenceClassification(config)
    return network


class WithLoss(nn.Module):
    """Hands the labels over, so that the network computes its loss itself; and doubles that."""

    def __init__(self) -> None:
        super().__init__()
        self.bert = bert()

    def forward(self, batch: dict[str, Tensor]) -> Any:
        outputs = self.bert(**batch)
        outputs["loss"] = 2 * outputs["loss"]
        return outputs


MAKERS = (bert, WithLoss)


def fit(folder: Path) -> list[firecaffe.Result]:
    """Of each of `MAKERS`."""
    results = []
    for make in MAKERS:
        inputs = WORDS if make is bert else {"input_ids": WORDS, "labels": CLASSES}
        recipe = Recipe(
            train=TrainConfig(12, 4, steps=3, device="cpu"),
            solver=SolverConfig(type="adamw", base_lr=0.01),
            run=RunConfig(str(folder / make.__name__), tensorboard=False),
        )
        data = TensorDataset(inputs, CLASSES, 3)
        results.append(firecaffe.train(recipe, make, data, data))
    return results


def test_networks_of_transformers(ranks: Ranks, tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="needs transformers: pip install -e '.[dev]'")
    bert()  # which loads all that it takes, as ranks have
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as on ranks
    alone = fit(tmp_path / "alone")
    torch.set_num_threads(threads)
    two, _ = ranks.shared(2, fit, tmp_path / "two")
    for make, one, of_two in zip(MAKERS, alone, two, strict=True):
        assert one.state_sha256 == of_two.state_sha256
        assert one.metrics == of_two.metrics
        network: Any = firecaffe.load(of_two.folder, make)
        logits = (network if make is bert else network.bert)(WORDS).logits
        assert int((logits.argmax(1) == CLASSES).sum()) == round(one.top1 * len(CLASSES))
    # At the start, before the weights are others: the mean cross entropy, whoever computes it.
    assert alone[1].history[0]["loss"] == pytest.approx(2 * alone[0].history[0]["loss"])


def test_a_network_of_timm(ranks: Ranks, tmp_path: Path) -> None:
    timm = pytest.importorskip("timm", reason="needs timm and torchvision")
    recipe = Recipe(
        model=ModelConfig("timm:mobilenetv3_small_050", args={"drop_rate": 0.2}),
        data=DataConfig("generated"),
        train=TrainConfig(8, 4, steps=2, eval_batch_size=500, device="cpu"),
    )
    one, two = (
        ranks.shared(workers, NAMED, recipe, tmp_path / str(workers))[0] for workers in (1, 2)
    )
    assert one.state_sha256 == two.state_sha256
    network = firecaffe.load(one.folder)
    made = timm.create_model("mobilenetv3_small_050", num_classes=10, in_chans=1)
    assert network.state_dict().keys() == made.state_dict().keys()
    assert network(torch.zeros(2, 1, 28, 28)).shape == (2, 10)


def test_networks_of_transformers_in_stages() -> None:
    hf = pytest.importorskip("transformers", reason="needs transformers: pip install -e '.[dev]'")
    torch.manual_seed(3)
    small = {"hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2}
    bert = hf.BertForSequenceClassification(hf.BertConfig(**small, intermediate_size=32)).train()
    words = torch.randint(0, 100, (2, 8))
    check_same_bits(bert, ["bert.encoder.layer.1"], words, lambda y: y.logits.square().sum())
    config = hf.ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 2])
    resnet = hf.ResNetForImageClassification(config).train()
    images = torch.randn(2, 3, 32, 32)
    names = ["resnet.encoder.stages.1.layers.1", "classifier"]
    check_same_bits(resnet, names, images, lambda y: y.logits.square().sum())
    vit = hf.ViTForImageClassification(hf.ViTConfig(**small, image_size=32, patch_size=8))
    with pytest.raises(RecipeError, match="what vit calls cannot be followed"):
        cut_stages(vit, ["vit.layers.1"])
