"""Values in a store that are believed, and those that are not."""

import pytest
from torch._C._distributed_c10d import HashStore, PrefixStore, Store
from torch.distributed.elastic.rendezvous.api import RendezvousConnectionError
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend

from firecaffe.cluster.secret import SECRET, SignedStore, StrangerError, signed
from firecaffe.errors import LaunchError

OURS, THEIRS = b"of this run alone", b"of some other run"


@pytest.fixture
def inner() -> Store:
    return HashStore()


def test_who_knows_the_secret_is_believed(inner: Store) -> None:
    store, other = SignedStore(inner, OURS), SignedStore(inner, OURS)
    below = PrefixStore("below", store)  # asks it in C++
    store.set("text", "words")
    below.set("bytes", b"\xff\x00")  # type: ignore[arg-type]
    assert other.get("text") == b"words"
    assert PrefixStore("below", other).get("bytes") == other.get("below/bytes") == b"\xff\x00"
    store.multi_set(["a", "b"], ["1", "2"])
    assert other.multi_get(["a", "b"]) == [b"1", b"2"]
    assert store.compare_set("new", "", "first") == b"first"
    assert other.compare_set("new", "no", "second") == b"first"
    assert other.compare_set("new", "first", "second") == b"second"
    assert (store.add("count", 2), other.add("count", 3)) == (2, 5)


@pytest.mark.parametrize("value", [b"plain", b"x" * 100, THEIRS])
def test_who_knows_no_secret_or_another_is_not(inner: Store, value: bytes) -> None:
    if value == THEIRS:
        SignedStore(inner, THEIRS).set("below/key", "value")
    else:
        inner.set("below/key", value)  # type: ignore[arg-type]
    store = SignedStore(inner, OURS)
    below = PrefixStore("below", store)
    for ask in (
        lambda: store.get("below/key"),
        lambda: store.multi_get(["below/key"]),
        lambda: store.compare_set("below/key", "", "mine"),
        lambda: below.get("key"),
        lambda: below.multi_get(["key"]),
    ):
        with pytest.raises(StrangerError, match="--secret-file") as told:
            ask()
        assert told.value.exit_code == LaunchError.exit_code


def test_a_value_counts_at_its_own_key_alone(inner: Store) -> None:
    store = SignedStore(inner, OURS)
    store.set("here", "value")
    inner.set("there", inner.get("here"))  # type: ignore[arg-type]
    with pytest.raises(StrangerError):
        store.get("there")


def test_torchs_rendezvous_takes_it_for_a_store_that_failed(inner: Store) -> None:
    backend = C10dRendezvousBackend(SignedStore(inner, OURS), "run")
    assert backend.get_state() is None
    state, token, is_set = backend.set_state(b"state") or (b"", None, False)
    assert (state, is_set) == (b"state", True)
    assert backend.set_state(b"next", token) is not None
    inner.set("torch.rendezvous.run", "c3RhdGU=")
    with pytest.raises(RendezvousConnectionError) as told:
        backend.get_state()
    assert isinstance(told.value.__cause__, StrangerError)


def test_without_a_secret_a_store_is_as_it_is(
    inner: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(SECRET, raising=False)
    assert signed(inner) is inner
    monkeypatch.setenv(SECRET, OURS.decode())
    signed(inner).set("key", "value")
    assert SignedStore(inner, OURS).get("key") == b"value"
