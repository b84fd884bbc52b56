"""Policies under random orders of events: what holds of all of them, and of each."""

import json
from functools import partial
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from firecaffe.synchrony.config import SynchronyConfig
from firecaffe.synchrony.events import Pull, Push
from firecaffe.synchrony.log import Ledger
from firecaffe.synchrony.server_policies import (
    Asynchronous,
    Backup,
    BackupAgain,
    Leaf,
    LeafQueue,
    Leaves,
    Stale,
)
from tests.unit.synchrony.drive import LEAVES, POLICIES, all_leaves, drive, pushes, updates

seeds = st.integers(0, 2**32)


@pytest.mark.parametrize("name", POLICIES)
@settings(max_examples=60)
@given(seed=seeds, faults=st.integers(0, 12))
def test_each_leaf_once_and_versions_in_order(name: str, seed: int, faults: int) -> None:
    events = drive(POLICIES[name], Random(seed).randrange, faults=faults)
    ledger = Ledger(LEAVES.first_step)
    ledger.expect(LEAVES)
    for event in events:
        ledger.take(event)  # raises for a version, a learner or a leaf that cannot be
    made = updates(events)
    applied = [work.leaf for update in made for work in update.works]
    dropped = [leaf for update in made for leaf in update.dropped]
    assert len(applied) + len(dropped) == len(all_leaves(LEAVES))
    assert {*applied, *dropped} == all_leaves(LEAVES)
    assert [update.version for update in made] == [3 + place for place in range(len(made))]
    if name != "backup":
        assert dropped == []
    if name != "backup again":
        assert not any(update.again for update in made)


@settings(max_examples=60)
@given(seed=seeds, bound=st.integers(0, 3), faults=st.integers(0, 6))
def test_nobody_begins_too_far_ahead(seed: int, bound: int, faults: int) -> None:
    """Whoever computes at step c has pulled all updates of steps before c - s."""
    make = partial(Stale, learners=4, version=2, config=SynchronyConfig(max_staleness=bound))
    missing = all_leaves(LEAVES)
    for event in drive(make, Random(seed).randrange, faults=faults):
        if isinstance(event, Pull):
            assert event.work.leaf.step - min(missing).step <= bound
        elif isinstance(event, Push) and event.update is not None:
            missing -= {work.leaf for work in event.update.works}


@settings(max_examples=60)
@given(seed=seeds, backups=st.integers(0, 2), faults=st.integers(0, 12))
def test_backup_drops_the_late_ones_for_good(seed: int, backups: int, faults: int) -> None:
    words = SynchronyConfig(backup_workers=backups)
    events = drive(lambda q: Backup(q, 3, 2, words), Random(seed).randrange, faults=faults)
    for update in updates(events):
        step = update.works[0].leaf.step
        assert {work.leaf.step for work in update.works} == {step}
        assert {update.staleness(work) for work in update.works} == {0}
        assert len(update.dropped) <= backups
        assert len(update.works) >= max(1, LEAVES.of_step(step) - backups)
    gone = {leaf for update in updates(events) for leaf in update.dropped}
    assert not any(push.counts for push in pushes(events) if push.work.leaf in gone)


@settings(max_examples=60)
@given(seed=seeds, backups=st.integers(0, 3), faults=st.integers(0, 12))
def test_backup_hands_the_late_ones_out_again(seed: int, backups: int, faults: int) -> None:
    """Each leaf is applied once, whoever brings it first in time; each update is of as many leaves,
    but the last; a gradient of another version than the weights' is never applied.
    """
    words = SynchronyConfig(backup_workers=backups)
    events = drive(lambda q: BackupAgain(q, 4, 2, words), Random(seed).randrange, faults=faults)
    made = updates(events)
    applied = [work.leaf for update in made for work in update.works]
    assert sorted(applied) == sorted(all_leaves(LEAVES))
    assert [update.version for update in made] == [3 + place for place in range(len(made))]
    size = LEAVES.per_step - backups
    assert {len(update.works) for update in made[:-1]} <= {size}
    assert 0 < len(made[-1].works) <= size
    assert {update.staleness(work) for update in made for work in update.works} == {0}
    assert all(len(update.again) <= backups for update in made)
    version = LEAVES.first_step
    for push in pushes(events):
        assert not push.counts or push.work.version == version
        version = version if push.update is None else push.update.version
    if not backups:
        assert not any(update.again for update in made)


