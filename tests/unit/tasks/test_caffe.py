"""A net of Caffe's as a task: what its loss and Accuracy layers say of outputs and targets."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from firecaffe.caffe.judge import non_mean_losses, read_judges
from firecaffe.caffe.net import Net
from firecaffe.caffe.trained import Heads, TrainedNet
from firecaffe.errors import RecipeError
from firecaffe.tasks import Task, TaskConfig, task_of
from firecaffe.tasks.caffe import meaning_of
from firecaffe.tasks.outputs import prediction_of

DATA = """
layer { name: "d" type: "Data" top: "data" top: "label" data_param { batch_size: 4 }
        transform_param { crop_size: 8 } }
"""
NET = (
    DATA
    + """
layer { name: "fc" type: "InnerProduct" bottom: "data" top: "fc"
        inner_product_param { num_output: 5 weight_filler { type: "xavier" } } }
"""
)
LOSS = 'layer { name: "loss" type: "SoftmaxWithLoss" bottom: "fc" bottom: "label" top: "loss" }\n'
ACCURACY = """
layer { name: "top-1" type: "Accuracy" bottom: "fc" bottom: "label" top: "top/1"
        include { phase: TEST } }
layer { name: "top-3" type: "Accuracy" bottom: "fc" bottom: "label" top: "3 of all"
        include { phase: TEST } accuracy_param { top_k: 3 } }
"""
AUX = """
layer { name: "aux" type: "InnerProduct" bottom: "data" top: "aux"
        inner_product_param { num_output: 5 weight_filler { type: "xavier" } }
        include { phase: TRAIN } }
layer { name: "aux_loss" type: "SoftmaxWithLoss" bottom: "aux" bottom: "label" top: "aux_loss"
        loss_weight: 0.3 include { phase: TRAIN } }
