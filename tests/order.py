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
cli/test_compress.py
cluster/test_membership.py
cluster/test_cut_off.py
ranks/test_beside_split.py
ranks/test_local_rows.py
ranks/test_layouts.py
cli/test_examples.py
ranks/test_local.py
cli/test_launch.py
ranks/test_update_at.py
ranks/test_compressors.py
ranks/test_sharded_server.py
faults/test_injected_faults.py
faults/test_nothing_leaks.py
faults/test_lost_under_a_launcher.py
faults/test_a_worker_comes.py
faults/test_own_script.py
cli/test_launch_function.py
ranks/test_local_script.py
ranks/test_state.py
ranks/test_split.py
cli/test_report.py
faults/test_lost_worker.py
faults/test_not_finite.py
cluster/test_virtual_cluster.py
cli/test_ddp_script.py
ranks/test_real_clock.py
ranks/test_stage_layouts.py
cli/test_plan.py
ranks/test_fresh.py
cli/test_import_caffe.py
ranks/test_lockless.py
cli/test_scripts_page.py
ranks/test_constraints.py
cli/test_tune.py
cli/test_shown_commands.py
ranks/test_invariance.py
ranks/test_traffic.py
ranks/test_parallelize.py
cli/test_use_a_run.py
ranks/test_planned_split.py
unit/compression/fcz/test_damage.py
unit/transport/test_execute.py
unit/tasks/test_metrics.py
unit/training/test_rise.py
unit/caffe/test_golden_solvers.py
unit/gradients/compressors/test_invariance.py
ranks/test_stage_run.py
unit/test_package.py
parity/test_published_scaling.py
unit/training/served/test_trainings.py
cli/test_numbers.py
faults/test_ranks_that_differ.py
unit/gradients/compressors/test_feedback.py
unit/tuning/test_tune.py
unit/caffe/test_export.py
faults/test_lost_local_rank.py
parity/test_compressed_loop.py
ranks/test_shared_memory.py
cli/test_bench.py
""".split()
"""The longest first, as `pytest -n auto` lists them at its end. Others follow in pytest's order."""

MOST_PROCESSES = 8
SHOWN = 20


def in_order(items: list[pytest.Item]) -> list[pytest.Item]:
    places = {FOLDER / name: place for place, name in enumerate(LONGEST)}
    return sorted(items, key=lambda item: places.get(item.path, len(places)))


def processes() -> int:
    """Three for each core that this process may use: tests wait more than they compute."""
    return min(MOST_PROCESSES, 3 * len(os.sched_getaffinity(0)))


def slowest(reports: Iterable[pytest.TestReport]) -> list[str]:
    """The files that took longest, a line each: seconds and name."""
    seconds: Counter[str] = Counter()
    for report in reports:
        seconds[report.location[0]] += report.duration  # type: ignore[assignment]
    return [f"{taken:6.0f} s  {name}" for name, taken in seconds.most_common(SHOWN)]
