"""Obtaining Fashion-MNIST: each source in turn, with stand-ins for the network and for apt."""

import dataclasses
import gzip
import hashlib
import http.client
import io
import os
import struct
from pathlib import Path

import pytest

from firecaffe.cli.data import get as data_get
from firecaffe.data import fetch
from firecaffe.data.fetch import DEBIAN, FOLDER, Mirror
from firecaffe.data.published import FILES, PUBLISHED, get
from firecaffe.errors import DataError, RecipeError

NAME = "fashion-mnist"
ADDRESS = PUBLISHED[NAME].mirrors[1]
CONTENTS = {
    name: struct.pack(">4I", 0x803, 2, 3, 3) + bytes(18)
    if num_dims == 3
    else struct.pack(">2I", 0x801, 2) + b"\0\1"
    for name, num_dims in FILES.items()
}
NAMES = list(FILES)
FAKE_APT = """#!/bin/sh
echo "apt-get $*" >> "$LOG"
case "$*" in
  *install*) mkdir -p "$INSTALLED" && cp "$PACKAGE"/* "$INSTALLED" ;;
  *Dir::State::lists=*update*) : > "$LOG.updated" ;;
  *download*) [ -z "$NO_LISTS" ] || [ -e "$LOG.updated" ] || { echo "E: no package" >&2; exit 100; }
              [ -z "$NO_PACKAGE" ] || { echo "E: Unable to locate package" >&2; exit 100; }
              echo archive > dataset-fashion-mnist_1_all.deb ;;
esac
"""
FAKE_DPKG = """#!/bin/sh
echo "dpkg $1" >> "$LOG"
mkdir -p "$3/$INSTALLED" && cp "$PACKAGE"/* "$3/$INSTALLED"
"""