def bring(policy: Backup, learner: int) -> None:
    policy.contribute(policy.in_flight[learner])
    policy.commit()


def test_who_is_done_a_moment_earlier_gets_no_spare_leaf() -> None:
    """Three of four learners have a leaf each of this step, the fourth has one of the last."""
    policy = Backup(LeafQueue(Leaves(0, 2, 2, 4, 8)), 4, 0, SynchronyConfig(backup_workers=1))
    for learner in range(4):
        assert policy.begin(learner) is not None
    for learner in range(3):
        bring(policy, learner)
    for learner in range(3):
        assert policy.begin(learner) is not None
    bring(policy, 1)
    assert policy.begin(1) is None
    bring(policy, 3)
    assert policy.begin(3) is not None  # it has none of this step


def test_a_straggler_s_leaf_is_made_up_for() -> None:
    """Twelve leaves, of which eleven are enough: learner 0 is not done with its first when the
    others have brought ten.
    """
    policy = Backup(LeafQueue(Leaves(0, 1, 1, 12, 12)), 4, 0, SynchronyConfig(backup_workers=1))
    for learner in range(4):
        policy.begin(learner)
    for leaf in range(10):
        bring(policy, 1 + leaf % 3)
        work = policy.begin(1 + leaf % 3)
        assert (work is not None) == (leaf < 8)
    assert policy.version == 0


def test_softsync_s_staleness_is_about_n() -> None:
    """Zhang et al. 2016: c = N / n gradients an update have a mean staleness of about n."""
    leaves = Leaves(0, 40, 40, per_step=24, per_epoch=960)
    for n in (1, 2, 4, 12):
        words = SynchronyConfig(gradients_per_update=12 // n)
        make = partial(Asynchronous, learners=12, version=0, config=words)
        made = updates(drive(make, lambda _: 0, leaves))  # who works for longest is done first
        found = [update.staleness(work) for update in made for work in update.works]
        assert sum(found) / len(found) == pytest.approx(n, abs=1.1)
        if n == 1:
            assert set(found) <= {0, 1, 2}


def test_a_lost_learner_s_leaf_goes_to_others_and_its_gradient_is_dropped() -> None:
    policy = Asynchronous(LeafQueue(LEAVES), 2, 2, SynchronyConfig())
    policy.begin(0), policy.begin(1)
    first, second = policy.in_flight[0], policy.in_flight[1]
    policy.lose(0)
    assert not policy.contribute(first)
    assert policy.commit() is None
    assert policy.contribute(second)
    policy.begin(1)
    assert policy.in_flight[1].leaf == first.leaf == Leaf(2, 0)
    with pytest.raises(ValueError, match="learner 1"):
        policy.begin(1)  # it has work


def desk(version: int, next_: list[int], *returned: list[int]) -> dict[str, object]:
    queue = {"next": next_, "returned": [*returned]}
    return {"version": version, "queue": queue, "learners": [0, 1], "in_flight": [[0, 2, 0, 2]]}


STATES: dict[str, dict[str, object]] = {
    "backup": {"desk": desk(3, [3, 0]), "step": 3, "arrived": [], "turns": []},
    "stale": {"desk": desk(3, [3, 1], [3, 0]), "pending": []},
    "softsync": {"desk": desk(2, [3, 1], [3, 0]), "pending": [[1, 2, 1, 2]]},
}
"""Of checkpoints as they were first written: all began, learner 1 pushed, learner 2 was lost."""


@pytest.mark.parametrize("name", STATES)
def test_an_earlier_checkpoint_is_read(name: str) -> None:
    policy = POLICIES[name](LeafQueue(LEAVES))
    policy.load_state_dict(STATES[name])
    found = json.loads(json.dumps(policy.state_dict()))
    assert found == {word: STATES[name][word] for word in found}
