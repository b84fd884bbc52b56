"""The noise scale of gradients whose covariance is known, and how often its band holds it."""

import json
from pathlib import Path

import pytest
import torch

from firecaffe.runs.noise_scale import (
    CONFIDENCE,
    GradientNorms,
    NoiseScale,
    noise_lines,
    noise_scale,
)

MICRO, LEAVES, SIZE = 4, 8, 50
DEVIATIONS = torch.linspace(0.2, 2.0, SIZE).double()
TRACE = float(DEVIATIONS.square().sum())


def measured(steps: int, scale: float, generator: torch.Generator) -> list[GradientNorms]:
    """Of gradients with a known mean and normal noise, so that tr(Σ) / |G|² is `scale`."""
    mean = torch.full((SIZE,), (TRACE / scale / SIZE) ** 0.5).double()
    noise = torch.randn(steps, LEAVES, SIZE, generator=generator, dtype=torch.float64)
    leaves = mean + noise * DEVIATIONS / MICRO**0.5
    micro, batch = leaves.square().sum(2).mean(1), leaves.mean(1).square().sum(1)
    return [
        GradientNorms(20 * step + 21, *norms)
        for step, norms in enumerate(zip(micro.tolist(), batch.tolist(), strict=True))
    ]


def scale_of(rows: list[GradientNorms]) -> NoiseScale:
    scale = noise_scale(rows, MICRO, MICRO * LEAVES)
    assert scale is not None
    return scale


def test_a_known_covariance() -> None:
    """From far below the batch of 32 to twenty times it."""
    generator = torch.Generator().manual_seed(1)
    for scale, tolerance in ((3.0, 0.02), (40.0, 0.03), (640.0, 0.2)):
        found = scale_of(measured(4000, scale, generator))
        assert found.samples == pytest.approx(scale, rel=tolerance)
        assert found.low < (found.samples or 0) < (found.high or 0)
        assert found.steps[:2] == [21, 41]


def test_bands_hold_the_scale_as_often_as_they_say() -> None:
    """With few measured steps and with many; also where some bands have no end."""
    generator, times = torch.Generator().manual_seed(2), 400
    for steps, scale in ((5, 40.0), (12, 40.0), (60, 40.0), (60, 640.0)):
        scales = [scale_of(measured(steps, scale, generator)) for _ in range(times)]
        held = sum(s.low <= scale and (s.high is None or scale <= s.high) for s in scales)
        assert held / times == pytest.approx(CONFIDENCE, abs=0.06), (steps, scale)


def test_what_is_not_known() -> None:
    generator = torch.Generator().manual_seed(3)
    assert noise_scale(measured(3, 40.0, generator), MICRO, MICRO * LEAVES) is None
    # Without any gradient no scale is too large.
    found = scale_of(measured(60, 1e9, generator))
    assert (found.high, found.low > 100) == (None, True)
    # Without noise, one sample is enough.
    for norm, expected in ((0.0, (None, 0.0, None)), (2.0, (0.0, 0.0, 0.0))):
        found = scale_of([GradientNorms(step, norm, norm) for step in range(9)])
        assert (found.samples, found.low, found.high) == expected


def test_what_is_said(tmp_path: Path) -> None:
    """The last scale that the run has recorded."""
    assert noise_lines(tmp_path) == []
    ends = {"noise_scale_low": 980.2, "noise_scale": 1240.4, "noise_scale_high": 1601.0}
    rows: list[dict[str, float]] = [{"noise_scale_low": 8.3}, {}, ends, {}]
    lines = [json.dumps({"kind": "train", "step": n, **row}) for n, row in enumerate(rows)]
    for count, said in ((4, "1,240 samples (980 to 1,600)"), (1, "at least 8.3 samples")):
        (tmp_path / "metrics.jsonl").write_text("\n".join(lines[:count]) + "\n")
        (line,) = noise_lines(tmp_path)
        assert said in line
