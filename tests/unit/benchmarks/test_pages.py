"""Pages of measurements say what their records bear, and no more."""

import re
from math import inf
from pathlib import Path
from typing import Any

import pytest

from benchmarks.compression.deep_compression_layers import THEIRS
from benchmarks.compression.deep_compression_layers import make_page as make_layers_page
from benchmarks.kit import raw_lines
from benchmarks.planner.epochs_law import page as epochs_page
from benchmarks.planner.epochs_law import read_tables
from benchmarks.training import starts
from benchmarks.training.as_typed import ROWS
from benchmarks.training.as_typed import page as as_typed_page
from benchmarks.training.end_to_end_page import make_page
from benchmarks.training.end_to_end_recipe import ALONE, DDP, OURS, RING
from benchmarks.training.identity import find_faults
from benchmarks.training.large_batch import top1_of
from benchmarks.training.large_batch_page import rule_lines, tuned_line, values
from benchmarks.training.measured_shares_page import make_page as make_shares_page
from firecaffe.planner.epochs_law import PUBLISHED
from firecaffe.runs.statistics import mean_of
from tests.kit.compared_runs import planted

ROOT = Path(__file__).parents[3]


def test_the_page_of_epochs_is_made_by_the_program_and_chooses_the_product_s_form() -> None:
    text = epochs_page()
    assert text == (ROOT / "benchmarks/results/epochs_law.md").read_text("utf-8")
    (chosen, ours) = re.findall(r"p = 1, (scatter .+?)\.(?: |$)", text, re.M)
    assert chosen == ours
    assert list(PUBLISHED["resnet50"].points) == read_tables()["resnet50"]


STARTS = {
    "ours": {"wall_s": [6.0, 8.0, 9.0], "core_s": [6.0, 8.0, 10.0]},
    "ddp": {"wall_s": [5.0, 5.0, 10.0], "core_s": [5.0, 5.0, 5.0]},
    "on": "a processor",
    "commit": "c1",
}


def test_a_page_of_starts_has_medians_of_pairs() -> None:
    page = starts.page(STARTS)
    (row,) = (line for line in page.splitlines() if line.startswith("| wall-clock"))
    assert "| 3 | 5.00 | 5.00 to 10.00 | 8.00 | 6.00 to 9.00 | 1.20 | 0.90 to 1.60 |" in row
    assert re.findall(r"(reached|missed)", page) == ["reached", "missed"]
    for part in (f"at most {starts.MOST}", "a processor, commit c1."):
        assert part in page


def as_typed_row(ranks: int, rate: str, ours_s: list[float]) -> dict[str, Any]:
    times = {"timed": 6, "ours_s": ours_s, "ddp_s": [1.0, 2.0, 4.0]}
    about = {"reason": "halving_doubling (50 µs)", "on": "a processor", "commit": f"c{ranks}"}
    return {"ranks": ranks, "rate": rate, **times, **about}


def test_a_page_has_the_rows_that_were_measured_in_order() -> None:
    record = {
        "2, one host": as_typed_row(2, "", [0.5, 1.0, 2.0]),
        "8, 100mbit": as_typed_row(8, "100mbit", [0.9, 2.2, 3.2]),
    }
    lines = as_typed_page(record).splitlines()
    rows = [line for line in lines if line.startswith("| ")][1:]
    assert rows == [
        "| 8 | 100mbit | 3 x 6 | 2.000 | 2.200 | 0.90 | 0.80 to 1.10 | `halving_doubling` |",
        "| 1, 2 ranks | - | 3 x 6 | 2.000 | 1.000 | 0.50 | 0.50 to 0.50 | `halving_doubling` |",
    ]
    assert "- 8, 100mbit: halving_doubling (50 µs)" in lines
    assert lines[-1] == "a processor, commit c8; a processor, commit c2."
    assert len({row.name for row in ROWS}) == len(ROWS) == 10  # those that were promised


def layers_record(kept: float = 0.1, network: str = "lenet_300_100") -> dict[str, Any]:
    """Of each layer a share is kept, in 4 bits for where and 2 for which."""
    rows = [
        {"name": f"{name}.weight", "size": layer.weights, "kept_share": kept}
        | {"bytes": 0.08 * layer.weights, "mask_bytes": kept * 4 / 8 * layer.weights}
        | {"symbol_bytes": kept * 2 / 8 * layer.weights}
        for name, layer in THEIRS.get(network, {}).items()
    ]
    return {"network": network, "scheme": "mine", "target": None, "ratio": 50.0, "tensors": rows}


def test_layers_stand_beside_theirs_in_bits_of_a_kept_weight() -> None:
    page = make_layers_page([layers_record(0.05), layers_record(0.15)])
    assert "of 2 seeds, 50.0x in all" in " ".join(page.split())
    assert "| ip1 | 235,200 | 8% | 10.0% | 4.4 | 2.0 | 3.7 | 4.0 | 2.32% | 2.00% |" in page
    assert make_layers_page([layers_record(network="nin_small")]) == ""  # which is not theirs


