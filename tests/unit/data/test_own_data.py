"""Data of one's own that are no images of classes: trees, torch's data sets, random transforms."""

import multiprocessing
import pickle
import random
import threading
from collections import namedtuple
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils._pytree import tree_leaves
from torch.utils.data import Dataset, Subset, default_collate

import firecaffe
from firecaffe import TensorDataset, from_torch
from firecaffe.data import (
    Batches,
    DataConfig,
    DataParts,
    SampleOrder,
    current_key,
    divide,
    eval_batches,
)
from firecaffe.data.batches import fetchers_of
from firecaffe.data.dataset import ask, same_bits
from firecaffe.data.hash import EVALUATION, Key
from firecaffe.data.own_data import check_own
from firecaffe.errors import DataError, OwnCodeError
from firecaffe.training.data_workers import receive_batch, send_batch
from tests.kit.training import recipe_in

Point = namedtuple("Point", "at mass")
COUNT = 20
NUMBERS = torch.arange(COUNT)
BATCH = "train.global_batch_size=8 train.micro_batch_size=4 train.steps=5"


def trees() -> dict[str, tuple[Any, Any]]:
    """Inputs and targets of COUNT samples, in all forms."""
    vectors = torch.arange(COUNT * 3, dtype=torch.float32).view(COUNT, 3)
    return {
        "tensors": (vectors, vectors[:, :1] * 2),
        "dict": ({"ids": NUMBERS.view(-1, 1), "mask": NUMBERS.view(-1, 1) > 3}, NUMBERS % 2),
        "tuple and dict": ((vectors, vectors.half()), {"box": vectors.double(), "class": NUMBERS}),
        "namedtuple": (Point(vectors, vectors[:, 0]), [NUMBERS]),
        "no targets": (vectors, ()),
        "one dimension": (NUMBERS.to(torch.uint8), NUMBERS.bool()),
    }


