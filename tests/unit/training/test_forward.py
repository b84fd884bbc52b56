"""Forward passes: random numbers by key, threads by recipe, mixed samples, and evaluations."""

import copy
import random
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import firecaffe
from firecaffe.cluster.world import World
from firecaffe.data import DataConfig, TensorDataset
from firecaffe.errors import OwnCodeError, RecipeError
from firecaffe.models import HeadedLogits, classification_loss
from firecaffe.recipe.sections import TrainConfig
from firecaffe.tasks import Task, TaskConfig, task_of
from firecaffe.tasks.metrics import count_correct
from firecaffe.training import evaluation
from firecaffe.training.evaluation import evaluate
from firecaffe.training.forward import _deterministic, arithmetic, seed_random
from firecaffe.training.sample_mixing import Mixed, Mixing
from tests.kit.training import ALONE, recipe_in
from tests.kit.training_fixtures import Patch
from tests.ranks.networks import Everything, small_data
from tests.tracebacks import owners

# --- random numbers, threads and kernels ----------------------------------------------------------


def numbers_of(*key: int | str) -> list[float]:
    seed, *what = key
    assert isinstance(seed, int)
    seed_random(seed, *what)
    values: list[float] = torch.cat([torch.rand(3), torch.randn(3), torch.randperm(5)]).tolist()
    return [*values, random.random(), *np.random.rand(2), random.gauss(), np.random.normal()]


def test_another_key_gives_other_numbers_and_the_same_the_same() -> None:
    assert numbers_of(1, "dropout", 3, 4) == numbers_of(1, "dropout", 3, 4)
    keys: list[tuple[int | str, ...]] = [
        *((1, "dropout", 3, 4), (2, "dropout", 3, 4), (1, "weights", 3, 4), (1, "dropout", 4, 3)),
        *((1, "dropout", 34), (1, "dropout", 3, 5), (1, "dropout"), (1,), (-1,), (10**30,)),
        *((0, "dropout", step, leaf) for step in range(20) for leaf in range(20)),
    ]
    assert len({tuple(numbers_of(*key)) for key in keys}) == len(keys)
    seed_random(1, "dropout", 3, 4)  # and each generator has others
    of_all = [torch.rand(3, dtype=torch.float64).tolist(), np.random.rand(3).tolist()]
    of_all.append([random.random() for _ in range(3)])
    assert len({number for numbers in of_all for number in numbers}) == 9


@pytest.mark.parametrize("before", ["nothing", "uniform", "normal", "seed"])
def test_what_was_drawn_before_does_not_matter(before: str) -> None:
    expected, own = numbers_of(7, "weights"), torch.Generator().manual_seed(5)
    of_others = own.get_state()
    if before == "uniform":
        torch.rand(5), random.random(), np.random.rand()
    if before == "normal":  # torch makes normal numbers in pairs and keeps the second
        torch.randn(1, dtype=torch.float64), random.gauss(0, 1), np.random.normal()
    if before == "seed":
        torch.manual_seed(99), random.seed(99), np.random.seed(99)
    assert numbers_of(7, "weights") == expected
    seed_random(7, "weights")
    state = torch.get_rng_state()
    torch.randn(1)
    seed_random(7, "weights")
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(own.get_state(), of_others)  # other generators are left alone


def test_tf32_by_its_newer_name_is_as_it_was() -> None:
    """Which the older name then cannot read."""
    products = torch.backends.cuda.matmul
    with ExitStack() as before:
        before.callback(setattr, products, "fp32_precision", products.fp32_precision)
        products.fp32_precision = "tf32"
        with _deterministic():
            assert not products.allow_tf32
        assert products.fp32_precision == "tf32"


@pytest.mark.parametrize("were", [False, True])
def test_kernels_are_as_they_were(were: bool) -> None:
    kernels = (
        (torch.utils.deterministic, "fill_uninitialized_memory"),
        (torch.backends.cudnn, "benchmark"),
        (torch.backends.cudnn, "allow_tf32"),
        (torch.backends.cuda.matmul, "allow_tf32"),
    )
    with ExitStack() as before:
        before.callback(torch.use_deterministic_algorithms, False)
        torch.use_deterministic_algorithms(were, warn_only=True)
        for holder, name in kernels:
            before.callback(setattr, holder, name, getattr(holder, name))
            setattr(holder, name, were)
        with _deterministic():
            assert not any(getattr(holder, name) for holder, name in kernels)
            assert torch.are_deterministic_algorithms_enabled()
            assert not torch.is_deterministic_algorithms_warn_only_enabled()
        assert [getattr(holder, name) for holder, name in kernels] == [were] * len(kernels)
        assert torch.are_deterministic_algorithms_enabled() is were
        assert torch.is_deterministic_algorithms_warn_only_enabled()


