"""The end-to-end page says of its raw lines what they say, and of what is not there, nothing."""

from pathlib import Path
from typing import Any

import pytest

from benchmarks import raw_lines
from benchmarks.end_to_end_page import make_page
from benchmarks.end_to_end_recipe import ALONE, DDP, OURS, RING

STEP_S = {DDP: 0.6, ALONE: 0.1, RING: 0.6, "none": 0.625, "int8": 0.25}
"""All others take 0.15 s: four times DDP's speed."""


def block(variant: str, number: int) -> dict[str, Any]:
    steps = 10
    return {
        "kind": "block",
        "variant": variant,
        "round": number,
        "steps": steps,
        "block_s": steps * STEP_S.get(variant, 0.15) * (1 + number / 100),
        "exposed_s": 0.5,
        "sent_bytes": 58e6,
        "retransmitted_segments": number,
        "cpu_busy_share": 0.5,
        "ranks_cpu_share": 0.51,
    }


def training(variant: str, seed: int, steps: int, top1: float) -> dict[str, Any]:
    result = {"steps": steps, "top1": top1, "loss": 1.5}
    return {"kind": "accuracy", "variant": variant, "seed": seed, **result}


@pytest.fixture
def page(tmp_path: Path) -> str:
    speed, bits, accuracy = (tmp_path / name for name in ("speed", "bits", "accuracy"))
    for number in (1, 2, 3):
        for variant in (DDP, ALONE, RING, *OURS):
            raw_lines.append(speed, block(variant, number))
    for number in (0, 1, 2):
        for variant, block_s in ((DDP, 11.0), (RING, 8.8), ("none", 10.0)):
            row = {"variant": variant, "round": number, "block_s": block_s, "samples": 320}
            raw_lines.append(speed, {"kind": "apart", **row})
    results = {name: {"relative_difference": 1e-8, "cosine": 0.9} for name in (RING, *OURS)}
    raw_lines.append(speed, {"kind": "verified", "steps": 16, "results": results})
    raw_lines.append(speed, {"kind": "conditions", "hosts": 4, "commit": "0123456789ab"})
    for variant in OURS:
        weights = {"hosts": "a" * 64, "workers": ("b" if variant == "top_k" else "a") * 64}
        raw_lines.append(bits, {"kind": "same_bits", "variant": variant, "steps": 8, **weights})
    for seed in (1, 2, 3):
        raw_lines.append(accuracy, training("none", seed, 600, 0.36))
        raw_lines.append(accuracy, training("power_sgd", seed, 600, 0.30))
        raw_lines.append(accuracy, training("top_k", seed, 600, 0.32))
        raw_lines.append(accuracy, training("none", seed, 1500, 0.45))
        raw_lines.append(accuracy, training("power_sgd", seed, 1500, 0.448 + seed / 1000))
    return make_page(speed, bits, accuracy)


def test_the_longest_training_decides_who_is_fast_and_accurate(page: str) -> None:
    goal = page[page.index("## The goal") :]
    assert "images/s: float16, bfloat16, one_bit, threshold, top_k, power_sgd.\n" in goal
    assert "beyond: top_k -4.00 (-4.00 to -4.00)" in goal
    # Differences of -0.1, 0 and 0.1 points: their mean is 0, and that alone says little.
    half = 6.205347 * 0.1 / 3**0.5  # t at 1 - 0.05 / 2 / 2, two codecs, 2 degrees
    assert f"not enough seeds to say: power_sgd +0.00 (-{half:.2f} to +{half:.2f})" in goal
    assert "1.0 of DDP: with our malloc setting for both, none 0.960, none, by ring 1.000;" in goal
    assert "as torchrun starts it, none 1.100, none, by ring 1.250." in goal
    assert "Not trained for their accuracy: float16, bfloat16, int8, one_bit, threshold." in goal


def test_differences_are_to_as_many_samples_of_the_same_seed(page: str) -> None:
    assert "19,200 samples each (600 steps)" in page
    assert "48,000 samples each (1500 steps)" in page
    assert "| power_sgd | 30.00 | 30.00, 30.00, 30.00 | 0.00 | -6.00 | 0.00 |" in page
    assert "| power_sgd | 45.00 | 44.90, 45.00, 45.10 | 0.10 | +0.00 | 0.06 |" in page


def test_other_weights_on_hosts_are_not_passed_over(page: str) -> None:
    assert "**Not the same weights on hosts and on workers: top_k.**" in page


def test_shares_and_conditions(page: str) -> None:
    assert "| ddp | 52 | 612 | 1.00 | 1.00 to 1.00 | 83% | 5.80 |" in page
    assert "commit 0123456789ab" in page
    assert "50% busy (median), 0% by the kernel's work" in page