def test_their_shares_are_what_their_bits_come_to() -> None:
    """With the values themselves, of 32 bits: so that no figure is typed wrongly. What is left are
    weights that are kept for distances too long for their bits.
    """
    for layer in (layer for network in THEIRS.values() for layer in network.values()):
        bits = layer.weights * layer.kept * (layer.bits + layer.index_bits)
        bits += 32 * 2**layer.book_bits
        assert bits / 32 / layer.weights == pytest.approx(layer.share, rel=0.15)


STEP_S = {DDP: 0.6, ALONE: 0.1, RING: 0.6, "none": 0.625, "int8": 0.25}
"""All others take 0.15 s: four times DDP's speed."""


def block(variant: str, number: int) -> dict[str, Any]:
    block_s = 10 * STEP_S.get(variant, 0.15) * (1 + number / 100)
    row = {"kind": "block", "variant": variant, "round": number, "steps": 10, "block_s": block_s}
    shares = {"exposed_s": 0.5, "cpu_busy_share": 0.5, "ranks_cpu_share": 0.51}
    return {**row, **shares, "sent_bytes": 58e6, "retransmitted_segments": number}


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
    for variant, steps, top1, step in (
        ("none", 600, 0.36, 0.0),
        ("power_sgd", 600, 0.30, 0.0),
        ("top_k", 600, 0.32, 0.0),
        ("none", 1500, 0.45, 0.0),
        ("power_sgd", 1500, 0.448, 0.001),
    ):
        for seed in (1, 2, 3):
            raw_lines.append(accuracy, training(variant, seed, steps, top1 + step * seed))
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
    for part in (
        "19,200 samples each (600 steps)",
        "48,000 samples each (1500 steps)",
        "| power_sgd | 30.00 | 30.00, 30.00, 30.00 | 0.00 | -6.00 | 0.00 |",
        "| power_sgd | 45.00 | 44.90, 45.00, 45.10 | 0.10 | +0.00 | 0.06 |",
        "**Not the same weights on hosts and on workers: top_k.**",
        "| ddp | 52 | 612 | 1.00 | 1.00 to 1.00 | 83% | 5.80 |",
        "commit 0123456789ab",
        "50% busy (median), 0% by the kernel's work",
    ):
        assert part in page


def test_values_that_stand_for_a_mean_and_its_interval() -> None:
    found = mean_of(values({"mean": 0.8605, "half": 0.0069, "n": 3}))
    assert (found.value, found.half) == pytest.approx((0.8605, 0.0069))
    assert values({"values": [0.1, 0.9]}) == [0.1, 0.9]


def rule_row(rule: str, top1s: list[float]) -> dict[str, object]:
    words = {"rate": 0.01, "batch": 512, "rule": rule, "initial_lr": 0.01, "steps": 236}
    failed = sum(top1 < 0.2 for top1 in top1s)
    return {**words, "failed": failed, "top1": {"values": top1s}}


def test_rows() -> None:
    rows = [
        rule_row("as it is", [0.860, 0.861, 0.862]),
        rule_row("linear", [0.100, 0.877, 0.878]),
        rule_row("unscaled", [0.810, 0.812, 0.811]),
        rule_row("square root", [0.855, 0.869, 0.862]),
        rule_row("as good", [0.861, 0.8612, 0.8608]),
    ]
    _, failed, worse, noisy, good = rule_lines(rows)
    assert "median 87.70 % (10.00, 87.70, 87.80)" in failed
    assert failed.endswith("|  | failed: 1 of 3 seeds |")
    assert worse.endswith("different |")
    assert "not enough runs to say (about" in noisy
    assert "equivalent" not in "".join((failed, worse, noisy))
    alone = rule_lines([rows[0], rows[4]])[1]
    assert alone.endswith("equivalent |")
    assert "not enough" in good  # four rows together bear less than one


def test_a_search_is_kept_only_by_its_whole_interval() -> None:
    search = {
        "network": "lenet",
        "data": "Fashion-MNIST",
        "batch_before": 32,
        "batch": 256,
        "best": {"rule": "linear", "base_lr": 0.08, "warmup_share": 0.15},
        "searched": [{"steps": 940, "again": [0.9]}, {"steps": 470, "again": []}],
        "before": {"mean": 0.9042, "half": 0.0023, "n": 3},
        "after": {"mean": 0.9021, "half": 0.0014, "n": 3},
    }
    line = tuned_line(search)  # its mean is within the band of 0.3 points
    assert "**not enough seeds**" in line
    assert "| 2.5 |" in line
    kept = tuned_line({**search, "after": {"mean": 0.9050, "half": 0.0014, "n": 3}})
    assert "**kept** |" in kept


