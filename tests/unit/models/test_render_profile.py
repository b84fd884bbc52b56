"""The profile as people read it."""

import re

from rich.console import Console

from firecaffe.cli.profile import render
from firecaffe.models import build_model
from firecaffe.models.layer_costs import profile


def test_table_shows_layers_totals_and_volumes() -> None:
    console = Console(width=160)
    with console.capture() as capture:
        console.print(render(profile(build_model("lenet"), (1, 28, 28), 100)))
    text = capture.get()
    assert "batch 100 of 1x28x28" in text
    cells = {}
    for line in text.splitlines():
        row = re.split(r"\s{2,}", line.strip())
        cells[row[0]] = row[1:]
    # ip1: 800 x 500 weights and 500 biases, 0.4 MAC per image.
    assert cells["ip1"] == ["Linear", "100x500", "400,500", "1.60", "0.32", "0.20", "40.00", "0.24"]
    assert cells["pool1"] == ["MaxPool2d", "100x20x12x12", "4.61", "1.15"]
    assert cells["total"] == ["431,080", "1.72", "229.30", "1.38"]
    # D: 784 + 20 x 12 x 12 + 800 + 500 floats per image; 6 x 229.3 M operations.
    assert "|W| 1.72 MB, D 1.99 MB, D / |W| 1.2, 1.4 GFLOP per step" in text