"""

GENERATOR = torch.Generator().manual_seed(0)
LOGITS = torch.randn(12, 5, generator=GENERATOR)
AUX_LOGITS = torch.randn(12, 5, generator=GENERATOR)
LABELS = torch.randint(0, 5, (12,), generator=GENERATOR)


def heads(blobs: dict[str, Tensor], phase: str = "TRAIN") -> Heads:
    return Heads(blobs, "fc", phase)


@pytest.fixture
def net(tmp_path: Path) -> Any:
    def write(text: str) -> Path:
        path = tmp_path / "net.prototxt"
        path.write_text(text)
        return path

    return write


@pytest.fixture
def task(net: Any) -> Any:
    return lambda text, **words: task_of(TaskConfig(f"caffe:{net(text)}", **words), 10)


def value(task: Task, name: str, outputs: Any, targets: Any) -> float:
    metric = task.measured[name]
    return metric.value(metric.of_batch(outputs, targets), len(LABELS))


def test_its_metrics_are_the_accuracies_of_test(task: Any) -> None:
    made = task(NET + LOSS + ACCURACY)
    assert made.loss(LOGITS, LABELS.float()) == made.loss(LOGITS, LABELS)
    assert list(made.metrics) == ["top_1", "_3_of_all"]
    assert made.measure.name == "top_1"
    assert made.measure.is_share
    hits = (LOGITS.argsort(1, descending=True) == LABELS[:, None]).float()
    assert value(made, "top_1", LOGITS, LABELS) == pytest.approx(float(hits[:, 0].mean()))
    assert value(made, "_3_of_all", LOGITS, LABELS) == pytest.approx(float(hits[:, :3].sum() / 12))


def test_an_accuracy_of_the_main_loss_comes_first(task: Any) -> None:
    both = 'bottom: "label" include { phase: TEST } }'
    text = f"""{NET}{AUX.replace("include { phase: TRAIN }", "")}{LOSS}
    layer {{ name: "a" type: "Accuracy" bottom: "aux" top: "a" {both}
    layer {{ name: "b" type: "Accuracy" bottom: "fc" top: "b" {both}"""
    assert list(task(text).metrics) == ["b", "a"]


def test_of_equal_losses_the_last_is_the_main_one(task: Any) -> None:
    aux = AUX.replace("include { phase: TRAIN }", "").replace("loss_weight: 0.3", "")
    hits = (AUX_LOGITS.argmax(1) == LABELS).float().mean()
    outputs = heads({"fc": LOGITS, "aux": AUX_LOGITS}, "TEST")
    assert value(task(NET + LOSS + aux), "accuracy", outputs, LABELS) == pytest.approx(float(hits))


def test_without_an_accuracy_it_has_that_of_its_loss(task: Any) -> None:
    made = task(NET + LOSS.replace("top:", "loss_param { ignore_label: 2 } top:"))
    assert list(made.metrics) == ["accuracy"]
    counted = LABELS != 2
    expected = (LOGITS.argmax(1) == LABELS)[counted].float().mean()
    assert value(made, "accuracy", LOGITS, LABELS) == pytest.approx(float(expected))


FOR_TRAINING = LOSS.replace("top:", "include { phase: TRAIN } top:")
PROB = 'layer { name: "prob" type: "Softmax" bottom: "fc" top: "prob" }\n'
POWER = """
layer { name: "p" type: "Power" bottom: "fc" top: "p" loss_weight: 0.5 power_param { power: 2 } }
"""
SILENCE = 'layer { name: "s" type: "Silence" bottom: "top/1" include { phase: TEST } }'
ON_PROB = """
layer { name: "accuracy" type: "Accuracy" bottom: "prob" bottom: "label" top: "accuracy"
        include { phase: TEST } }
"""


@pytest.mark.parametrize(
    "text",
    [
        NET + LOSS,
        NET + AUX + LOSS,
        NET + LOSS + ACCURACY,
        NET + PROB + LOSS + ON_PROB,
        NET + FOR_TRAINING,
        NET + FOR_TRAINING + ACCURACY,
        NET + AUX + PROB + FOR_TRAINING + ON_PROB,
        NET + LOSS + POWER,
        NET + LOSS + ACCURACY + SILENCE,
    ],
)
@torch.no_grad()
def test_it_judges_what_the_network_of_the_recipe_gives(net: Any, text: str) -> None:
    path = net(text)
    made = task_of(TaskConfig(f"caffe:{path}"), None)
    assert made.wrong is not None
    network, images = TrainedNet(path), torch.randn(4, 3, 8, 8, generator=GENERATOR)
    labels = LABELS[:4]
    for phase in ("TRAIN", "TEST"):
        network.train(phase == "TRAIN")
        outputs = network(images)
        assert made.wrong(outputs) == ""
        whole = Net(path, phase=phase)
        whole.load_state_dict(network.state_dict(), strict=False)
        found = whole(images, labels)
        if whole.losses:
            assert made.loss(outputs, labels) == pytest.approx(float(whole.loss(found)))
        else:
            expected = F.cross_entropy(prediction_of(outputs), labels)
            assert made.loss(outputs, labels) == pytest.approx(float(expected))
    for name, metric in made.measured.items():
        share = metric.value(metric.of_batch(outputs, labels), 4)
        top = {"top_1": "top/1", "_3_of_all": "3 of all"}.get(name, name)
        hits = prediction_of(outputs).argmax(1) == labels
        assert share == pytest.approx(float(found.get(top, hits.float().mean())))


@torch.no_grad()
def test_a_phase_without_samples_is_the_other_one(net: Any) -> None:
    images = torch.randn(4, 3, 8, 8, generator=GENERATOR)
    for phase in ("TRAIN", "TEST"):
        path = net(NET.replace("type:", f"include {{ phase: {phase} }} type:", 1) + LOSS)
        network = TrainedNet(path)
        first, second = (network.train(mode)(images) for mode in (True, False))
        assert torch.equal(first, second)
        loss = task_of(TaskConfig(f"caffe:{path}"), None).loss(first, LABELS[:4])
        torch.testing.assert_close(loss, F.cross_entropy(first, LABELS[:4]))
    network = TrainedNet(net(NET + PROB.replace("top:", "include { phase: TEST } top:")))
    scores, shares = (network.train(mode)(images) for mode in (True, False))
    assert torch.equal(scores.softmax(1), shares)  # what comes out of each phase


def test_layers_that_take_the_targets_apart_are_run(task: Any) -> None:
    text = f"""{NET}
    layer {{ name: "s" type: "Slice" bottom: "label" top: "l1" top: "l2" }}
    layer {{ name: "unused" type: "Silence" bottom: "l1" }}
    {LOSS.replace('"label"', '"l2"')}"""
    targets = torch.stack([LABELS * 0, LABELS], 1).float()
    expected = F.cross_entropy(LOGITS, LABELS)
    assert task(text).loss(LOGITS, targets) == pytest.approx(float(expected))


def test_several_targets_go_by_their_order_or_their_names(task: Any) -> None:
    boxes = LOGITS.flip(0)
    text = f"""{NET.replace('top: "label"', 'top: "label" top: "box"')}{LOSS}
    layer {{ name: "of_box" type: "EuclideanLoss" bottom: "fc" bottom: "box" loss_weight: 2 }}"""
    made = task(text)
    expected = F.cross_entropy(LOGITS, LABELS) + (LOGITS - boxes).square().sum(1).mean()
    assert made.loss(LOGITS, (LABELS, boxes)) == pytest.approx(float(expected))
    assert made.loss(LOGITS, {"box": boxes, "label": LABELS}) == pytest.approx(float(expected))
    with pytest.raises(RecipeError, match="takes the target 'box', which the data do not give"):
        made.loss(LOGITS, LABELS)


def test_an_image_may_be_its_own_target(task: Any) -> None:
    layer = 'layer { name: "e" type: "EuclideanLoss" bottom: "fc" bottom: "data" top: "e" '
    alone = task(f"{NET}{layer}}}")
    loss = alone.loss(heads({"fc": LOGITS, "data": AUX_LOGITS}), LABELS)
    assert loss == pytest.approx(float((LOGITS - AUX_LOGITS).square().sum(1).mean() / 2))
    assert not alone.metrics
    assert alone.measure.name == "loss"
    # No gradient goes where propagate_down is false.
    fc, data = LOGITS.clone().requires_grad_(), AUX_LOGITS.clone().requires_grad_()
    both = task(f"{NET}{LOSS}{layer} propagate_down: false propagate_down: true }}")
    loss = both.loss(heads({"fc": fc, "data": data}), LABELS)
    of_fc, of_data = torch.autograd.grad(loss, (fc, data))
    [of_entropy] = torch.autograd.grad(F.cross_entropy(fc, LABELS), fc)
    assert torch.allclose(of_fc, of_entropy)
    assert torch.allclose(of_data, (AUX_LOGITS - LOGITS) / 12)


def test_what_is_counted_in_training_is_its_first_metric(task: Any) -> None:
    made = task(NET + LOSS + ACCURACY)
    assert made.counted == ("top_1",)
    assert made.counts.count(LOGITS, LABELS).tolist() == [(LOGITS.argmax(1) == LABELS).sum()]
    assert made.classes(LABELS.float()) == LABELS.tolist()
    of_numbers = task(NET.replace('"Data"', '"HDF5Data"') + LOSS)
    assert of_numbers.counts is of_numbers.classes is None
    top_3 = NET + LOSS + ACCURACY[ACCURACY.index('layer { name: "top-3"') :]
    assert task(top_3).counts is None


def test_metrics_may_be_chosen(task: Any) -> None:
    made = task(NET + LOSS + ACCURACY, metrics=["_3_of_all"], metric="loss")
    assert list(made.metrics) == ["_3_of_all"]
    assert made.measure.name == "loss"
    with pytest.raises(RecipeError, match=r"task.metrics has 'top1'; .* top_1, _3_of_all"):
        task(NET + LOSS + ACCURACY, metrics=["top1"])


def test_what_the_outputs_mean_goes_by_the_loss_and_the_labels(net: Any) -> None:
    meanings = {"SoftmaxWithLoss": "classification", "SigmoidCrossEntropyLoss": "multilabel"}
    for kind, meaning in (meanings | {"EuclideanLoss": ""}).items():
        path = net(NET + LOSS.replace("SoftmaxWithLoss", kind))
        assert meaning_of(f"caffe:{path}") == meaning
    # Labels from a layer of images.
    apart = NET.replace('top: "label"', "") + DATA.replace('"data" top: ', "")
    assert meaning_of(f"caffe:{net(apart + LOSS)}") == "segmentation"


def test_outputs_that_lack_a_blob_are_wrong(task: Any) -> None:
    made = task(NET + AUX + LOSS)
    assert made.wrong(heads({"fc": LOGITS}, "TEST")) == ""
    for outputs in (LOGITS, heads({"fc": LOGITS})):
        assert "expected aux, fc, which losses and accuracies take in TRAIN" in made.wrong(outputs)
        with pytest.raises(RecipeError, match="the network gives"):
            made.loss(outputs, LABELS)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (NET, "net.prototxt: no loss layer in TRAIN"),
        (NET + "layer {", "the end of the file"),
        (NET + AUX, "no loss layer in TEST, and those of TRAIN take what TEST has not: aux; exp"),
    ],
)
def test_a_net_without_a_loss_is_refused(task: Any, text: str, line: str) -> None:
    with pytest.raises(RecipeError, match=line):
        task(text)
    with pytest.raises(RecipeError, match=r"task.name is .* there is no file"):
        task_of(TaskConfig("caffe:other.prototxt"), None)


def test_a_label_without_an_output_is_said(task: Any) -> None:
    with pytest.raises(RecipeError, match=r"has no place among .*: Target 7 is out of bounds"):
        task(NET + LOSS).loss(LOGITS, LABELS.where(LABELS != 2, 7))


def test_weights_that_take_the_targets_are_refused(task: Any) -> None:
    text = f"""{NET}
    layer {{ name: "embed" type: "InnerProduct" bottom: "label" top: "embed"
            inner_product_param {{ num_output: 5 }} }}
    layer {{ name: "e" type: "EuclideanLoss" bottom: "fc" bottom: "embed" }}"""
    with pytest.raises(RecipeError, match=r"net.prototxt:\d+: InnerProduct 'embed' has weights"):
        task(text).loss(LOGITS, LABELS.float()[:, None])


@pytest.mark.parametrize(
    ("type", "words", "is_mean"),
    [
        ("SoftmaxWithLoss", "", True),
        ("SoftmaxWithLoss", "ignore_label: 2", False),
        ("SoftmaxWithLoss", "ignore_label: 2 normalize: false", True),
        ("SoftmaxWithLoss", "ignore_label: 2 normalization: FULL", True),
        ("SoftmaxWithLoss", "normalization: NONE", False),
        ("SigmoidCrossEntropyLoss", "ignore_label: 2", True),
        ("SigmoidCrossEntropyLoss", "ignore_label: 2 normalization: VALID", False),
    ],
)
def test_it_is_said_which_losses_are_no_means(
    net: Any, type: str, words: str, is_mean: bool
) -> None:
    text = NET + LOSS.replace("SoftmaxWithLoss", type).replace(
        "top:", f"loss_param {{ {words} }} top:"
    )
    path = net(text)
    notes = non_mean_losses(read_judges(path)[0])
    assert len(notes) == (not is_mean)
    loss = task_of(TaskConfig(f"caffe:{path}"), None).loss
    targets = LABELS if type == "SoftmaxWithLoss" else 2.0 * (LABELS[:, None] > torch.arange(5))
    parts = torch.stack([loss(LOGITS[at : at + 3], targets[at : at + 3]) for at in (0, 3, 6, 9)])
    assert (parts.mean() == pytest.approx(float(loss(LOGITS, targets)), rel=1e-6)) == is_mean