class Transformed(Dataset[Any]):
    """Vectors under a transform that draws from all three generators, as torchvision's do."""

    classes = ("low", "high")

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        noise = [random.random(), float(np.random.rand()), float(torch.rand(()))]
        return torch.tensor(noise) + index, int(index >= COUNT // 2)


class Keys(Transformed):
    """Items that are their keys."""

    def __getitem__(self, index: int) -> Any:
        return torch.tensor(current_key()), index


@pytest.mark.parametrize("form", trees())
def test_a_batch_is_the_rows_asked_for_in_any_form(form: str) -> None:
    whole = trees()[form]
    dataset = check_own("train_set", TensorDataset(*whole))
    batches = Batches(dataset, SampleOrder(3, COUNT, 8, 4), DataConfig())
    seen = []
    for step in range(3):
        for leaf in range(2):
            samples = batches.order.micro_batch(step, leaf)
            batch = batches.train_batch(step, leaf)
            if len(samples):
                assert same_bits(batch, TensorDataset(*whole).batch(samples))
            else:
                empty = [(0, *tensor.shape[1:]) for tensor in tree_leaves(whole)]
                assert [tensor.shape for tensor in tree_leaves(batch)] == empty
            seen += samples.tolist()
    assert sorted(seen) == list(range(COUNT))


def test_a_network_of_trees_trains(tmp_path: Path) -> None:
    """Two inputs of several types, from tensors and from items, to the same bits."""
    ids, weights = NUMBERS % 5, torch.linspace(0, 1, COUNT)
    inputs, targets = {"ids": ids, "weights": weights}, NUMBERS % 3
    items = [({"ids": i, "weights": w}, t) for i, w, t in zip(ids, weights, targets, strict=True)]

    class Items(Dataset[Any]):
        def __len__(self) -> int:
            return COUNT

        def __getitem__(self, index: int) -> Any:
            return items[index]

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(5, 4)
            self.last = nn.Linear(4, 3)

        def forward(self, inputs: dict[str, Tensor]) -> Any:
            return self.last(self.embed(inputs["ids"]) * inputs["weights"][:, None])

    by_tensors, by_items = (
        firecaffe.train(
            recipe_in(tmp_path / name, BATCH), Net, train_set, (inputs, targets), loss=cross_entropy
        )
        for name, train_set in (("a", (inputs, targets)), ("b", Items()))
    )
    assert by_tensors.state_sha256 == by_items.state_sha256
    assert by_tensors.identity_doubts == by_items.identity_doubts == []


def states() -> tuple[Any, ...]:
    of_numpy: Any = np.random.get_state()
    return random.getstate(), of_numpy[1].tolist(), torch.get_rng_state().tolist()


def test_what_an_item_draws_is_a_function_of_its_key_alone() -> None:
    dataset = check_own("train_set", Transformed())

    def item(sample: int, batch: list[int], seed: int = 1, epoch: int = 2) -> Any:
        inputs, _ = ask(dataset, torch.tensor(batch), seed, epoch)
        return inputs[batch.index(sample)].tolist()

    before = states()
    alone = item(7, [7])
    assert alone == item(7, [3, 7, 1]) == item(7, [7, 7])
    assert states() == before
    others = [alone, item(8, [8]), item(7, [7], seed=2), item(7, [7], epoch=3)]
    drawn = [round(value % 1, 4) for each in others for value in each]
    assert len(set(drawn)) == 12  # nor do the three generators draw alike
    test, again = (dataset.batch(torch.tensor([7]))[0].tolist() for _ in range(2))
    assert test == again != [alone]


def test_the_key_is_known_to_who_asks() -> None:
    dataset = check_own("train_set", from_torch(Keys()))
    batches = Batches(dataset, SampleOrder(5, COUNT, 8, 4), DataConfig())
    keys, samples = batches.train_batch(3, 0)
    assert keys.tolist() == [list(Key(5, 1, sample)) for sample in samples.tolist()]
    assert dataset.batch(torch.tensor([4]))[0].tolist() == [[0, EVALUATION, 4]]
    with pytest.raises(DataError, match="current_key"):
        current_key()


def test_a_data_set_of_the_protocol_is_handed_the_key_too() -> None:
    class Keyed:
        def __len__(self) -> int:
            return COUNT

        def batch(self, indices: Tensor) -> Any:
            return self.keyed_batch(indices, 0, -1)

        def keyed_batch(self, indices: Tensor, seed: int, epoch: int) -> Any:
            return torch.stack([indices, indices * 0 + seed, indices * 0 + epoch], 1), indices

    config = DataConfig(hold_out=0.25)
    own = firecaffe.data.DataParts(check_own("train_set", Keyed()), check_own("test_set", Keyed()))
    data = firecaffe.data.divide(own, config)
    batches = Batches(data.train, SampleOrder(9, 15, 5, 5), config)
    inputs, targets = batches.train_batch(4, 0)
    assert inputs.tolist() == [[number, 9, 1] for number in targets.tolist()]
    assert data.validation is not None
    evaluated = eval_batches(data.validation, 2, 0, 1, config=config)
    held = [int(number) for _, _, rows in evaluated for number in rows]
    trained = [int(n) for step in range(3) for n in batches.train_batch(step, 0)[1]]
    assert sorted(held + trained) == list(range(COUNT))


def test_a_torch_set_says_its_classes_through_a_subset_too() -> None:
    for dataset in (Transformed(), Subset(Transformed(), [3, 4, 15])):
        found: Any = check_own("train_set", dataset)
        assert (found.class_names, found.num_classes) == (("low", "high"), 2)
    assert found.batch(torch.tensor([2]))[1].tolist() == [1]


class InThreads:
    """A data set that has fetchers, and does something with the process's generators."""

    fetchers: Any = 2

    def __init__(self, what: Any, when_keyed: bool = False) -> None:
        self.what, self.when_keyed = what, when_keyed

    def __len__(self) -> int:
        return COUNT

    def batch(self, indices_B: Tensor) -> tuple[Tensor, Tensor]:
        if not self.when_keyed:
            self.what()
        return indices_B.float()[:, None], indices_B

    def keyed_batch(self, indices_B: Tensor, seed: int, epoch: int) -> tuple[Tensor, Tensor]:
        self.what()
        return indices_B.float()[:, None], indices_B


@pytest.mark.parametrize("when_keyed", [False, True])
def test_one_that_threads_ask_may_not_touch_the_process_s_generators(when_keyed: bool) -> None:
    touches: dict[str, list[Any]] = {
        "python": [random.random, lambda: random.seed(0)],
        "numpy": [np.random.rand, lambda: np.random.seed(0)],
        "torch": [lambda: torch.rand(1), lambda: torch.manual_seed(0)],
    }
    random.seed(0), np.random.seed(0), torch.manual_seed(0)
    before = states()
    for name, each_way in touches.items():
        for what in each_way:
            with pytest.raises(DataError, match=rf"train_set\.fetchers is 2.*{name}.*current_key"):
                check_own("train_set", InThreads(what, when_keyed))
    by_key = check_own("train_set", InThreads(lambda: random.Random(str(current_key())).random()))
    assert fetchers_of(by_key) == 2
    assert states() == before
    for wrong in (-1, True, "two", 10**9):
        given = InThreads(list)
        given.fetchers = wrong
        with pytest.raises(DataError, match=r"train_set\.fetchers is .*expected 0 to"):
            check_own("train_set", given)


def test_one_without_fetchers_is_asked_in_the_training_s_thread_under_a_key() -> None:
    class Drawn(InThreads):
        fetchers = 0

        def batch(self, indices_B: Tensor) -> tuple[Tensor, Tensor]:
            key = current_key()
            assert threading.current_thread() is threading.main_thread()
            assert key == Key(0, EVALUATION, int(indices_B[0]))
            drawn = [random.random(), float(np.random.rand()), float(torch.rand(()))]
            return torch.tensor([drawn] * len(indices_B)), indices_B

    before = states()
    dataset = check_own("train_set", Drawn(random.random))
    first, again = (dict(enumerate(eval_inputs(dataset))) for _ in range(2))
    assert all(torch.equal(first[number], again[number]) for number in range(4))
    assert not torch.equal(first[0][0], first[1][0])
    assert states() == before


def eval_inputs(dataset: Any) -> list[Tensor]:
    return [inputs for _, inputs, _ in eval_batches(dataset, 6, 0, 1, config=DataConfig())]


def test_arrays_of_numpy_are_told_how_to_become_tensors() -> None:
    images, labels = np.zeros((4, 1, 2, 2), np.float32), np.zeros(4, np.int64)
    for pair in ((images, labels), [images, torch.from_numpy(labels)], ({"a": images}, labels)):
        with pytest.raises(DataError, match=r"^train_set has numpy arrays; torch\.from_numpy"):
            check_own("train_set", pair)


UNUSUAL: dict[str, Callable[[Tensor], Tensor]] = {
    "sparse": Tensor.to_sparse,
    "quantized": lambda tensor: torch.quantize_per_tensor(tensor, 0.1, 0, torch.qint8),
    "nested": lambda tensor: torch.nested.nested_tensor(list(tensor)),
}


@pytest.mark.filterwarnings("ignore:.*nested tensors", "ignore:.*quantiz")
@pytest.mark.parametrize("kind", UNUSUAL)
def test_tensors_that_are_not_dense_are_refused(kind: str) -> None:
    """Reading the bytes of a quantized one would end the process."""

    def collate(items: list[Any]) -> Any:
        inputs, targets = default_collate(items)
        return UNUSUAL[kind](inputs), targets

    with pytest.raises(DataError, match=kind):
        check_own("train_set", from_torch(Transformed(), collate=collate))
    with pytest.raises(DataError, match=kind):
        TensorDataset(UNUSUAL[kind](torch.ones(4, 3)), torch.arange(4))


class Broken(Transformed):
    """A data set whose file opens late, and is not there."""

    def __init__(self, member: str) -> None:
        self.member = member

    def opened(self, member: str) -> list[int]:
        if member == self.member:
            raise FileNotFoundError("late.h5")
        return [0] * COUNT

    def __len__(self) -> int:
        return len(self.opened("__len__"))

    @property
    def targets(self) -> list[int]:
        return self.opened("targets")


@pytest.mark.parametrize("member", ["__len__", "targets"])
def test_what_a_member_raises_is_its_own_error(member: str) -> None:
    with pytest.raises(OwnCodeError, match=rf"{member}.*FileNotFoundError: late\.h5"):
        check_own("train_set", Broken(member))


def test_a_length_is_asked_once() -> None:
    given: Any = Held(is_reused=False)
    dataset = check_own("train_set", given)
    given.values = torch.arange(2.0 * COUNT)[:, None]
    assert len(dataset) == COUNT


class Held:
    """A data set that gives its own memory, and one that gives all batches in the same."""

    def __init__(self, is_reused: bool) -> None:
        self.is_reused, self.values = is_reused, torch.arange(float(COUNT))[:, None]
        self.memory = torch.zeros(1, 1)

    def __len__(self) -> int:
        return len(self.values)

    def batch(self, indices_B: Tensor) -> tuple[Tensor, Tensor]:
        (index,) = indices_B.tolist()
        row = self.values[index : index + 1]
        return self.memory.copy_(row) if self.is_reused else row, indices_B


@pytest.mark.parametrize("is_reused", [False, True])
def test_a_batch_is_in_memory_of_its_own(is_reused: bool) -> None:
    dataset = check_own("train_set", Held(is_reused))
    (five, _), (six, _) = (dataset.batch(torch.tensor([index])) for index in (5, 6))
    assert (float(five), float(six)) == (5, 6)
    five.zero_()
    assert float(dataset.batch(torch.tensor([5]))[0]) == 5


def test_parts_of_one_data_set_take_turns() -> None:
    """With one thread for each part, an evaluation would ask beside the training's."""
    given: Any = InThreads(list)
    given.fetchers = 1
    sets = check_own("train_set", given), check_own("test_set", given)
    data = divide(DataParts(*sets), replace(DataConfig(), hold_out=0.25))
    train: Any = data.train
    turns = train.dataset.turns
    is_free: list[bool] = []
    given.what = lambda: is_free.append(turns.acquire(blocking=False))
    assert data.validation is not None
    for part in (data.train, data.validation, data.test):
        part.batch(torch.tensor([0]))
    assert is_free == [False] * 3


class Rows(Dataset[Any]):
    """Images with the channels innermost."""

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.arange(24.0).view(2, 4, 3) + index, index


def test_a_data_worker_sends_strides_too() -> None:
    """A convolution of such images has other bits."""

    def collate(items: list[Any]) -> Any:
        images = torch.stack([image for image, _ in items]).permute(0, 3, 1, 2)
        # the second with gaps, the others with bits of what is still to be done
        complexes = torch.complex(images, images)
        return (images, images[..., ::2]), (complexes.conj(), complexes.conj().imag)

    batch = from_torch(Rows(), collate=collate).batch(torch.arange(3))
    receiver, sender = multiprocessing.Pipe()
    send_batch(sender, batch)
    _, outline = pickle.loads(receiver.recv_bytes())
    assert not batch[0][0].is_contiguous()
    received_batch = receive_batch(receiver, outline)
    for sent, received in zip(tree_leaves(batch), tree_leaves(received_batch), strict=True):
        assert sent.stride() == received.stride()
        assert torch.equal(sent, received)
