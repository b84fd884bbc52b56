"""Names of files that are no UTF-8: their bytes, in every file that is written."""

import os
from itertools import product
from pathlib import Path

import pytest
from PIL import Image

from firecaffe.cli import main
from firecaffe.errors import RunError
from firecaffe.runs.run_folder import read_run_file
from tests.typed import firecaffe

CAFE, TEA = b"caf\xe9", b"th\xe9"


def test_they_stay_what_they_are_in_a_run_and_all_that_is_made_of_it(
    tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    root, folder = str(tmp_path / os.fsdecode(b"photos \xfc")), str(tmp_path / "run ß")
    for number, (part, name, place) in enumerate(product(("train", "test"), (CAFE, TEA), range(2))):
        path = Path(root, part, os.fsdecode(name), os.fsdecode(b"\xe4%d.png" % place))
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (28, 28), (20 * number, 7, 7)).save(path)
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(
        '[model]\nname = "lenet"\n[data]\nname = "folder"\nresize = 28\n'
        "[train]\nglobal_batch_size = 4\nmicro_batch_size = 2\nsteps = 2\n"
    )
    words = ["--run.tensorboard", "false"]
    train = ["train", str(recipe), *words, "--data.path", root, "--run.folder", folder]
    firecaffe(*train).check_returncode()
    assert main([*train[:-1], str(tmp_path / os.fsdecode(b"run \xdf"))]) == RunError.exit_code
    assert b"run.folder" in capfdbinary.readouterr().err
    result = read_run_file(Path(folder), "result.json")
    assert list(map(os.fsencode, result["class_names"])) == [CAFE, TEA]

    predict = ["predict", folder, f"{root}/test", "--csv"]
    assert main([*predict, str(tmp_path / "table.csv")]) == 0
    written = (tmp_path / "table.csv").read_bytes()
    assert b"/photos \xfc/test/caf\xe9/\xe41.png,caf\xe9," in written.replace(TEA, CAFE)
    capfdbinary.readouterr()
    assert main([*predict, "-"]) == 0
    assert capfdbinary.readouterr().out == written

    packed, runs = str(tmp_path / "packed"), [folder, f"{folder}-packed"]
    assert main(["pack", root, packed]) == 0
    of_packed = ["--data.name", "packed", "--data.path", packed]
    more = "--resume", folder, "--train.steps", "3"
    firecaffe(*train[:-1], f"{folder}-more", *more).check_returncode()
    firecaffe(*train[:-1], f"{folder}-packed", *of_packed).check_returncode()
    for command in (
        ["pack", "--info", packed],
        ["evaluate", folder],
        ["explain", folder],
        ["export", folder, "--to", "safetensors"],
        ["predict", f"{folder}-packed", "--csv", "-"],
        ["compare", *runs, "--allow-unequal", "--html", str(tmp_path / "page.html")],
    ):
        assert main(command) == 0, command
    assert CAFE in capfdbinary.readouterr().out
    assert recipe.with_name("page.html").read_bytes()
