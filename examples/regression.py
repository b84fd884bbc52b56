"""Regression of a physical quantity: period and damping time of a pendulum, from its noisy trace.

python examples/regression.py
"""

import torch
from torch import Tensor, nn

import firecaffe

SAMPLES, SECONDS = 128, 10.0


def pendulums(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Angles over time, (count, 1, SAMPLES), and (period, damping time) in seconds, (count, 2).

    A damped harmonic oscillator: exp(-t / damping) cos(2 pi t / period + phase), and noise.
    """
    generator = torch.Generator().manual_seed(seed)
    period, damping, phase = torch.rand(3, count, 1, generator=generator)
    period, damping = 1.0 + 3.0 * period, 2.0 + 6.0 * damping
    time = torch.linspace(0, SECONDS, SAMPLES)
    angle = torch.exp(-time / damping) * torch.cos(2 * torch.pi * (time / period + phase))
    angle = angle + 0.02 * torch.randn(angle.shape, generator=generator)
    return angle.unsqueeze(1), torch.cat((period, damping), dim=1)


class Network(nn.Sequential):
    """Traces (B, 1, SAMPLES) to seconds (B, 2)."""

    def __init__(self) -> None:
        super().__init__(
            nn.Conv1d(1, 16, 9, stride=2, padding=4),
            nn.ReLU(),
            nn.Conv1d(16, 32, 9, stride=4, padding=4),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(32 * SAMPLES // 8, 64),
            nn.ReLU(),
            nn.Linear(64, 2),
        )


def main() -> None:
    recipe = firecaffe.Recipe(
        # Huber's loss: squared up to `delta`, then linear, so single bad traces count less.
        task=firecaffe.TaskConfig(
            name="regression", args={"loss": "huber", "delta": 1.0}, metrics=["r2", "mae"]
        ),
        train=firecaffe.TrainConfig(global_batch_size=64, micro_batch_size=16, steps=150),
        solver=firecaffe.SolverConfig(type="adam", base_lr=0.002),
    )
    result = firecaffe.train(recipe, Network, pendulums(4000, seed=1), pendulums(500, seed=2))
    print(f"R² {result.metrics['r2']:.3f}, MAE {result.metrics['mae']:.3f} s")

    trace, (period, damping) = (each[0] for each in pendulums(1, seed=4))
    with torch.no_grad():
        found = result.model(trace.unsqueeze(0))[0]
    print(f"period {period:.2f} s, found {found[0]:.2f} s")
    print(f"damping time {damping:.2f} s, found {found[1]:.2f} s")


if __name__ == "__main__":
    main()