def test_a_training_leaves_its_process_as_it_was(tmp_path: Path) -> None:
    threads, numbers = torch.get_num_threads(), torch.get_rng_state()
    with arithmetic(TrainConfig(threads=threads + 1), torch.device("cpu")):
        assert torch.get_num_threads() == threads + 1
        assert not torch.are_deterministic_algorithms_enabled()
    assert torch.get_num_threads() == threads
    sizes = {"global_batch_size": 12, "micro_batch_size": 2, "steps": 1, "threads": threads + 1}
    recipe = recipe_in(tmp_path / "run", train=sizes)
    firecaffe.train(recipe, Everything, small_data(60), small_data(20, 1))
    assert torch.get_num_threads() == threads
    assert torch.equal(torch.get_rng_state(), numbers)


@contextmanager
def without_mkldnn() -> Iterator[None]:
    library: Any = torch.backends.mkldnn
    library.enabled = False
    yield
    assert not library.enabled
    library.enabled = True


@contextmanager
def bf16_products() -> Iterator[None]:
    library: Any = torch.backends.mkldnn
    torch.set_float32_matmul_precision("medium")
    library.conv.fp32_precision = "bf16"
    yield
    assert library.conv.fp32_precision == "bf16"
    torch.set_float32_matmul_precision("highest")
    library.conv.fp32_precision = library.matmul.fp32_precision = "none"


MODES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "no gradients": torch.no_grad,
    "inference": torch.inference_mode,
    "bfloat16 products": bf16_products,
    "a default device": lambda: torch.device("meta"),
    "other convolutions": without_mkldnn,
}


@pytest.mark.parametrize("autocast", ["none", "bfloat16"])
def test_the_modes_of_who_calls_a_training_change_no_bit(autocast: str, tmp_path: Path) -> None:
    sizes = {"global_batch_size": 12, "micro_batch_size": 2, "steps": 3, "autocast": autocast}
    digests, data = {}, (small_data(60), small_data(20, 1))
    for name, mode in {"": nullcontext, **MODES}.items():
        recipe = recipe_in(tmp_path / f"run {name}", train=sizes)
        with mode():
            result = firecaffe.train(recipe, Everything, *data)
            digests[name] = result.weights_sha256
    assert len(set(digests.values())) == 1, digests


def test_attention_has_the_kernel_that_it_has_on_workers() -> None:
    values = torch.rand(1, 1, 64, 8, generator=torch.Generator().manual_seed(0))
    attend = partial(F.scaled_dot_product_attention, values, values, values)
    on_workers, were = attend(), torch.backends.mha.get_fastpath_enabled()
    with sdpa_kernel(SDPBackend.MATH):
        torch.backends.mha.set_fastpath_enabled(False)
        allowed = attend()
        with arithmetic(TrainConfig(), torch.device("cpu")):
            assert torch.equal(attend(), on_workers)
            assert torch.backends.mha.get_fastpath_enabled()
        assert torch.equal(attend(), allowed)
        assert not torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(were)
    assert not torch.equal(allowed, on_workers)


@pytest.mark.parametrize("outer", [nullcontext, MODES["autocast"]])
def test_cast_weights_end_with_their_micro_batch(
    outer: Callable[[], AbstractContextManager[Any]],
) -> None:
    """Torch keeps them until the outermost block of autocast ends."""
    weight, results = nn.Parameter(torch.ones(2, 2)), []
    with outer(), arithmetic(TrainConfig(), torch.device("cpu")):
        for _ in range(2):
            with torch.autocast("cpu", torch.bfloat16):
                results.append(F.linear(torch.ones(1, 2), weight).sum().item())
            weight.data.mul_(2)
    assert results == [4, 8]


# --- mixed and erased samples ---------------------------------------------------------------------

IMAGES = torch.rand(4, 3, 12, 10, generator=torch.Generator().manual_seed(1)) + 1
TARGETS = torch.tensor([0, 2, 1, 2])


