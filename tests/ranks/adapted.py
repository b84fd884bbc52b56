"""What ranks do in `test_adapters.py`: the same training by DDP alone, and by our exchange."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import firecaffe
from firecaffe.errors import RecipeError
from firecaffe.script.script_exchange import RankMean

STEPS, BATCH = 3, 4
Weights = dict[str, Tensor]


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))


def samples() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(2 * STEPS * BATCH, 8, generator=generator)
    return TensorDataset(inputs, torch.randint(0, 3, (len(inputs),), generator=generator))


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


def found(train: Callable[[], nn.Module]) -> tuple[Weights, int, int]:
    """The weights that a training ends in, the elements exchanged by us, and those of the model."""
    with exchanged() as sizes:
        model = train()
    weights = {name: value.detach().clone() for name, value in model.state_dict().items()}
    return weights, sum(sizes), sum(p.numel() for p in model.parameters())


def refusal(call: Callable[[], object]) -> str:
    try:
        call()
    except RecipeError as error:
        return str(error)
    return ""


def by_lightning() -> tuple[list[tuple[Weights, int, int]], list[str]]:
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
            strategy=strategy,
            accelerator="cpu",
            devices=2,
            max_epochs=1,
            barebones=True,
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
        found(lambda: trainer(DDPStrategy())),
        found(lambda: trainer(ExchangeStrategy("tree"))),
        found(lambda: fabric(FabricDDPStrategy())),
        found(lambda: fabric(FabricExchangeStrategy("ring"))),
    ]
    refused = [
        refusal(lambda: ExchangeStrategy("tree", ddp_comm_hook=print)),
        refusal(lambda: FabricExchangeStrategy("trees")),
        refusal(lambda: ExchangeStrategy(exchang="tree")),
        refusal(lambda: fabric(FabricDDPStrategy(), firecaffe.parallelize)),
        refusal(lambda: fabric(FabricExchangeStrategy(), firecaffe.parallelize)),
    ]
    return results, refused


def by_accelerate(folder: str) -> tuple[list[tuple[Weights, int, int]], list[str]]:
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
        words = transformers.BertConfig(
            vocab_size=50,
            hidden_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            intermediate_size=16,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
        torch.manual_seed(0)
        model: nn.Module = transformers.BertForSequenceClassification(words)
        generator = torch.Generator().manual_seed(1)
        texts = torch.randint(0, 50, (2 * STEPS * BATCH, 6), generator=generator)
        rows = [{"input_ids": text, "labels": int(text.sum()) % 2} for text in texts]
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
        found(lambda: loop("")),
        found(lambda: loop("tree")),
        found(lambda: trainer("")),
        found(lambda: trainer("ring")),
    ]
    hooked = Accelerator(
        cpu=True, kwargs_handlers=[DistributedDataParallelKwargs(comm_hook="fp16")]
    )
    refused += [refusal(lambda: use_exchange(hooked)), refusal(lambda: use_exchange(network()))]
    refused.append(refusal(lambda: loop("", firecaffe.parallelize)))
    refused.append(refusal(lambda: loop("tree", firecaffe.parallelize)))
    return results, refused