def write_files(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in CONTENTS.items():
        (folder / name).write_bytes(gzip.compress(content, mtime=0))
    return folder


class Machine:
    """A machine on which nothing can be had, until a test says otherwise."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self.monkeypatch = monkeypatch
        self.destination = folder / "home" / "fashion-mnist"
        self.installed = folder / "usr" / "fashion-mnist"
        self.lines: list[str] = []
        self.online: dict[str, bytes] = {}
        self.log = folder / "log"
        (folder / "bin").mkdir()
        folder_mirror = Mirror(FOLDER, str(self.installed))
        package = Mirror(DEBIAN, "dataset-fashion-mnist", str(self.installed).lstrip("/"))
        published = dataclasses.replace(
            PUBLISHED[NAME],
            sha256=[hashlib.sha256(each).hexdigest() for each in CONTENTS.values()],
            mirrors=(folder_mirror, ADDRESS, package),
        )
        monkeypatch.setitem(PUBLISHED, NAME, published)
        monkeypatch.setattr("urllib.request.urlopen", self._urlopen)
        monkeypatch.setattr("os.geteuid", lambda: 1000)
        monkeypatch.setenv("PATH", str(folder / "bin"))

    def _urlopen(self, url: str, timeout: float) -> io.BytesIO:
        assert 0 < timeout <= 10
        if url not in self.online:
            raise OSError("Network is unreachable")
        return io.BytesIO(self.online[url])

    def put_online(self) -> None:
        for name, content in CONTENTS.items():
            self.online[ADDRESS.where + name] = gzip.compress(content, mtime=0)

    def add_apt(self, **settings: str) -> None:
        for name, script in (("apt-get", FAKE_APT), ("dpkg", FAKE_DPKG)):
            (self.folder / "bin" / name).write_text(script)
            (self.folder / "bin" / name).chmod(0o755)
        package = write_files(self.folder / "package")
        settings |= {
            "PATH": f"{self.folder / 'bin'}:/usr/bin:/bin",
            "LOG": str(self.log),
            "PACKAGE": str(package),
            "INSTALLED": str(self.installed),
        }
        for name, value in settings.items():
            self.monkeypatch.setenv(name, value)

    def get(self) -> Path:
        return get(NAME, self.destination, self.lines.append)

    def assert_complete(self) -> None:
        found = {path.name: path.read_bytes() for path in self.destination.iterdir()}
        assert {name: gzip.decompress(data) for name, data in found.items()} == CONTENTS


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(tmp_path, monkeypatch)


def test_already_there(machine: Machine) -> None:
    write_files(machine.destination)
    assert machine.get() == machine.destination
    assert machine.lines == [f"{machine.destination}: already there and complete"]


def test_from_a_package_that_is_installed(machine: Machine) -> None:
    write_files(machine.installed)
    assert machine.get() == machine.destination
    machine.assert_complete()
    assert machine.lines[0] == f"trying the folder {machine.installed}"
    assert "yes" in machine.lines[1]


def test_a_damaged_file_that_is_there_is_replaced(machine: Machine) -> None:
    write_files(machine.destination)
    (machine.destination / NAMES[2]).write_bytes(b"half")
    write_files(machine.installed)
    machine.get()
    machine.assert_complete()


def test_from_the_official_address(machine: Machine) -> None:
    machine.put_online()
    machine.get()
    machine.assert_complete()
    assert machine.lines[:2] == [
        f"trying the folder {machine.installed}",
        "  no: there is no such folder",
    ]


def test_a_changed_file_online_is_refused(machine: Machine) -> None:
    machine.put_online()
    machine.online[ADDRESS.where + NAMES[1]] = b"<html>"
    with pytest.raises(DataError, match=r"train-labels-idx1-ubyte\.gz: 6 bytes long"):
        machine.get()
    assert not machine.destination.exists()


def test_an_answer_that_breaks_off(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(url: str, timeout: float) -> io.BytesIO:
        raise http.client.IncompleteRead(b"abc", 5)

    monkeypatch.setattr("urllib.request.urlopen", broken)
    with pytest.raises(DataError, match="IncompleteRead"):
        machine.get()


def test_a_package_with_another_content_is_refused(machine: Machine) -> None:
    write_files(machine.installed)
    name = NAMES[0]
    other = bytearray(CONTENTS[name])
    other[-1] ^= 1
    (machine.installed / name).write_bytes(gzip.compress(other))
    with pytest.raises(DataError, match="content has sha256"):
        machine.get()
    assert not machine.destination.exists()


@pytest.mark.parametrize("user", [0, 1000])
def test_from_apt_nothing_is_installed(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, user: int
) -> None:
    monkeypatch.setattr("os.geteuid", lambda: user)
    machine.add_apt()
    machine.get()
    machine.assert_complete()
    assert not machine.installed.exists()
    lines = machine.log.read_text().splitlines()
    assert [line.split()[0] for line in lines] == ["apt-get", "dpkg"]
    assert " install" not in lines[0]
    assert lines[0].endswith(" download dataset-fashion-mnist")


def test_from_apt_without_package_lists(machine: Machine) -> None:
    machine.add_apt(NO_LISTS="yes")
    machine.get()
    machine.assert_complete()
    assert any("E: no package; again with fresh package lists" in line for line in machine.lines)


def test_apt_does_not_know_the_package(machine: Machine) -> None:
    machine.add_apt(NO_PACKAGE="yes")
    with pytest.raises(DataError, match=r"apt-get download .* 100: E: Unable to locate package"):
        machine.get()


def test_nothing_can_be_had(machine: Machine) -> None:
    with pytest.raises(DataError) as caught:
        machine.get()
    message = str(caught.value)
    assert "\n" not in message
    for words in (
        "fashion-mnist cannot be had",
        f"the folder {machine.installed} (there is no such folder)",
        f"{ADDRESS.where} (train-images-idx3-ubyte.gz: Network is unreachable)",
        "Debian's package dataset-fashion-mnist (there is no apt-get on this machine)",
        "apt-get install dataset-fashion-mnist",
    ):
        assert words in message
    assert [line for line in machine.lines if line.startswith("trying")] == [
        f"trying the folder {machine.installed}",
        f"trying the address {ADDRESS.where}",
        "trying Debian's package dataset-fashion-mnist",
    ]
    assert not machine.destination.exists()


def test_a_command_that_hangs(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine.add_apt()
    (machine.folder / "bin" / "apt-get").write_text("#!/bin/sh\nexec sleep 60\n")
    monkeypatch.setattr(fetch, "PROGRAM_TIMEOUT_S", 0.05)
    with pytest.raises(DataError, match=r"took more than 0\.05 s"):
        machine.get()


def test_a_destination_that_cannot_be_written(machine: Machine) -> None:
    write_files(machine.installed)
    machine.destination.parent.mkdir()
    machine.destination.write_text("a file is in the way")
    with pytest.raises(DataError, match="cannot be written") as caught:
        machine.get()
    assert str(machine.destination) in str(caught.value)


def test_interrupted_halfway_leaves_whole_files_only(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_files(machine.installed)
    real = os.replace
    calls = []

    def replace(source: Path, destination: Path) -> None:
        calls.append(destination)
        if len(calls) == 3:
            raise KeyboardInterrupt
        real(source, destination)

    monkeypatch.setattr("os.replace", replace)
    with pytest.raises(KeyboardInterrupt):
        machine.get()
    assert sorted(path.name for path in machine.destination.iterdir()) == sorted(NAMES[:2])


def test_the_command(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_files(machine.installed)
    monkeypatch.setenv("FIRECAFFE_DATA", str(machine.folder / "home"))
    assert data_get("fashion-mnist") == machine.folder / "home" / "fashion-mnist"
    machine.assert_complete()
    assert "yes: four files checked" in capsys.readouterr().out
    assert data_get("fashion-mnist", str(machine.folder / "other")) == machine.folder / "other"
    assert (machine.folder / "other" / NAMES[0]).exists()


def test_the_command_with_an_unknown_name() -> None:
    with pytest.raises(RecipeError, match=r"fetch 'fashion_mnist', .*did you mean fashion-mnist"):
        data_get("fashion_mnist")
