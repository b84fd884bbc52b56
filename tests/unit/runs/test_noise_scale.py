"""The noise scale of gradients whose covariance is known, and how often its band holds it."""

import json
from pathlib import Path

import torch

from firecaffe.runs.noise_scale import CONFIDENCE, GradientNorms, noise_lines, noise_scale

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


def test_a_known_covariance() -> None:
    """From far below the batch of 32 to twenty times it."""
    generator = torch.Generator().manual_seed(1)
    for scale, tolerance in ((3.0, 0.02), (40.0, 0.03), (640.0, 0.2)):
        found = noise_scale(measured(4000, scale, generator), MICRO, MICRO * LEAVES)
        assert found is not None
        assert found.samples is not None
        assert found.high is not None
        assert abs(found.samples / scale - 1) < tolerance
        assert found.low < found.samples < found.high
        assert found.steps[:2] == [21, 41]


def test_bands_hold_the_scale_as_often_as_they_say() -> None:
    """With few measured steps and with many; also where some bands have no end."""
    generator, times = torch.Generator().manual_seed(2), 400
    for steps, scale in ((5, 40.0), (12, 40.0), (60, 40.0), (60, 640.0)):
        held = 0
        for _ in range(times):
            found = noise_scale(measured(steps, scale, generator), MICRO, MICRO * LEAVES)
            assert found is not None
            held += found.low <= scale and (found.high is None or scale <= found.high)
        assert abs(held / times - CONFIDENCE) < 0.06, (steps, scale, held / times)


def test_what_is_not_known() -> None:
    generator = torch.Generator().manual_seed(3)
    assert noise_scale(measured(3, 40.0, generator), MICRO, MICRO * LEAVES) is None
    # Without any gradient no scale is too large.
    found = noise_scale(measured(60, 1e9, generator), MICRO, MICRO * LEAVES)
    assert found is not None
    assert found.high is None
    assert found.low > 100
    nothing = noise_scale([GradientNorms(step, 0.0, 0.0) for step in range(9)], 4, 8)
    assert nothing is not None
    assert (nothing.samples, nothing.low, nothing.high) == (None, 0.0, None)
    # Without noise, one sample is enough.
    alike = noise_scale([GradientNorms(step, 2.0, 2.0) for step in range(9)], 4, 8)
    assert alike is not None
    assert (alike.samples, alike.low, alike.high) == (0.0, 0.0, 0.0)


def test_what_is_said(tmp_path: Path) -> None:
    """The last scale that the run has recorded."""
    assert noise_lines(tmp_path) == []
    ends = {"noise_scale_low": 980.2, "noise_scale": 1240.4, "noise_scale_high": 1601.0}
    rows = [{"noise_scale_low": 8.3}, {}, ends, {}]
    text = "".join(
        json.dumps({"kind": "train", "step": n, **row}) + "\n" for n, row in enumerate(rows)
    )
    (tmp_path / "metrics.jsonl").write_text(text)
    [line] = noise_lines(tmp_path)
    assert "1,240 samples (980 to 1,600)" in line
    (tmp_path / "metrics.jsonl").write_text(text.splitlines(keepends=True)[0])
    [line] = noise_lines(tmp_path)
    assert "at least 8.3 samples" in line
