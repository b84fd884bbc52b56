"""A finished run is used: evaluated, asked for predictions, exported."""

import csv
import json
import shutil
import sys
from math import log
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

import firecaffe
from firecaffe.cli import main
from firecaffe.errors import DataError
from tests.cli.commands import Capture, evaluated, refused, shown
from tests.kit.training import record_of
from tests.ranks.networks import Everything, small_data
from tests.world import Ranks

NETWORK = f"{Path(__file__).parents[1] / 'ranks' / 'networks.py'}:Everything"
COLORS = {"blue": (40, 60, 220), "red": (220, 60, 40)}

NORMALIZED = """
from torch import nn
def network(num_classes, in_channels):
    return nn.Sequential(
        nn.Conv2d(in_channels, 4, 3, 2), nn.BatchNorm2d(4), nn.ReLU(), nn.AdaptiveAvgPool2d(2),
        nn.Flatten(), nn.Linear(16, num_classes),
    )
"""
TRUST = "--trust-code"


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of PNGs of two classes, which color tells."""
    home = tmp_path_factory.mktemp("photos")
    for part, count in (("train", 12), ("test", 5)):
        for name, (red, green, blue) in COLORS.items():
            folder = home / part / name
            folder.mkdir(parents=True)
            for number in range(count):
                color = (red, green + 7 * number, blue)
                Image.new("RGB", (20 + number, 24), color).save(folder / f"{number}.png")
    return home


@pytest.fixture(scope="module")
def run(photos: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on the photos, with normalization and a moving average."""
    folder = tmp_path_factory.mktemp("runs")
    (folder / "own.py").write_text(NORMALIZED)
    data = {"resize": 18, "crop": 16, "mean": [0.5], "std": [0.25]}
    recipe = firecaffe.Recipe(
        model=firecaffe.ModelConfig(f"{folder}/own.py:network"),
        data=firecaffe.DataConfig("folder", str(photos), **data),  # type: ignore[arg-type]
        train=firecaffe.TrainConfig(8, 4, steps=3, ema_decay=0.5, eval_batch_size=4, device="cpu"),
        run=firecaffe.RunConfig(str(folder / "run"), tensorboard=False),
    )
    return firecaffe.train(recipe).folder


def rows_of(table: str) -> list[dict[str, str]]:
    return list(csv.DictReader(table.splitlines()))


def draw(home: Path, **color_of: str) -> Path:
    """A folder of one training and one test photo of each class."""
    for part in ("train", "test"):
        for name, color in color_of.items():
            (home / part / name).mkdir(parents=True)
            Image.new("RGB", (20, 24), COLORS[color]).save(home / part / name / "1.png")
    return home


def test_evaluate_gives_the_numbers_of_the_run_itself(
    run: Path, capsys: Capture, ranks: Ranks
) -> None:
    record = record_of(run)
    for path in (run, run / "checkpoints" / "step-00000003"):
        row = evaluated(capsys, path, TRUST)
        assert (row["evaluated"], row["step"], row["metrics"]) == ("ema", 3, ["top1"])
        assert (row["top1"], row["loss"]) == (record["top1"], record["test_loss"])
        assert row["samples"] == record["test_samples"]
    on_two = ranks.shared(2, evaluate_in_rank, str(run))[0]
    assert (on_two["loss"], on_two["top1"]) == (record["test_loss"], record["top1"])
    text = shown(capsys, "evaluate", run, TRUST)
    assert "at step 3" in text
    assert "10 samples" in text


def evaluate_in_rank(run: str) -> dict[str, float]:
    from firecaffe.cluster.world import join
    from firecaffe.recipe.recorded_recipe import recipe_of
    from firecaffe.training.evaluate_run import evaluate_run

    with join("cpu") as world:
        return evaluate_run(Path(run), recipe_of(Path(run), trust_code=True), world).evaluation.row


def test_other_data_have_the_classes_of_the_run_by_name(
    run: Path, tmp_path: Path, capsys: Capture
) -> None:
    both, one = draw(tmp_path / "both", blue="blue", red="red"), draw(tmp_path / "one", red="red")
    (row,) = rows_of(shown(capsys, "predict", run, TRUST, one / "test", "--csv", "-", "--top", "2"))
    place = 1 + (row["class_1"] != "red")
    of_one = evaluated(capsys, run, TRUST, "--data.path", one)
    # Red is number 0 of that folder, and 1 of the run.
    assert of_one["loss"] == pytest.approx(-log(float(row[f"probability_{place}"])), abs=1e-5)
    assert of_one["top1"] == float(place == 1)
    assert (of_one["samples"], of_one["largest_class_share"]) == (1, 1)
    # The same weights, whose outputs are called the other way round.
    renamed = shutil.copytree(run, tmp_path / "run")
    about = json.loads((renamed / "about.json").read_text())
    (renamed / "about.json").write_text(json.dumps({**about, "class_names": ["red", "blue"]}))
    assert (
        sum(evaluated(capsys, each, TRUST, "--data.path", both)["top1"] for each in (run, renamed))
        == 1
    )