def test_runs_of_other_code_are_no_record(tmp_path: Path) -> None:
    runs = [planted(tmp_path / source, environment__source=source) for source in ("a", "b")]
    with pytest.raises(SystemExit, match="the code"):
        top1_of(runs)
    assert top1_of(runs[:1]) == {"values": [0.9]}


CONDITIONS = {
    "kind": "conditions", "cores": 2, "cpu": "a processor", "torch": "2.13.0", "commit": "abc",
    "processors": "[0.4, 0.2]", "rate_bits_per_s": 200_000_000,
}  # fmt: skip


def test_rates_are_paired_by_round_and_waits_are_told_of_the_first(tmp_path: Path) -> None:
    speed, exchange = tmp_path / "speed", tmp_path / "exchange"
    for path in (speed, exchange):
        raw_lines.append(path, CONDITIONS)
    order = [("equal", 100.0), ("measured", 160.0), ("measured", 180.0), ("equal", 120.0)]
    for shares, rate in order:
        run = {"shares": shares, "images_per_s": rate, "num_leaves": 8}
        run |= {"micro_batches_by_rank": [5, 3], "state_sha256": "0123456789abcdef"}
        raw_lines.append(speed, {"kind": "run", **run})
    for variant, exposed_s, sent in (("equal, tree", 0.4, 2e6), ("odd, fold", 0.44, 3e6)):
        step = {"variant": variant, "exposed_s": exposed_s, "sent_bytes": sent}
        raw_lines.append(exchange, {"kind": "step", **step})
    page = make_shares_page(speed, exchange)
    for part in (
        "| equal | 2 | 110.0 | 100.0 - 120.0 |",
        "| measured / equal | 2 | 1.55 | 1.50 - 1.60 |",
        "came to 5, 3 micro-batches",
        "| odd, fold | 1 | 440 | 440 - 440 | 1.10 | 3.0 |",
        "All 4 runs",
    ):
        assert part in page


def test_lines_by_their_values_and_conditions_once(tmp_path: Path) -> None:
    path = tmp_path / "new" / "raw.jsonl"
    assert raw_lines.read(path, "conditions") == []
    raw_lines.begin(path)
    rows = [{"kind": "final", "row": row, "seed": seed} for row in "ab" for seed in (1, 2)]
    for line in rows:
        raw_lines.append(path, line)
    raw_lines.append(path, {"kind": "search", "row": "a", "seed": 2})
    raw_lines.begin(path)
    (conditions,) = raw_lines.read(path, "conditions")
    assert conditions.keys() == {"kind", "cpu", "commit", "torch"}
    assert raw_lines.read(path, "final") == rows
    assert raw_lines.read(path, "final", seed=2) == [rows[1], rows[3]]
    assert raw_lines.read(path, "final", row="a", seed=2) == [rows[1]]
    assert not raw_lines.read(path, "final", rate=0.1)


def test_the_best_rate_is_the_row_s_own(tmp_path: Path) -> None:
    """A loss that diverged is infinite; of two that are equal, the lower rate is taken."""
    path = tmp_path / "raw.jsonl"
    losses = {"a": {0.1: 0.7, 0.3: inf, 0.2: 0.5, 0.05: 0.5}, "b": {0.4: 0.1}}
    for row, by_rate in losses.items():
        for rate, loss in by_rate.items():
            raw_lines.append(path, {"kind": "search", "row": row, "rate": rate, "loss": loss})
    raw_lines.append(path, {"kind": "final", "row": "a", "rate": 0.6, "loss": 0.0})
    assert raw_lines.best_rate(path, "a") == 0.05
    assert raw_lines.best_rate(path, "b") == 0.4


SAME = "identical: 1, 2, 3, 4 workers; weights aa"


def test_rows_of_one_network_must_agree_but_for_codecs_and_controls() -> None:
    verdicts = {
        ("nin",): SAME,
        ("nin", "--exchange.algorithm=tree"): SAME,
        ("nin", "--exchange.compressor=int8"): "identical: 1, 2, 3, 4 workers; weights bb",
        ("nin", "--exchange.algorithm=ring"): "1 and 3 workers differ from step 1 on",
        ("lenet",): "identical: 1, 2, 3, 4 workers; weights cc",
    }
    assert find_faults(verdicts) == []
    other = verdicts | {("nin", "--exchange.algorithm=tree"): SAME.replace("aa", "dd")}
    assert [fault.split(":")[0] for fault in find_faults(other)] == [
        "nin --exchange.algorithm=tree"
    ]
    differs = verdicts | {("nin", "--exchange.compressor=int8"): "1 and 2 workers differ"}
    assert len(find_faults(differs)) == 1
