"""Measures training steps of `device_networks` on one core, as a table of published/devices.toml.

The device's peak is what a large matrix product reaches, and its memory rate that of a copy, both
counted as `firecaffe check` counts them.

    python -m benchmarks.planner.device_cpu
"""

import os
import time
from collections.abc import Callable
from statistics import median

import torch

from benchmarks.planner.device_networks import BUILDERS

NETS = {
    "alexnet_owt": 16,
    "squeezenet1_1": 8,
    "resnet18": 4,
    "resnet50": 4,
    "googlenet_bn": 4,
    "vgg11": 2,
    "mobilenetv2_100": 4,
    "densenet121": 4,
    "efficientnet_b0": 4,
    "resnext50_32x4d": 2,
    "vit_tiny_patch16_224": 8,
    "mixer_s32_224": 8,
    "convnext_tiny": 2,
    "inception_v3": 2,
}
RUNS = 5
SIDE = 1536
COPIED = 64_000_000


def timed(run: Callable[[], object]) -> float:
    run()
    seconds = []
    for _ in range(RUNS):
        start = time.process_time()
        run()
        seconds.append(time.process_time() - start)
    return median(seconds)


def step_s(net: str, batch: int) -> float:
    build, shape = BUILDERS[net]
    network, images = build().train(), torch.randn(batch, *shape)

    def run() -> None:
        network.zero_grad()
        out = network(images)
        out = out if isinstance(out, torch.Tensor) else out[0]
        out.float().square().mean().backward()

    return timed(run)


def main() -> None:
    torch.set_num_threads(1)
    matrix, vector = torch.randn(SIDE, SIDE), torch.randn(COPIED)
    flops = 2 * SIDE**3 / timed(lambda: matrix @ matrix)
    copy = torch.empty_like(vector)
    rate = 2 * vector.nbytes / timed(lambda: copy.copy_(vector))
    print(f"# {torch.__version__}, {os.cpu_count()} cores: {flops:.4g} FLOP/s, {rate:.4g} B/s")
    for net, batch in NETS.items():
        print(f'["{net}", {batch}, {1e3 * step_s(net, batch):.5g}],', flush=True)


if __name__ == "__main__":
    main()