def drawn(mixing: Mixing, count: int = 300) -> list[Mixed]:
    return [mixing(IMAGES, TARGETS, step, leaf) for step in range(count // 3) for leaf in range(3)]


def test_mixup_is_a_weighted_mean_with_the_one_before() -> None:
    start = IMAGES.clone()
    found = drawn(Mixing(7, mixup=0.4))
    for each in found:
        expected = each.share * IMAGES + (1 - each.share) * IMAGES[[3, 0, 1, 2]]
        torch.testing.assert_close(each.inputs, expected)
        assert each.partners.tolist() == [2, 0, 2, 1]
        assert each.counted is (each.targets if each.share >= 0.5 else each.partners)
    assert torch.equal(IMAGES, start)
    # Beta(a, a): mean 1/2, variance 1 / (4 (2 a + 1)).
    shares = torch.tensor([each.share for each in found])
    assert shares.mean().item() == pytest.approx(0.5, abs=0.06)
    assert shares.var().item() == pytest.approx(1 / 7.2, rel=0.15)


def test_cutmix_is_a_box_of_the_one_before_and_shares_its_area() -> None:
    before = IMAGES[[3, 0, 1, 2]]
    shares = set()
    for each in drawn(Mixing(7, cutmix=1.0), 60):
        is_other = (each.inputs != IMAGES)[:, 0]
        rows, columns = is_other[0].any(1), is_other[0].any(0)
        assert torch.equal(is_other, (rows[:, None] & columns).expand(4, 12, 10))
        assert torch.equal(each.inputs, torch.where(is_other[:, None], before, IMAGES))
        assert each.share == pytest.approx(1 - is_other[0].float().mean().item())
        shares.add(each.share)
    assert len(shares) > 20


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_the_loss_is_cross_entropy_with_soft_targets(smoothing: float) -> None:
    logits = torch.randn(4, 3, generator=torch.Generator().manual_seed(2))
    (mixed, *_) = drawn(Mixing(7, mixup=1.0), 3)
    one_hot = F.one_hot(TARGETS, 3).float()
    soft = mixed.share * one_hot + (1 - mixed.share) * one_hot[[3, 0, 1, 2]]
    found = mixed.loss(lambda o, t: F.cross_entropy(o, t, label_smoothing=smoothing), logits)
    torch.testing.assert_close(found, F.cross_entropy(logits, soft, label_smoothing=smoothing))


def test_erasing_sets_a_box_of_some_images_to_zero() -> None:
    found = drawn(Mixing(7, erasing=0.5))
    erased = 0
    for each in found:
        assert each.partners is None
        for image, whole in zip(each.inputs, IMAGES, strict=True):
            gone = (image == 0)[0]
            assert torch.equal(image, torch.where(gone, 0.0, whole))
            if gone.any():
                erased += 1
                rows, columns = gone.any(1), gone.any(0)
                assert torch.equal(gone, rows[:, None] & columns)
                # 2 to 33 % of the area, but for the rounding of sides.
                assert 0 < gone.float().mean() < 0.4
    assert erased / (4 * len(found)) == pytest.approx(0.5, abs=0.06)


def test_what_is_drawn_depends_on_seed_step_and_micro_batch_alone() -> None:
    both = Mixing(7, mixup=0.4, cutmix=1.0, erasing=0.3)
    first, again = drawn(both, 30), drawn(both, 30)
    for one, two in zip(first, again, strict=True):
        assert torch.equal(one.inputs, two.inputs)
        assert one.share == two.share
    shares = [each.share for each in first]
    assert len(set(shares)) > 20
    other = [each.share for each in drawn(Mixing(8, 0.4, 1.0, 0.3), 30)]
    assert sum(one == two for one, two in zip(shares, other, strict=True)) < 3
    # Both ways are drawn: of a box, all of an image outside it is as it was.
    own = torch.cat([IMAGES, torch.zeros(1, 3, 12, 10)])
    assert {bool(torch.isin(each.inputs, own).all()) for each in first} == {True, False}
    # Nothing is done unless it is asked for.
    bare = Mixing(7)(IMAGES, TARGETS, 0, 0)
    assert bare.inputs is IMAGES
    assert bare.counted is TARGETS


def test_refused() -> None:
    with pytest.raises(RecipeError, match=r"data\.cutmix .*\(4, 7\)"):
        Mixing(7, cutmix=1.0)(torch.rand(4, 7), TARGETS, 0, 0)
    with pytest.raises(RecipeError, match=r"data\.cutmix .*\(4, 12, 10\)"):
        Mixing(7, cutmix=1.0)(IMAGES, torch.zeros(4, 12, 10), 0, 0)
    with pytest.raises(RecipeError, match=r"targets that are one tensor; found a dict"):
        Mixing(7, mixup=1.0)(IMAGES, {"a": TARGETS}, 0, 0)


# --- evaluations ----------------------------------------------------------------------------------

NUM_SAMPLES, NUM_CLASSES = 23, 7


class Counted(TensorDataset):
    """Counts which samples were asked for."""

    def __init__(self, images: Tensor, labels: Tensor) -> None:
        super().__init__(images, labels, NUM_CLASSES)
        self.asked: Counter[int] = Counter()

    def batch(self, indices_B: Tensor) -> tuple[Tensor, Tensor]:
        self.asked.update(indices_B.tolist())
        return super().batch(indices_B)


@pytest.fixture
def data() -> Counted:
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(NUM_SAMPLES, 1, 4, 4, generator=generator)
    return Counted(images, torch.randint(0, NUM_CLASSES, (NUM_SAMPLES,), generator=generator))


@pytest.fixture
def net() -> nn.Module:
    torch.manual_seed(1)
    # In training, dropout and BatchNorm would give other outputs than in evaluation.
    return nn.Sequential(nn.BatchNorm2d(1), nn.Flatten(), nn.Dropout(0.5), nn.Linear(16, 7))


@pytest.mark.parametrize("batch_size", [1, 5, 23, 100])
def test_against_a_plain_computation(net: nn.Module, data: Counted, batch_size: int) -> None:
    before = copy.deepcopy(net.state_dict())
    task = task_of(TaskConfig(), NUM_CLASSES)
    config = TrainConfig(eval_batch_size=batch_size)
    evaluation = evaluate(net, task, data, DataConfig(), config, ALONE)
    assert data.asked == Counter(range(NUM_SAMPLES))
    # The model is left as it was.
    assert net.training
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    assert all(parameter.grad is None for parameter in net.parameters())
    net.eval()
    with torch.no_grad():
        logits = net(data.inputs)
    ranking = logits.argsort(1, descending=True).tolist()
    labels = data.targets.tolist()
    top1 = sum(r[0] == label for r, label in zip(ranking, labels, strict=True))
    top5 = sum(label in r[:5] for r, label in zip(ranking, labels, strict=True))
    assert evaluation.samples == NUM_SAMPLES
    assert evaluation.metrics == {"top1": top1 / NUM_SAMPLES, "top5": top5 / NUM_SAMPLES}
    assert evaluation.largest_class_share == Counter(labels).most_common(1)[0][1] / NUM_SAMPLES
    loss = F.cross_entropy(logits, data.targets).item()
    assert evaluation.loss == pytest.approx(loss, rel=1e-6)


def of_one_alone(outputs: Tensor, labels: Tensor) -> Tensor:
    return (outputs.argmax(1) == int(labels)).sum()


def test_a_metric_of_ones_own_that_takes_no_batch_is_named(net: nn.Module, data: Counted) -> None:
    """What is looked at before the first step is one sample."""
    task = Task(classification_loss, {"mine": of_one_alone}, higher_is_better=True)
    with pytest.raises(OwnCodeError, match=r"metric 'mine', of a batch .* raised") as caught:
        evaluate(net, task, data, DataConfig(), TrainConfig(eval_batch_size=5), ALONE)
    assert "of_one_alone" in caught.value.traceback
    assert owners(caught.value.traceback) == {"user"}


def uneven_loss(outputs: Tensor, labels: Tensor) -> Tensor:
    """Of such different sizes that their sum depends on the order."""
    return F.cross_entropy(outputs, labels) * 1000.0 ** labels[0]


def of_two_ranks(_: World, said: dict[str, list[Any]]) -> list[dict[str, list[Any]]]:
    """What one rank says, as if two had said it: rank 0 the batches of rank 1."""
    return [{name: values[place::2] for name, values in said.items()} for place in (1, 0)]


def test_what_ranks_say_is_added_in_the_order_of_batches(
    net: nn.Module, data: Counted, monkeypatch: Patch
) -> None:
    task = replace(task_of(TaskConfig(), NUM_CLASSES), loss=uneven_loss)
    words = net, task, data, DataConfig(), TrainConfig(eval_batch_size=1), ALONE
    expected = evaluate(*words)
    monkeypatch.setattr(evaluation, "gather_json", of_two_ranks)
    assert evaluate(*words) == expected


@pytest.mark.parametrize(("num_classes", "headed"), [(2, False), (5, True), (6, False), (10, True)])
def test_count_correct(num_classes: int, headed: bool) -> None:
    generator = torch.Generator().manual_seed(num_classes)
    # No ties: each row is an order of its classes.
    rows = [torch.randperm(num_classes, generator=generator) for _ in range(40)]
    logits = torch.stack(rows).float()
    labels = torch.randint(0, num_classes, (40,), generator=generator)
    pairs = zip(logits.tolist(), labels.tolist(), strict=True)
    better = [sum(value > row[label] for value in row) for row, label in pairs]
    outputs = HeadedLogits(logits, -logits, -logits) if headed else logits
    top1, top5 = count_correct(outputs, labels)
    assert top1.dtype == top5.dtype == torch.float32
    assert top1.item() == sum(count == 0 for count in better)
    assert top5.item() == sum(count < 5 for count in better)
