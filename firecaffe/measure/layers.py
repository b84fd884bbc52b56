"""Measures a micro-batch's time, by torch's profiler, and its outputs' memory by type of layer."""

import re
from dataclasses import dataclass
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from firecaffe.models.network import make_network
from firecaffe.models.profile import profile_on
from firecaffe.plan.of_recipe import workload_of
from firecaffe.recipe.check import CheckedRecipe
from firecaffe.tasks import task_of

OPERATIONS = {
    "convolution": r"conv|mkldnn_|cudnn_conv",
    "fully connected": r"addmm|::mm\b|linear|matmul|bmm",
    "pooling": r"pool",
    "normalization": r"norm",
    "activation": r"relu|threshold|softmax|sigmoid|tanh|clamp",
    "dropout": r"dropout|bernoulli",
}
"""Types by a pattern in an operation's name; the first match counts, and no match is `other`."""

MODULES = {
    "convolution": r"Conv",
    "fully connected": r"Linear",
    "pooling": r"Pool",
    "normalization": r"Norm|Response",
    "activation": r"ReLU|Softmax|Tanh|Sigmoid",
    "dropout": r"Dropout",
}
OTHER = "other"
PASSES = 3


@dataclass(frozen=True)
class LayerTypes:
    time_s: dict[str, float]
    memory_bytes: dict[str, float]

    def as_dict(self) -> dict[str, Any]:
        return {"time_by_type_s": self.time_s, "output_bytes_by_type": self.memory_bytes}


def by_layer_type(recipe: CheckedRecipe, device: torch.device, micro_batch_size: int) -> LayerTypes:
    """Profile PASSES forwards and backwards of a micro-batch, after one that is not profiled."""
    work = workload_of(recipe)
    counts = work.num_classes or None, work.layout.channels
    model = make_network(recipe.model, *counts).to(device)
    inputs, targets = work.layout.made_up(micro_batch_size, device)
    loss = task_of(recipe.task, work.num_classes or None).loss

    def run() -> None:
        torch.autograd.backward(loss(model(inputs), targets))

    run()
    is_gpu = device.type == "cuda"
    activities = [ProfilerActivity.CUDA if is_gpu else ProfilerActivity.CPU]
    with profile(activities=activities, acc_events=True) as seen:
        for _ in range(PASSES):
            run()
    time_s = dict.fromkeys((*OPERATIONS, OTHER), 0.0)
    for row in seen.key_averages():
        own_us = row.self_device_time_total if is_gpu else row.self_cpu_time_total
        time_s[type_of(row.key, OPERATIONS)] += own_us / 1e6 / PASSES
    found = profile_on(model, inputs)
    memory_bytes = dict.fromkeys((*MODULES, OTHER), 0.0)
    for layer in found.layers:
        memory_bytes[type_of(layer.kind, MODULES)] += layer.output_activation_bytes
    return LayerTypes(time_s, memory_bytes)


def type_of(name: str, types: dict[str, str]) -> str:
    for kind, pattern in types.items():
        if re.search(pattern, name):
            return kind
    return OTHER
