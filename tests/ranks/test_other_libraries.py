"""Networks of Hugging Face and of timm in our trainer: the same bits on any number of workers.
Trainers of others on two ranks: the weights of DDP within rounding, by our exchange indeed.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from torch.utils.data import TensorDataset as Pairs

import firecaffe
from firecaffe import DataConfig, ModelConfig, Recipe, RunConfig, SolverConfig, TrainConfig
from firecaffe.data import TensorDataset
from firecaffe.errors import RecipeError
from firecaffe.parallel.stages import cut_stages
from firecaffe.script.script_exchange import RankMean
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
    alone = fit(tmp_path / "alone")
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


STEPS, BATCH = 3, 4


class Done(NamedTuple):
    weights: list[Tensor]
    exchanged: int
    """Elements that went through our exchange."""
    size: int
    """Elements of the model."""


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))


def samples() -> Pairs:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(2 * STEPS * BATCH, 8, generator=generator)
    return Pairs(inputs, torch.randint(0, 3, (len(inputs),), generator=generator))


@contextmanager
def exchanged() -> Iterator[list[int]]:
    """Counts the buckets that go through our exchange, meanwhile."""
    sizes: list[int] = []
    whole = RankMean.__call__

    def counted(mean: RankMean, bucket: Any) -> Tensor:
        sizes.append(bucket.buffer.numel())
        return whole(mean, bucket)

    with patch.object(RankMean, "__call__", counted):
        yield sizes


def done(train: Callable[[], nn.Module]) -> Done:
    with exchanged() as sizes:
        model = train()
    return Done(
        [value.detach().clone() for value in model.state_dict().values()],
        sum(sizes),
        sum(p.numel() for p in model.parameters()),
    )


def refusal(call: Callable[[], object]) -> str:
    try:
        call()
    except RecipeError as error:
        return str(error)
    return ""


def by_lightning() -> tuple[list[Done], list[str]]:
    """By the Trainer and by Fabric: each with Lightning's DDP, and with our strategy."""
    os.environ["TORCHELASTIC_RUN_ID"] = "a launcher's, for Lightning"
    import lightning
    from lightning.fabric.strategies import DDPStrategy as FabricDDPStrategy
    from lightning.pytorch.strategies import DDPStrategy

    from firecaffe.adapters.lightning import ExchangeStrategy, FabricExchangeStrategy

    class Task(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.network = network()

        def training_step(self, batch: list[Tensor], _: int) -> Tensor:
            return nn.functional.cross_entropy(self.network(batch[0]), batch[1])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    def trainer(strategy: Any) -> nn.Module:
        task = Task()
        lightning.Trainer(
            strategy=strategy, accelerator="cpu", devices=2, max_epochs=1, barebones=True
        ).fit(task, DataLoader(samples(), BATCH))
        return task

    def fabric(strategy: Any, first: Callable[[nn.Module], nn.Module] = nn.Module.train) -> Any:
        """first: what is done to the network before Fabric has it."""
        wires = lightning.Fabric(strategy=strategy, accelerator="cpu", devices=2)
        wires.launch()
        model = first(network())
        wrapped, optimizer = wires.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for inputs, labels in wires.setup_dataloaders(DataLoader(samples(), BATCH)):
            optimizer.zero_grad()
            wires.backward(nn.functional.cross_entropy(wrapped(inputs), labels))
            optimizer.step()
        return model

    results = [
        done(lambda: trainer(DDPStrategy())),
        done(lambda: trainer(ExchangeStrategy("tree"))),
        done(lambda: fabric(FabricDDPStrategy())),
        done(lambda: fabric(FabricExchangeStrategy("ring"))),
    ]
    refused = [
        refusal(lambda: ExchangeStrategy("tree", ddp_comm_hook=print)),
        refusal(lambda: FabricExchangeStrategy("trees")),
        refusal(lambda: ExchangeStrategy(exchang="tree")),
        refusal(lambda: fabric(FabricDDPStrategy(), firecaffe.parallelize)),
        refusal(lambda: fabric(FabricExchangeStrategy(), firecaffe.parallelize)),
    ]
    return results, refused


class Classifier(nn.Module):
    """Computes its loss itself, as the Trainer of transformers has it."""

    def __init__(self) -> None:
        super().__init__()
        self.network = network()

    def forward(self, inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.network(inputs)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def by_accelerate(folder: str) -> tuple[list[Done], list[str]]:
    """By accelerate's loop and by the Trainer of transformers, each without and with ours."""
    import transformers
    from accelerate import Accelerator
    from accelerate.utils import DistributedDataParallelKwargs

    from firecaffe.adapters.accelerate import use_exchange

    os.environ["ACCELERATE_USE_CPU"] = "true"
    refused = []

    def loop(exchange: str, first: Callable[[nn.Module], nn.Module] = nn.Module.train) -> Any:
        """first: what is done to the network before it is prepared."""
        options = DistributedDataParallelKwargs(gradient_as_bucket_view=True)
        accelerator = Accelerator(cpu=True, kwargs_handlers=[options])
        if exchange:
            use_exchange(accelerator, exchange)
        model = first(network())
        wrapped, optimizer, batches = accelerator.prepare(
            model, torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(samples(), BATCH)
        )
        assert isinstance(wrapped, DistributedDataParallel)
        assert wrapped.gradient_as_bucket_view
        for inputs, labels in batches:
            optimizer.zero_grad()
            accelerator.backward(nn.functional.cross_entropy(wrapped(inputs), labels))
            optimizer.step()
        refused.append(refusal(lambda: use_exchange(accelerator)))
        return model

    def trainer(exchange: str) -> nn.Module:
        model = Classifier()
        rows = [
            {"inputs": each, "labels": label}
            for each, label in zip(*samples().tensors, strict=True)
        ]
        trainer = transformers.Trainer(
            model,
            transformers.TrainingArguments(
                output_dir=folder,
                use_cpu=True,
                max_steps=STEPS,
                per_device_train_batch_size=BATCH,
                report_to=[],
                save_strategy="no",
                logging_strategy="no",
                disable_tqdm=True,
            ),
            train_dataset=rows,
        )
        if exchange:
            use_exchange(trainer, exchange)
        trainer.train()
        return model

    results = [
        done(lambda: loop("")),
        done(lambda: loop("tree")),
        done(lambda: trainer("")),
        done(lambda: trainer("ring")),
    ]
    hooked = Accelerator(
        cpu=True, kwargs_handlers=[DistributedDataParallelKwargs(comm_hook="fp16")]
    )
    refused += [refusal(lambda: use_exchange(hooked)), refusal(lambda: use_exchange(network()))]
    refused.append(refusal(lambda: loop("", firecaffe.parallelize)))
    refused.append(refusal(lambda: loop("tree", firecaffe.parallelize)))
    return results, refused


def check(results: list[Done], other: list[Done]) -> None:
    """results, other: of both ranks; pairs of a training by DDP alone, and one by our exchange."""
    for by_ddp, ours in zip(results[::2], results[1::2], strict=True):
        assert by_ddp.exchanged == 0
        assert ours.exchanged == STEPS * ours.size, "all gradients go through the exchange"
        torch.testing.assert_close(ours.weights, by_ddp.weights)
    for mine, theirs in zip(results, other, strict=True):
        assert all(map(torch.equal, mine.weights, theirs.weights))


def check_twice(refused: list[str]) -> None:
    """What is said of a model of `parallelize`: by DDP's wrapping, and by that of an adapter."""
    assert "in another DistributedDataParallel" in refused[0]
    assert "in DistributedDataParallel already" in refused[1]


def test_lightning_and_fabric(ranks: Ranks) -> None:
    pytest.importorskip("lightning", reason="needs lightning: pip install -e '.[dev]'")
    (results, refused), (other, _) = ranks.run(2, by_lightning)
    check(results, other)
    hook, exchange, unknown, *twice = refused
    assert "ddp_comm_hook" in hook
    assert "trees" in exchange
    assert "did you mean exchange" in unknown
    check_twice(twice)


def test_accelerate_and_the_trainer_of_transformers(ranks: Ranks, tmp_path: Path) -> None:
    pytest.importorskip("accelerate", reason="needs accelerate: pip install -e '.[dev]'")
    pytest.importorskip("transformers", reason="needs transformers: pip install -e '.[dev]'")
    (results, refused), (other, _) = ranks.run(2, by_accelerate, str(tmp_path))
    check(results, other)
    *prepared, hooked, network, by_ddp, by_us = refused
    check_twice([by_ddp, by_us])
    assert all("prepared" in line for line in prepared)
    assert "comm_hook fp16" in hooked
    assert "Sequential" in network
