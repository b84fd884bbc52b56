"""In which order files of tests are handed out, the longest first, so that none is at work when
all others are done; and by how many processes.
"""

import os
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent

LONGEST = """
ranks/test_matrix.py
cluster/test_membership.py
cli/test_compress.py
cli/test_examples.py
cli/test_plan.py
cli/test_shown_commands.py
cli/test_scripts_page.py
cli/test_functions.py
cli/test_trained_network.py
faults/test_injected_faults.py
unit/transport/test_execute.py
cli/test_launch.py
ranks/test_unusual.py
ranks/test_layouts.py
ranks/test_sharded_server.py
cli/test_what_plan_says.py
parity/test_published_scaling.py
cli/test_tune.py
ranks/test_compressors.py
faults/test_lost_under_a_launcher.py
ranks/test_local_rows.py
ranks/test_local.py
ranks/test_served.py
ranks/test_update_at.py
ranks/test_invariance.py
ranks/test_networks_of_parts.py
unit/compression/fcz/test_damage.py
ranks/test_stage_layouts.py
faults/test_fuzzed_readers.py
faults/test_trains_again.py
cli/test_ddp_script.py
ranks/test_parallelize.py
unit/training/test_rise.py
unit/test_package.py
ranks/test_lockless.py
ranks/test_constraints.py
unit/caffe/test_goldens.py
unit/caffe/test_hostile_files.py
ranks/test_measurements.py
unit/exchange/test_schedule.py
ranks/test_split_parts.py
unit/training/modes/local/test_trainings.py
unit/compression/fcz/test_round_trip.py
ranks/test_own_network.py
unit/models/test_networks.py
cli/test_numbers.py
cli/test_trust.py
cluster/test_virtual_cluster.py
cli/test_real_pythons.py
cli/test_import_caffe.py
ranks/test_other_libraries.py
ranks/test_stage_run.py
cli/test_fcz_file.py
cli/mistakes/test_bad_input.py
""".split()
"""The longest first, as `pytest -n auto` lists them at its end. Others follow by name."""

MAX_PROCESSES = 8
SHOWN = 20


def turned(arguments: list[str], process: int, processes: int) -> list[str]:
    """The files that pytest is to load, each process beginning elsewhere: all load all of them, and
    what one has compiled the others take. In a new clone, that is half of the time.
    """
    if not all(Path(each).is_dir() for each in arguments):
        return arguments
    files = sorted(str(path) for each in arguments for path in Path(each).rglob("test_*.py"))
    start = process * len(files) // processes
    return files[start:] + files[:start]


def in_order(items: list[pytest.Item]) -> list[pytest.Item]:
    """The longest files first, and others by name; those of a file stay as they are."""
    places = {FOLDER / name: place for place, name in enumerate(LONGEST)}
    return sorted(items, key=lambda item: (places.get(item.path, len(places)), item.path))


def processes() -> int:
    """Two for each core that this process may use: while some wait, others compute."""
    return min(MAX_PROCESSES, 2 * len(os.sched_getaffinity(0)))


def slowest(reports: Iterable[pytest.TestReport]) -> list[str]:
    """The files that took longest, a line each: seconds and name."""
    seconds: Counter[str] = Counter()
    for report in reports:
        seconds[report.location[0]] += report.duration  # type: ignore[assignment]
    return [f"{taken:6.0f} s  {name}" for name, taken in seconds.most_common(SHOWN)]
