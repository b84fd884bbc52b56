"""A finished run is used: evaluated, asked for predictions, exported."""

import csv
import json
import shutil
import sys
from math import log
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

import firecaffe
from firecaffe.cli import main
from firecaffe.errors import DataError, RecipeError
from tests.ranks.networks import Everything, small_data
from tests.typed import refused, said_by
from tests.world import Ranks

NETWORK = f"{Path(__file__).parents[1] / 'ranks' / 'networks.py'}:Everything"
COLORS = {"blue": (40, 60, 220), "red": (220, 60, 40)}


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
    recipe = firecaffe.Recipe(
        model=firecaffe.ModelConfig("resnet18"),
        data=firecaffe.DataConfig(
            "folder", str(photos), resize=18, crop=16, mean=[0.5], std=[0.25]
        ),
        train=firecaffe.TrainConfig(8, 4, steps=3, ema_decay=0.5, eval_batch_size=4, device="cpu"),
        run=firecaffe.RunConfig(str(folder / "run"), tensorboard=False),
    )
    return firecaffe.train(recipe).folder


def test_evaluate_gives_the_numbers_of_the_run_itself(
    run: Path, photos: Path, ranks: Ranks
) -> None:
    own = json.loads((run / "result.json").read_text())
    rows = [
        json.loads(said_by("evaluate", where, "--json"))
        for where in (run, run / "checkpoints" / "step-00000003")
    ]
    for row in rows:
        assert row["evaluated"] == "ema"
        assert row["step"] == 3
        assert row["metrics"] == ["top1"]
        assert row["top1"] == own["top1"]
        assert (row["loss"], row["samples"]) == (own["test_loss"], own["test_samples"])
    told = ranks.shared(2, evaluate_in_rank, str(run))[0]
    assert (told["loss"], told["top1"]) == (own["test_loss"], own["top1"])
    text = said_by("evaluate", run)
    assert "at step 3" in text
    assert "10 samples" in text


def evaluate_in_rank(run: str) -> dict[str, float]:
    return firecaffe.evaluate(run).evaluation.row


def test_evaluate_takes_other_data(run: Path, photos: Path, tmp_path: Path) -> None:
    (tmp_path / "train").symlink_to(photos / "train")
    (tmp_path / "test").mkdir()
    (tmp_path / "test" / "red").symlink_to(photos / "test" / "red")
    row = json.loads(said_by("evaluate", run, "--data.path", tmp_path, "--json"))
    assert row["samples"] == 5
    assert row["largest_class_share"] == 1


def test_evaluate_caches_nothing_where_a_recipe_says(
    run: Path, photos: Path, tmp_path: Path
) -> None:
    assert main(["pack", str(photos), str(tmp_path / "packed")]) == 0
    packed = {"data.name": "packed", "data.path": str(tmp_path / "packed")}
    cache = tmp_path / "cache"
    replaced = firecaffe.evaluate(run, replace={**packed, "data.cache": str(cache)})
    assert replaced.evaluation.samples == 10
    assert not cache.exists()


def draw(home: Path, **color_of: str) -> Path:
    """A folder of one training and one test photo of each class."""
    for part in ("train", "test"):
        for name, color in color_of.items():
            (home / part / name).mkdir(parents=True)
            Image.new("RGB", (20, 24), COLORS[color]).save(home / part / name / "1.png")
    return home


def test_other_data_have_the_classes_of_the_run_by_name(run: Path, tmp_path: Path) -> None:
    both, one = draw(tmp_path / "both", blue="blue", red="red"), draw(tmp_path / "one", red="red")
    red = said_by("predict", run, one / "test", "--csv", "-", "--top", "2")
    (row,) = csv.DictReader(red.splitlines())
    place = 1 + (row["class_1"] != "red")
    found = json.loads(said_by("evaluate", run, "--data.path", one, "--json"))
    # Red is number 0 of that folder, and 1 of the run.
    assert found["loss"] == pytest.approx(-log(float(row[f"probability_{place}"])), abs=1e-5)
    assert found["top1"] == float(place == 1)
    # The same weights, whose outputs are called the other way round.
    renamed = tmp_path / "run"
    shutil.copytree(run, renamed)
    about = json.loads((renamed / "about.json").read_text())
    (renamed / "about.json").write_text(json.dumps({**about, "class_names": ["red", "blue"]}))
    shares = [
        json.loads(said_by("evaluate", each, "--data.path", both, "--json"))["top1"]
        for each in (run, renamed)
    ]
    assert sum(shares) == 1


