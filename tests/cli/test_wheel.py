"""The wheel and the sdist, each in an empty environment of Python's, away from the checkout."""

import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

from firecaffe.runs.environment import source_digest

ROOT = Path(__file__).parents[2]
DEMO = "demo nin_small --train.steps 2 --train.global_batch_size 16 --train.micro_batch_size 4"
DIGEST = "from firecaffe.runs.environment import source_digest; print(source_digest())"

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with both, of the files that git knows. The wheel is built of the sdist."""
    pytest.importorskip("build")
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("dist")
    archive = source / "tree.tar"
    names = subprocess.check_output(["git", "ls-files", "-z"], cwd=ROOT)
    pack = ["tar", "--create", "--file", str(archive), "--null", "--files-from=-"]
    subprocess.run(pack, cwd=ROOT, input=names, check=True)
    subprocess.run(["tar", "--extract", "--file", str(archive)], cwd=source, check=True)
    archive.unlink()
    command = [sys.executable, "-m", "build", "--outdir", str(out), str(source)]
    subprocess.run(command, check=True)
    return out


def test_the_wheel_has_all_that_is_no_code(built: Path) -> None:
    (wheel,) = built.glob("*.whl")
    with zipfile.ZipFile(wheel) as file:
        names = set(file.namelist())
    package = ROOT / "firecaffe"
    kinds = ("*.toml", "*.jinja", "py.typed")
    data = [path for kind in kinds for path in package.rglob(kind)]
    data += (package / "recipes").glob("*.toml")
    assert len(data) > 30
    assert {path.relative_to(ROOT).as_posix() for path in data} <= names
    assert not [name for name in names if not name.startswith("firecaffe")]


def test_the_sdist_has_what_a_checkout_has(built: Path) -> None:
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as file:
        names = {name.partition("/")[2] for name in file.getnames()}
    known = subprocess.check_output(["git", "ls-files"], cwd=ROOT, text=True).split()
    assert {name for name in known if not name.startswith(".")} <= names


@pytest.mark.parametrize("kind", ["*.whl", "*.tar.gz"])
def test_it_runs_where_there_is_no_checkout(kind: str, built: Path, tmp_path: Path) -> None:
    (package,) = built.glob(kind)
    venv.create(tmp_path / "venv", with_pip=True)
    programs = tmp_path / "venv" / "bin"
    install = [str(programs / "python"), "-m", "pip", "install", "--quiet", str(package)]
    subprocess.run(install, cwd=tmp_path, check=True)
    environment = {"PATH": f"{programs}:/usr/bin:/bin", "HOME": str(tmp_path)}
    firecaffe = str(programs / "firecaffe")

    def said(*command: str) -> str:
        return subprocess.check_output(command, cwd=tmp_path, env=environment, text=True)

    assert "identical in all 2 runs" in said(firecaffe, *DEMO.split())
    assert said(firecaffe, "plan", "nin_small", "--cluster", "ethernet-1g")  # its cluster is there
    assert said(str(programs / "python"), "-c", DIGEST).strip() == source_digest()
