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
ranks/test_local_rows.py
cluster/test_membership.py
cli/test_compress.py
ranks/test_layouts.py
ranks/test_beside_split.py
ranks/test_local.py
cli/test_launch.py
cli/test_examples.py
ranks/test_update_at.py
cluster/test_cut_off.py
ranks/test_real_clock.py
ranks/test_sharded_server.py
cli/test_plan.py
cli/test_use_a_run.py
ranks/test_compressors.py
cli/test_shown_commands.py
cli/test_tune.py
ranks/test_constraints.py
faults/test_injected_faults.py
cli/test_import_path.py
ranks/test_adapters.py
cli/test_ddp_script.py
ranks/test_measured_shares.py
ranks/test_row_shares.py
ranks/test_stage_layouts.py
faults/test_lost_in_a_layout.py
ranks/test_fresh.py
cluster/test_virtual_cluster.py
cli/test_import_caffe.py
ranks/test_lockless.py
cli/test_scripts_page.py
faults/test_own_script.py
faults/test_lost_under_a_launcher.py
faults/test_trains_again.py
ranks/test_layout_forecast.py
ranks/test_auto_layout.py
ranks/test_photos.py
unit/training/test_data_workers.py
ranks/test_other_libraries.py
ranks/test_invariance.py
faults/test_full_disk.py
ranks/test_traffic.py
ranks/test_parallelize.py
ranks/test_split.py
ranks/test_own_data.py
ranks/test_planned_split.py
cli/test_launch_function.py
cli/test_own_network.py
unit/compression/fcz/test_damage.py
""".split()
"""The longest first, as `pytest -n auto` lists them at its end. Others follow in pytest's order."""

MOST_PROCESSES = 8
SHOWN = 20


def in_order(items: list[pytest.Item]) -> list[pytest.Item]:
    places = {FOLDER / name: place for place, name in enumerate(LONGEST)}
    return sorted(items, key=lambda item: places.get(item.path, len(places)))


def processes() -> int:
    """Two for each core that this process may use: while some wait, others compute."""
    return min(MOST_PROCESSES, 2 * len(os.sched_getaffinity(0)))


def slowest(reports: Iterable[pytest.TestReport]) -> list[str]:
    """The files that took longest, a line each: seconds and name."""
    seconds: Counter[str] = Counter()
    for report in reports:
        seconds[report.location[0]] += report.duration  # type: ignore[assignment]
    return [f"{taken:6.0f} s  {name}" for name, taken in seconds.most_common(SHOWN)]
