"""Which ranks share a host."""

import pytest

from firecaffe.script.script_exchange import host_key, ranks_per_host


def test_ranks_of_a_host_stand_together() -> None:
    assert ranks_per_host(["a", "a", "b", "b"]) == [2, 2]
    assert ranks_per_host(["a", "b", "b"]) == [1, 2]
    assert ranks_per_host(["a", "b", "a"]) == [1, 1, 1]


def test_a_host_is_also_what_the_launcher_says(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = []
    for rank, local_rank in ((0, 0), (1, 1), (2, 0)):
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("LOCAL_RANK", str(local_rank))
        keys.append(host_key())
    assert ranks_per_host(keys) == [2, 1]
    monkeypatch.delenv("LOCAL_RANK")
    assert ranks_per_host([host_key(), keys[0]]) == [1, 1]
