"""AlexNet and GoogLeNet read from a prototxt, against firecaffe's own networks: images/s.

    python -m benchmarks.caffe.speed                        # both, 8 images, 10 pairs
    python -m benchmarks.caffe.speed --network alexnet --batch-size 16 --pairs 20

The same weights are in both; outputs and gradients are compared before anything is timed. A pair is
a forward and a backward of each, one after the other, in turns first; the ratio is that of a pair.
"""

import argparse
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from benchmarks.caffe.nets import alexnet, googlenet
from firecaffe.caffe.trained import Heads, TrainedNet
from firecaffe.models import HeadedLogits, build_model

CLOSE = 1e-5
"""By how much outputs and gradients may differ, over the largest."""


@dataclass(frozen=True)
class Case:
    """A network, in both forms."""

    text: Callable[..., str]
    size: int
    order: Callable[[str], str]
    """The name of our module for a module of the net."""


def _of_alexnet(name: str) -> str:
    features = {"conv1": 0, "conv2": 4, "conv3": 8, "conv4": 10, "conv5": 12}
    classifier = {"fc6": 0, "fc7": 3, "fc8": 6}
    return f"features.{features[name]}" if name in features else f"classifier.{classifier[name]}"


def _of_googlenet(name: str) -> str:
    first = {"conv1_7x7_s2": "conv1", "conv2_3x3_reduce": "conv2", "conv2_3x3": "conv3"}
    branches = {
        "1x1": "branch1",
        "3x3_reduce": "branch2.0",
        "3x3": "branch2.1",
        "5x5_reduce": "branch3.0",
        "5x5": "branch3.1",
        "pool_proj": "branch4.1",
    }
    if name in first:
        return f"{first[name]}.conv"
    if name == "loss3_classifier":
        return "fc"
    if name.startswith("inception"):
        _, block, branch = name.split("_", 2)
        return f"inception{block}.{branches[branch]}.conv"
    head, layer = name.split("_", 1)
    fitting = {"conv": "conv.conv", "fc": "fc1", "classifier": "fc2"}
    return f"aux{head[-1]}.{fitting[layer]}"


CASES = {
    "alexnet": Case(alexnet, 227, _of_alexnet),
    "googlenet": Case(googlenet, 224, _of_googlenet),
}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--network", choices=[*CASES], action="append")
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args(argv)
    print(f"torch {torch.__version__}, {platform.processor() or platform.machine()}, "
          f"{torch.get_num_threads()} threads, {options.device}")  # fmt: skip
    for name in options.network or CASES:
        print(measured(name, options.batch_size, options.pairs, options.device))


def measured(name: str, batch_size: int, pairs: int, device: str) -> str:
    """A line about one network. Raises: AssertionError if the two do not compute the same."""
    case = CASES[name]
    torch.manual_seed(0)
    ours = build_model(name).to(device)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "net.prototxt"
        file.write_text(case.text(batch_size, labels=True))
        net = TrainedNet(file).to(device)
    copy_weights(ours, net, case.order)
    images = torch.randn(batch_size, 3, case.size, case.size, device=device)
    gap = check_same(ours, net, images, case.order)
    ours.train()
    net.train()
    times: dict[str, list[float]] = {"ours": [], "caffe": []}
    both = {"ours": ours, "caffe": net}
    for number in range(pairs + 1):
        for which in ("ours", "caffe") if number % 2 else ("caffe", "ours"):
            took = seconds(both[which], images)
            if number:  # the first warms up
                times[which].append(took)
    ratios = [ours / caffe for ours, caffe in zip(times["ours"], times["caffe"], strict=True)]
    rates = {which: batch_size / statistics.median(taken) for which, taken in times.items()}
    low, *_, high = sorted(ratios) if len(ratios) > 1 else ratios * 2
    return (
        f"{name}: {rates['caffe']:.2f} images/s from the prototxt, {rates['ours']:.2f} our own; "
        f"ratio {statistics.median(ratios):.3f} ({low:.3f} to {high:.3f}, {pairs} pairs of "
        f"{batch_size} images); outputs and gradients differ by {gap:.1e} of the largest"
    )


def copy_weights(ours: nn.Module, net: nn.Module, order: Callable[[str], str]) -> None:
    """Puts our network's weights into the net: all of them, each once."""
    own = dict(ours.named_parameters())
    taken = set()
    with torch.no_grad():
        for name, parameter in net.named_parameters():
            module, _, last = name.rpartition(".")
            source = f"{order(module)}.{last}"
            taken.add(source)
            parameter.copy_(own[source])
    assert taken == {*own}, f"weights without a counterpart: {own.keys() - taken}"


def check_same(
    ours: nn.Module, net: nn.Module, images: Tensor, order: Callable[[str], str]
) -> float:
    """By how much outputs and gradients differ, over the largest, with all heads and no dropout."""
    modules = [*ours.modules(), *net.modules()]
    drops = [each for each in modules if isinstance(each, nn.Dropout)]
    kept = [each.p for each in drops]
    for each in drops:
        each.p = 0.0
    ours.train()
    net.train()
    found, expected = outputs_of(net(images)), outputs_of(ours(images))
    gaps = [gap(a, b) for a, b in zip(found, expected, strict=True)]
    for outputs in (found, expected):
        torch.autograd.backward([each.square().sum() for each in outputs])
    own = dict(ours.named_parameters())
    for name, parameter in net.named_parameters():
        module, _, last = name.rpartition(".")
        source = own[f"{order(module)}.{last}"]
        assert parameter.grad is not None
        assert source.grad is not None
        gaps.append(gap(parameter.grad, source.grad))
    for each, p in zip(drops, kept, strict=True):
        each.p = p
    for network in (ours, net):
        network.zero_grad(set_to_none=True)
    assert max(gaps) <= CLOSE, f"they differ by {max(gaps):.1e} of the largest"
    return max(gaps)


@torch.no_grad()
def gap(found: Tensor, expected: Tensor) -> float:
    largest = expected.abs().max().clamp(min=1e-30)
    return ((found - expected).abs().max() / largest).item()


def outputs_of(outputs: Tensor | Heads | HeadedLogits) -> list[Tensor]:
    """The heads, from the first on."""
    if isinstance(outputs, Heads):
        return [*outputs.blobs.values()]
    if isinstance(outputs, HeadedLogits):
        return [outputs.aux1, outputs.aux2, outputs.logits]
    return [outputs]


def seconds(network: nn.Module, images: Tensor) -> float:
    """Of one forward and backward."""
    network.zero_grad(set_to_none=True)
    _wait(images)
    start = time.perf_counter()
    losses = [each.mean() for each in outputs_of(network(images))]
    torch.autograd.backward(losses)
    _wait(images)
    return time.perf_counter() - start


def _wait(images: Tensor) -> None:
    if images.is_cuda:
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