def test_a_test_part_alone_is_evaluated(
    run: Path, photos: Path, tmp_path: Path, capsys: Capture
) -> None:
    record = record_of(run)
    home, packed = tmp_path / "home", tmp_path / "packed"
    home.mkdir()
    (home / "test").symlink_to(photos / "test")
    shown(capsys, "pack", home, packed)
    for name, path in (("folder", home), ("packed", packed)):
        words = ("--data.name", name, "--data.path", path, "--data.hold_out", "0.01")
        row = evaluated(capsys, run, TRUST, *words)
        # Packed samples have another order.
        assert row["loss"] == pytest.approx(record["test_loss"], rel=1e-6)
        assert row["samples"] == record["test_samples"]
        assert len(shown(capsys, "predict", run, TRUST, *words).splitlines()) == row["samples"]
    (home / "test").rename(home / "other")
    assert str(home) in refused(capsys, 3, "evaluate", run, TRUST, "--data.path", home)


def test_classes_that_the_run_does_not_know_are_refused(
    run: Path, tmp_path: Path, capsys: Capture
) -> None:
    (tmp_path / "three.py").write_text(
        "import torch\n"
        "def three():\n"
        "    part = torch.zeros(3, 3, 18, 18, dtype=torch.uint8), torch.arange(3)\n"
        "    return part, part\n"
    )
    green = draw(tmp_path, blue="blue", green="red")
    assert "'green'" in refused(capsys, 3, "evaluate", run, TRUST, "--data.path", green)
    three = f"{tmp_path}/three.py:three"
    assert "3 classes" in refused(capsys, 3, "evaluate", run, TRUST, "--data.name", three)


OWN = """
from tests.ranks.networks import Everything, small_data
import firecaffe, torch
def data():
    return small_data(16), small_data(8, 1)
def task():
    return firecaffe.Task(torch.nn.functional.cross_entropy)
"""


def test_all_that_was_given_in_python_is_asked_for_in_one_line(
    tmp_path: Path, capsys: Capture
) -> None:
    recipe = firecaffe.Recipe(
        train=firecaffe.TrainConfig(8, 4, steps=1, device="cpu"),
        run=firecaffe.RunConfig(str(tmp_path / "run"), tensorboard=False),
    )
    loss = torch.nn.functional.cross_entropy
    run = firecaffe.train(recipe, Everything, small_data(16), small_data(8, 1), loss=loss).folder
    source = tmp_path / "named.py"
    source.write_text(OWN)
    model, data, task = names = {
        "--model.name": f"{source}:Everything",
        "--data.name": f"{source}:data",
        "--task.name": f"{source}:task",
    }
    image = str(draw(tmp_path / "photos", red="red") / "test")
    for command, words, needed in (
        ("evaluate", [], [model, data, task]),
        ("evaluate", ["--nproc-per-node", "2"], [model, data, task]),
        ("predict", [], [model, data]),
        ("predict", [image], [model]),
        ("export", ["--to", "safetensors"], [model]),
    ):
        line = refused(capsys, 2, command, run, *words)
        assert [name for name in names if name in line] == needed
        if needed[1:]:
            line = refused(capsys, 2, command, run, *words, model, names[model])
            assert [name for name in names if name in line] == needed[1:]
    row = evaluated(capsys, run, *(word for pair in names.items() for word in pair))
    assert row["loss"] == record_of(run)["test_loss"]


