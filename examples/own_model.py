"""Your own network and your own data, on one worker or on many, to the same bits.

python examples/own_model.py
torchrun --nproc-per-node 2 examples/own_model.py
"""

import torch
from torch import nn

import firecaffe


def network() -> nn.Module:
    """Any nn.Module that takes images (B, C, H, W) and gives logits (B, classes)."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.MaxPool2d(4),
        nn.Flatten(),
        nn.Dropout(0.2),
        nn.Linear(16 * 4 * 4, 2),
    )


def bars(num_images: int, seed: int) -> firecaffe.TensorDataset:
    """Noisy 16x16 images of a bar: class 0 where it is upright, class 1 where it lies."""
    generator = torch.Generator().manual_seed(seed)
    images = torch.randint(0, 160, (num_images, 1, 16, 16), generator=generator, dtype=torch.uint8)
    labels = torch.arange(num_images) % 2
    images[labels == 0, :, 2:14, 7:9] += 90
    images[labels == 1, :, 7:9, 2:14] += 90
    return firecaffe.TensorDataset(images, labels, num_classes=2)


def main() -> None:
    recipe = firecaffe.Recipe(
        train=firecaffe.TrainConfig(global_batch_size=64, micro_batch_size=8, steps=40),
        solver=firecaffe.SolverConfig(type="adam", base_lr=0.003),
    )
    result = firecaffe.train(recipe, network, bars(2000, seed=1), bars(400, seed=2))
    print(f"top-1 {result.top1:.2%}, weights {result.weights_sha256[:12]}")


if __name__ == "__main__":
    main()
