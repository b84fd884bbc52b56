"""The folder of an import is whole if it has a recipe, whose file reads to the same words."""

import tomllib
from pathlib import Path
from typing import Any

import pytest

from firecaffe.errors import RunError
from firecaffe.from_caffe.write import as_toml, check_folder, write_folder

FILES = {"net.prototxt": b"net", "report.md": b"report", "recipe.toml": b"recipe"}


def test_all_files_are_written(tmp_path: Path) -> None:
    folder = tmp_path / "deep" / "out"
    write_folder(folder, FILES)
    assert {each.name: each.read_bytes() for each in folder.iterdir()} == FILES


@pytest.mark.parametrize("is_there", [False, True])
def test_there_is_no_recipe_if_a_file_cannot_be_written(tmp_path: Path, is_there: bool) -> None:
    folder = tmp_path / "out"
    if is_there:
        folder.mkdir()
        (folder / "recipe.toml").write_bytes(b"before")
        (folder / "report.md").mkdir()
    names = FILES if is_there else {"no/such/folder": b"", **FILES}
    with pytest.raises(OSError, match=r"report\.md" if is_there else r"no/such"):
        write_folder(folder, names)
    assert not list(folder.glob(".*"))
    if is_there:
        assert (folder / "recipe.toml").read_bytes() == b"before"
        assert not (folder / "net.prototxt").exists()
    else:
        assert not folder.exists()


def test_a_folder_that_is_there(tmp_path: Path) -> None:
    check_folder(tmp_path / "new", overwrite=False)
    check_folder(tmp_path, overwrite=False)  # an empty one
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match="--overwrite"):
        check_folder(tmp_path, overwrite=False)
    check_folder(tmp_path, overwrite=True)
    with pytest.raises(RunError, match="is a file"):
        check_folder(tmp_path / "file", overwrite=True)


def test_a_recipe_reads_to_the_same_words() -> None:
    sections: dict[str, dict[str, Any]] = {
        "model": {"name": 'a "b" \\ ä', "args": {"input_CHW": [1, 28, 28]}, "freeze": ["x.*"]},
        "data": {},
        "solver": {
            "base_lr": 1e-8,
            "lr_mult": {"*.bias": 2.0, "conv[[]1].weight": 0.5, "plain": 1.0},
            "stepvalue": [1, 2],
            "momentum_correction": False,
        },
    }
    written = as_toml(sections, "From x.\nBy y.")
    assert tomllib.loads(written) == {name: words for name, words in sections.items() if words}
    assert written.startswith("# From x.\n# By y.\n")