def test_predict_sees_images_as_the_evaluation_does(
    run: Path, photos: Path, tmp_path: Path, capsys: Capture
) -> None:
    table = tmp_path / "table.csv"
    shown(capsys, "predict", run, TRUST, photos / "test", "--csv", table, "--top", "2")
    rows = rows_of(table.read_text())
    columns = ["class_1", "probability_1", "class_2", "probability_2"]
    assert list(rows[0]) == ["sample", *columns]
    assert [row["sample"] for row in rows] == [
        str(photos / "test" / name / f"{number}.png") for name in COLORS for number in range(5)
    ]
    right = [Path(row["sample"]).parent.name == row["class_1"] for row in rows]
    assert sum(right) / len(right) == record_of(run)["top1"]
    # The same batches of the same bits as the evaluation's.
    from_data = rows_of(shown(capsys, "predict", run, TRUST, "--csv", "-"))
    assert [[row[name] for name in columns] for row in from_data] == [
        [row[name] for name in columns] for row in rows
    ]


def test_images_that_cannot_be_read_are_named_and_the_others_predicted(
    run: Path, photos: Path, tmp_path: Path, capsys: Capture
) -> None:
    image = (photos / "test" / "red" / "1.png").read_bytes()
    (tmp_path / "half.png").write_bytes(image[:50])
    (tmp_path / "whole.png").write_bytes(image)
    capsys.readouterr()
    assert main(["predict", str(run), TRUST, str(tmp_path)]) == 3
    out, err = capsys.readouterr()
    assert "whole.png" in out
    assert "half.png" in err.splitlines()[0]
    assert "1 of 2" in err.splitlines()[1]
    # In Python, images that all fail are an error.
    (tmp_path / "whole.png").write_bytes(b"no image")
    with pytest.raises(DataError, match=r"half\.png.*1 more"):
        firecaffe.predict(run, tmp_path, trust_code=True)


def test_files_that_are_no_images_are_said(
    run: Path, photos: Path, tmp_path: Path, capsys: Capture
) -> None:
    shutil.copy(photos / "test" / "red" / "1.png", tmp_path / "a.png")
    for name in ("b.heic", "c.HEIC", "d.txt", ".hidden"):
        (tmp_path / name).write_text("words, and no image at all")
    capsys.readouterr()
    assert main(["predict", str(run), TRUST, str(tmp_path), "--csv", "-"]) == 0
    out, err = capsys.readouterr()
    assert len(out.splitlines()) == 2
    assert all(part in err for part in (str(tmp_path), "3 files", "2 .heic", "1 .txt"))
    assert main(["predict", str(run), TRUST, str(tmp_path / "d.txt")]) == 3
    line = capsys.readouterr().err.splitlines()[0]
    assert all(part in line for part in ("d.txt", "no image", "JPEG", "BMP"))


def test_export_writes_what_other_programs_read(run: Path, tmp_path: Path, capsys: Capture) -> None:
    network = firecaffe.load(run, trust_code=True)
    text = shown(
        capsys, "export", run, TRUST, "--to", "safetensors", "--out", tmp_path / "a.safetensors"
    )
    assert "moving average of step 3" in text
    assert "softmax" not in text
    weights = load_file(tmp_path / "a.safetensors")
    assert weights.keys() == network.state_dict().keys()
    assert all(torch.equal(weights[name], each) for name, each in network.state_dict().items())
    assert "outputs.softmax(1)" in shown(capsys, "export", run, TRUST, "--to", "torch_export")
    images = torch.randn(3, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    exported = torch.export.load(run / "model.pt2").module()
    with torch.no_grad():
        assert torch.allclose(exported(images), network(images), rtol=1e-3, atol=1e-4)
    assert "--overwrite" in refused(capsys, 8, "export", run, TRUST, "--to", "torch_export")


def test_an_onnx_file_is_held_against_onnxruntime(
    run: Path, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    path = tmp_path / "net.onnx"
    command = ["export", str(run), TRUST, "--to", "onnx", "--out", str(path)]
    assert "onnxruntime" in shown(capsys, *command)
    session = runtime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    images = torch.randn(5, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    (outputs,) = session.run(["outputs"], {"inputs": images.numpy()})
    with torch.no_grad():
        expected = firecaffe.load(run, trust_code=True)(images)
    assert torch.allclose(torch.from_numpy(outputs), expected, rtol=1e-3, atol=1e-4)
    # A runtime that comes to something else: the file that was there stays, and no other is left.
    before = path.read_bytes()
    right = runtime.InferenceSession.run
    wrong = lambda self, *words: [1.1 * right(self, *words)[0]]  # noqa: E731
    monkeypatch.setattr(runtime.InferenceSession, "run", wrong)
    capsys.readouterr()
    assert main([*command, "--overwrite"]) == 7
    assert "net.onnx" in capsys.readouterr().err
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    assert "firecaffe[onnx]" in refused(capsys, 2, "export", run, TRUST, "--to", "onnx")
