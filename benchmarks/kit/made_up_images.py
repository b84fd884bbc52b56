"""Made-up images for benchmarks of step time, and the recipe of a training on them."""

import torch

from firecaffe.data import TensorDataset

EVALUATED = 4

RECIPE = """
[model]
name = "{model}"
[data]
name = "benchmarks.kit.made_up_images:images"
args = {{ count = {batch}, size = {size}, classes = {classes} }}
augment = "none"
mean = [0.5]
std = [0.25]
[train]
global_batch_size = {batch}
micro_batch_size = {micro_batch}
steps = {steps}
eval_batch_size = 4
device = "cpu"
[solver]
base_lr = 0.001
momentum = 0.9
[run]
tensorboard = false
"""


def images(count: int, size: int = 227, classes: int = 1000) -> tuple[TensorDataset, TensorDataset]:
    """Images and labels by chance, the same each time, to train on; a few of them to evaluate."""
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(0, 256, (count, 3, size, size), dtype=torch.uint8, generator=generator)
    labels = torch.randint(0, classes, (count,), generator=generator)
    few = TensorDataset(pixels[:EVALUATED], labels[:EVALUATED], classes)
    return TensorDataset(pixels, labels, classes), few
