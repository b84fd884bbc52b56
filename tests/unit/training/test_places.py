"""Where a rank records: in rank 0's folder if it sees that, else in one of its own host."""

import json
import re
from itertools import count
from pathlib import Path

import pytest
import torch
from torch._C._distributed_c10d import HashStore

from firecaffe.cluster.world import FOLDER, World
from firecaffe.errors import RunError
from firecaffe.runs.run_folder import (
    APART,
    ENVIRONMENT,
    MARK,
    RunConfig,
    apart_mark,
    elsewhere,
    mark_of,
)
from firecaffe.training import start
from firecaffe.training.run_facts import Places, find_places
from tests.kit.training import ALONE
from tests.kit.training_fixtures import Patch


def find(folder: str, first: Path, steps: int = 0) -> Places:
    return find_places(ALONE, RunConfig(folder), first, "a run", steps)


def folder_of(run: str, path: Path, **facts: object) -> Path:
    path.mkdir(parents=True)
    (path / ENVIRONMENT).write_text(json.dumps({MARK: run, **facts}))
    return path


@pytest.mark.parametrize("named", ["", "own"])
def test_who_does_not_see_rank_0s_folder_makes_one(
    tmp_path: Path, monkeypatch: Patch, named: str
) -> None:
    monkeypatch.chdir(tmp_path)
    # There may be a folder of that name here, of another run.
    first = folder_of("an earlier run", tmp_path / "there" / "name")
    seen = find("another", folder_of("a run", tmp_path / "seen"))
    assert (seen.own, seen.is_apart, seen.notes("a host")) == (tmp_path / "seen", False, [])
    places = find(named, first)
    assert places.own == tmp_path / (named or "runs/name")
    assert places.is_apart
    assert mark_of(places.own) == apart_mark("a run")
    assert (places.own / "timings").is_dir()
    (line,) = places.notes("node-a")
    for words in (f"{first}/checkpoints on node-a alone", str(places.own), ALONE.host):
        assert words in line


def test_a_next_attempt_goes_on_in_it(tmp_path: Path) -> None:
    """Rank 0's has the same path on its host, as it mostly has."""
    own = tmp_path / "own"
    find(str(own), own)
    rows = own / "timings" / "rank-1.jsonl"
    rows.write_text('{"step": 1}\n{"step": 2}\n{"step": 3}\n')
    assert find(str(own), own, 2).is_apart
    assert rows.read_text() == '{"step": 1}\n{"step": 2}\n'


def test_no_other_run_s_folder_is_written_into(tmp_path: Path) -> None:
    own = folder_of("an earlier run", tmp_path / "own")
    with pytest.raises(RunError, match=f"{re.escape(str(own))} exists already on .*two runs never"):
        find(str(own), tmp_path / "nowhere")
    assert [path.name for path in own.iterdir()] == [ENVIRONMENT]
    (tmp_path / "file").touch()
    with pytest.raises(RunError, match=r"file/own on .*: Not a directory"):
        find(str(tmp_path / "file/own"), tmp_path / "x")


def test_rank_0_without_the_folder_does_not_begin_anew(tmp_path: Path, monkeypatch: Patch) -> None:
    """As on another host after a restart; a folder of its own there may have the same path."""
    store = HashStore()
    store.set(f"{FOLDER}/0", str(tmp_path))
    world = World(0, 1, torch.device("cpu"), store=store)
    monkeypatch.setattr(start, "_calls", count())
    with pytest.raises(RunError, match=r"is not on .*, on which rank 0 is now") as said:
        start.find_start(world, str(tmp_path / "an earlier run"))
    assert "\n" not in str(said.value)
    (tmp_path / "checkpoints").mkdir()
    monkeypatch.setattr(start, "_calls", count())
    assert start.find_start(world, None).folder == tmp_path


def test_a_line_names_few_of_many_hosts() -> None:
    apart = {rank: (f"node-{rank // 2}", "/runs/a") for rank in range(2, 200)}
    (line,) = Places(Path("/runs/a"), Path("/runs/a"), apart=apart).notes("node-0")
    assert "node-1 keeps the timings of rank 2, 3 in /runs/a" in line
    assert line.endswith("95 others in theirs")


def test_where_other_timings_are(tmp_path: Path) -> None:
    apart = {"1": ["node-b", "/b/run"], "2": ["node-b", "/b/run"], "3": ["node-c", "/c/run"]}
    run = folder_of("a run", tmp_path / "run", **{APART: apart})
    b, c = elsewhere(run, [0])
    assert "rank 1, 2 are on node-b in /b/run/timings" in b
    assert "rank 3 are on node-c" in c
    assert elsewhere(run, [0, 1, 2, 3]) == []
    assert elsewhere(tmp_path, [0]) == []