def test_a_test_part_alone_is_evaluated(run: Path, photos: Path, tmp_path: Path) -> None:
    own = json.loads((run / "result.json").read_text())
    home, packed = tmp_path / "home", tmp_path / "packed"
    home.mkdir()
    (home / "test").symlink_to(photos / "test")
    said_by("pack", home, packed)
    for name, path in (("folder", home), ("packed", packed)):
        words = ("--data.name", name, "--data.path", path, "--data.hold_out", "0.01")
        row = json.loads(said_by("evaluate", run, *words, "--json"))
        # Packed samples have another order.
        assert row["loss"] == pytest.approx(own["test_loss"], rel=1e-6)
        assert row["samples"] == own["test_samples"]
        assert len(said_by("predict", run, *words).splitlines()) == row["samples"]
    (home / "test").rename(home / "other")
    line = refused(3, "evaluate", run, "--data.path", home)
    assert str(home) in line
    assert line.count("\n") == 1


def test_classes_that_the_run_does_not_know_are_refused(run: Path, tmp_path: Path) -> None:
    source = tmp_path / "own.py"
    source.write_text(
        "import torch\n"
        "def three():\n"
        "    part = torch.zeros(3, 3, 18, 18, dtype=torch.uint8), torch.arange(3)\n"
        "    return part, part\n"
    )
    for words, said in (
        (["--data.path", str(draw(tmp_path, blue="blue", green="red"))], "'green'"),
        (["--data.name", f"{source}:three"], "3 classes"),
    ):
        line = refused(3, "evaluate", run, *words)
        assert said in line
        assert line.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["evaluate", "nowhere"], 8, "nowhere"),
        (["evaluate"], 2, "one run"),
        (["evaluate", "RUN", "--solver.base_lr", "1"], 2, "solver.base_lr"),
        (["evaluate", "RUN", "--best"], 4, "checkpoint.best"),
        (["evaluate", "RUN", "--nproc-per-node", "0"], 2, "--nproc-per-node"),
        (["evaluate", "RUN", "--data.path", "/nowhere"], 3, "/nowhere"),
        (["predict", "RUN", "nowhere.png"], 3, "nowhere.png"),
        (["predict", "RUN", "--top", "0"], 2, "--top"),
        (["predict", "RUN", "--out", "masks"], 2, "--out"),
        (["predict", "RUN", "--csv", "/nowhere/table.csv"], 8, "/nowhere"),
        (["export", "RUN"], 2, "--to"),
        (["export", "RUN", "--to", "caffe"], 2, "safetensors"),
        (["export", "RUN", "--to", "onnx"], 2, "firecaffe[onnx]"),
        (["export", "RUN", "--to", "safetensors", "--out", "net.pt"], 2, "net.pt"),
    ],
)
def test_what_cannot_be_is_one_line(
    run: Path,
    words: list[str],
    code: int,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    line = refused(code, *(str(run) if word == "RUN" else word for word in words))
    assert said in line
    assert line.count("\n") == 1


def test_all_that_was_given_in_python_is_asked_for_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = firecaffe.Recipe(
        train=firecaffe.TrainConfig(8, 4, steps=1, device="cpu"),
        run=firecaffe.RunConfig(str(tmp_path / "run"), tensorboard=False),
    )
    own: dict[str, Any] = {
        "model": Everything,
        "train_set": small_data(16),
        "test_set": small_data(8, 1),
    }
    run = firecaffe.train(recipe, **own, loss=torch.nn.functional.cross_entropy).folder
    source = tmp_path / "named.py"
    source.write_text(
        "from tests.ranks.networks import Everything, small_data\n"
        "import firecaffe, torch\n"
        "def data():\n"
        "    return small_data(16), small_data(8, 1)\n"
        "def task():\n"
        "    return firecaffe.Task(torch.nn.functional.cross_entropy)\n"
    )
    names = {
        "--model.name": f"{source}:Everything",
        "--data.name": f"{source}:data",
        "--task.name": f"{source}:task",
    }
    image = str(draw(tmp_path / "photos", red="red") / "test")
    needed = {
        ("evaluate",): list(names),
        ("evaluate", "--nproc-per-node", "2"): list(names),
        ("predict",): ["--model.name", "--data.name"],
        ("predict", image): ["--model.name"],
        ("export", "--to", "safetensors"): ["--model.name"],
    }
    for (command, *words), wanted in needed.items():
        for given in ([], wanted[:1]):
            typed = [each for name in given for each in (name, names[name])]
            missing = [name for name in wanted if name not in given]
            if not missing:
                continue
            capsys.readouterr()
            line = refused(2, command, run, *words, *typed)
            assert [name for name in names if name in line] == missing
            assert line.count("\n") == 1
    typed = [each for pair in names.items() for each in pair]
    row = json.loads(said_by("evaluate", run, *typed, "--json"))
    assert row["loss"] == json.loads((run / "result.json").read_text())["test_loss"]


def test_predict_sees_images_as_the_evaluation_does(
    run: Path, photos: Path, tmp_path: Path
) -> None:
    table = tmp_path / "table.csv"
    said_by("predict", run, photos / "test", "--csv", table, "--top", "2")
    rows = list(csv.DictReader(table.read_text().splitlines()))
    assert list(rows[0]) == ["sample", "class_1", "probability_1", "class_2", "probability_2"]
    assert [row["sample"] for row in rows] == [
        str(photos / "test" / name / f"{number}.png") for name in COLORS for number in range(5)
    ]
    right = [Path(row["sample"]).parent.name == row["class_1"] for row in rows]
    own = json.loads((run / "result.json").read_text())
    assert sum(right) / len(right) == own["top1"]
    # The same batches of the same bits as the evaluation's.
    from_data = list(csv.DictReader(said_by("predict", run, "--csv", "-").splitlines()))
    columns = list(rows[0])[1:5]
    assert [[row[name] for name in columns] for row in from_data] == [
        [row[name] for name in columns] for row in rows
    ]


def test_a_broken_image_is_named_and_the_others_are_predicted(
    run: Path, photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "half.png").write_bytes((photos / "test" / "red" / "1.png").read_bytes()[:50])
    (tmp_path / "whole.png").write_bytes((photos / "test" / "red" / "1.png").read_bytes())
    assert main(["predict", str(run), str(tmp_path)]) == 3
    out, err = capsys.readouterr()
    assert "whole.png" in out
    assert "half.png" in err.splitlines()[0]
    assert "could not read 1 of" in err.splitlines()[1]


def test_files_that_are_no_images_are_said(
    run: Path, photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copy(photos / "test" / "red" / "1.png", tmp_path / "a.png")
    for name in ("b.heic", "c.HEIC", "d.txt", ".hidden"):
        (tmp_path / name).write_text("words, and no image at all")
    capsys.readouterr()
    assert main(["predict", str(run), str(tmp_path), "--csv", "-"]) == 0
    out, err = capsys.readouterr()
    assert len(out.splitlines()) == 2
    assert all(part in err for part in (str(tmp_path), "3 files", "2 .heic", "1 .txt"))
    assert main(["predict", str(run), str(tmp_path / "d.txt")]) == 3
    line = capsys.readouterr().err.splitlines()[0]
    assert all(part in line for part in ("d.txt", "no image", "JPEG", "BMP"))
    assert "whole" not in line


def test_in_python_images_that_all_fail_are_an_error(run: Path, tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / f"{name}.png").write_bytes(b"no image")
    with pytest.raises(DataError, match=r"a\.png.*1 more"):
        firecaffe.predict(run, tmp_path)


@pytest.mark.parametrize("images", [[], ()])
def test_in_python_no_images_are_not_the_test_samples(run: Path, images: Any) -> None:
    """A glob that finds nothing is a mistake."""
    with pytest.raises(RecipeError, match="images is empty"):
        firecaffe.predict(run, images)
    assert len(firecaffe.predict(run).rows) == 10


def test_export_writes_what_other_programs_read(run: Path, tmp_path: Path) -> None:
    network = firecaffe.load(run)
    text = said_by("export", run, "--to", "safetensors", "--out", tmp_path / "a.safetensors")
    assert "moving average of step 3" in text
    weights = load_file(tmp_path / "a.safetensors")
    assert weights.keys() == network.state_dict().keys()
    assert all(torch.equal(weights[name], each) for name, each in network.state_dict().items())
    assert "softmax" not in text
    assert "outputs.softmax(1)" in said_by("export", run, "--to", "torch_export")
    images = torch.randn(3, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    exported = torch.export.load(run / "model.pt2").module()
    with torch.no_grad():
        assert torch.allclose(exported(images), network(images), rtol=1e-3, atol=1e-4)
    assert "--overwrite" in refused(8, "export", run, "--to", "torch_export")


def test_an_onnx_file_is_held_against_onnxruntime(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    path = tmp_path / "net.onnx"
    assert "onnxruntime" in said_by("export", run, "--to", "onnx", "--out", path)
    session = runtime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    images = torch.randn(5, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    (found,) = session.run(["outputs"], {"inputs": images.numpy()})
    with torch.no_grad():
        expected = firecaffe.load(run)(images)
    assert torch.allclose(torch.from_numpy(found), expected, rtol=1e-3, atol=1e-4)
    # A runtime that comes to something else: the file that was there stays, and no other is left.
    before = path.read_bytes()
    own = runtime.InferenceSession.run
    monkeypatch.setattr(
        runtime.InferenceSession, "run", lambda self, *words: [1.1 * own(self, *words)[0]]
    )
    assert "net.onnx" in refused(7, "export", run, "--to", "onnx", "--out", path, "--overwrite")
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]
