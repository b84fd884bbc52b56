"""examples/ddp_script.py under torchrun, and scripts that end in every way."""

import re
from pathlib import Path

import pytest

from tests.typed import WHOLE_END, torchrun

SCRIPT = Path(__file__).parents[2] / "examples" / "ddp_script.py"
LOSS, WEIGHTS = r"step \d+ loss (\d+\.\d{6})", r"weights ([0-9a-f]{12})"

BEGINNING = """
import sys, threading, torch, firecaffe
import torch.distributed as dist
from torch import nn

if "own group" in sys.argv[1]:
    dist.init_process_group("gloo")
model = firecaffe.parallelize(nn.Linear(40, 40), compressor="one_bit")
for _ in range(3):
    model(torch.ones(2, 40)).sum().backward()
"""
ENDINGS = {
    "no end": "",
    "own group, no end": "",
    "destroyed": "dist.destroy_process_group()",
    "own group, destroyed": "dist.destroy_process_group()",
}


def of_ranks(pattern: str, output: str) -> dict[str, list[str]]:
    """Rank -> all that it printed of a pattern. Ranks' lines may run into each other."""
    found: dict[str, list[str]] = {}
    for rank, value in re.findall(rf"rank (\d) {pattern}", output):
        found.setdefault(rank, []).append(value)
    return found


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_the_example_ends_alike_on_all_ranks(num_ranks: int) -> None:
    done = torchrun(num_ranks, SCRIPT)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    for pattern, count in ((LOSS, 4), (WEIGHTS, 1)):
        values = of_ranks(pattern, done.stdout)
        assert sorted(values) == [str(rank) for rank in range(num_ranks)]
        assert all(value == values["0"] for value in values.values())
        assert len(values["0"]) == count
    losses = [float(loss) for loss in of_ranks(LOSS, done.stdout)["0"]]
    assert losses[-1] < 0.8 * losses[0]


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_script_may_end_as_it_likes(ending: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(f"{BEGINNING}{ENDINGS[ending]}\nprint('the end', flush=True)\n")
    done = torchrun(2, script, ending, environment={WHOLE_END: "1"})
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("the end") == 2
    for word in ("terminate", "Traceback", "Exception"):
        assert word not in done.stderr


def test_an_error_of_the_script_is_not_held_up(tmp_path: Path) -> None:
    """Rank 1 fails inside backward, between two buckets: rank 0 waits for one that never comes."""
    script = tmp_path / "script.py"
    script.write_text(
        BEGINNING.replace(
            "nn.Linear(40, 40)", "nn.Sequential(nn.Linear(40, 40), nn.Linear(40, 40))"
        ).replace('"one_bit"', '"one_bit", bucket_cap_mb=0.001')
        + """
def fail(gradient):
    if dist.get_rank() == 1:
        raise KeyError("the user's own")

list(model.parameters())[0].register_hook(fail)
model(torch.ones(2, 40)).sum().backward()
"""
    )
    done = torchrun(2, script, "", environment={WHOLE_END: "1"})
    assert done.returncode == 1
    assert 'KeyError: "the user\'s own"' in done.stderr
    assert "terminate" not in done.stderr
