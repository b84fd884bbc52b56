"""What an import says of a net and of its files, and what it writes."""

import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from firecaffe.caffe import text
from firecaffe.caffe.graph import layers_of
from firecaffe.caffe.message import CaffeError, Message
from firecaffe.caffe.text import as_text
from firecaffe.errors import RunError
from firecaffe.from_caffe import Report
from firecaffe.from_caffe.net_settings import micro_batch_of
from firecaffe.from_caffe.nets import NetFile, find_file, find_net
from firecaffe.from_caffe.recipe import ImportRequest, as_toml, check_folder, read, write_folder
from firecaffe.from_caffe.solver import SolverStages
from tests.kit.models_refused import refused


def layer(name: str, words: str = "") -> str:
    return f'layer {{ name: "{name}" type: "ReLU" bottom: "x" top: "x" {words} }}\n'


def net_of(
    solver: str, folder: Path, states: dict[str, SolverStages] | None = None, **files: str
) -> tuple[NetFile, Report]:
    """files: prototxts beside the solver's, by name."""
    for name, content in files.items():
        (folder / f"{name}.prototxt").write_text(content)
    report, path = Report(), folder / "solver.prototxt"
    return find_net(text.parse(solver, "s.prototxt"), path, "", states or {}, report), report


def names(net: Message, phase: str) -> list[str]:
    return [each.text("name") for each in layers_of(net, phase)]


def of_content(file: NetFile, phase: str) -> list[str]:
    """The layers of what is written down."""
    return names(text.parse(file.content.decode()), phase)


def test_one_file_is_kept_as_it_is(tmp_path: Path) -> None:
    file, report = net_of('net: "net.prototxt"', tmp_path, net=f"# mine\n{layer('a')}")
    assert file.content == (tmp_path / "net.prototxt").read_bytes()
    assert [note.place for note in report.understood] == ["s.prototxt:1"]
    assert not report.changed


def test_two_files_become_one(tmp_path: Path) -> None:
    solver = 'train_net: "train.prototxt" test_net: "test.prototxt"'
    train, test = layer("a") + layer("t"), layer("a") + layer("b", "include { phase: TEST }")
    file, report = net_of(solver, tmp_path, train=train, test=test)
    for net in (file.net, text.parse(file.content.decode())):
        assert names(net, "TRAIN") == ["a", "t"]
        assert names(net, "TEST") == ["a", "b"]
    assert len(report.changed) == 1
    same, _ = net_of(solver, tmp_path, test=train)
    assert same.content == (tmp_path / "train.prototxt").read_bytes()


def test_a_solvers_own_net_is_written_down(tmp_path: Path) -> None:
    words = layer("a", "relu_param { negative_slope: 0.5 }")
    file, report = net_of(f"net_param {{ {words} }}", tmp_path)
    assert of_content(file, "TRAIN") == ["a"]
    assert [note.place for note in report.changed] == ["s.prototxt:1"]


def test_stages_are_resolved(tmp_path: Path) -> None:
    rules = {
        "always": "",
        "x": 'include { phase: TRAIN stage: "x" }',
        "y": 'include { phase: TEST stage: "y" }',
        "other": 'include { stage: "z" }',
        "high": "include { min_level: 2 }",
    }
    net = "".join(layer(name, words) for name, words in rules.items())
    states = {"TRAIN": SolverStages(("x",)), "TEST": SolverStages(("y",), 3)}
    file, report = net_of('net: "net.prototxt"', tmp_path, states, net=net)
    assert of_content(file, "TRAIN") == names(file.net, "TRAIN") == ["always", "x"]
    assert of_content(file, "TEST") == names(file.net, "TEST") == ["always", "y", "high"]
    assert len(report.changed) == 1


@pytest.mark.parametrize(
    ("solver", "tested"),
    [
        ('net: "a.prototxt" test_net: "b.prototxt"', "a"),
        ('train_net: "a.prototxt" test_net: "b.prototxt" test_net: "c.prototxt"', "b"),
    ],
)
def test_several_nets_to_test_are_left_out(tmp_path: Path, solver: str, tested: str) -> None:
    file, report = net_of(solver, tmp_path, None, **{name: layer(name) for name in "abc"})
    assert of_content(file, "TEST") == [tested]
    assert len(report.left_out) == 1


@pytest.mark.parametrize(
    ("solver", "part"),
    [
        ("base_lr: 1", "s.prototxt:1: found none; expected one of net, net_param"),
        ('net: "a"\ntrain_net: "b"', "found net and train_net; expected one"),
        ('\nnet: "no.prototxt"', 's.prototxt:2: net "no.prototxt" is not there; looked in'),
        ('net: "/no/such"', "expected a file there"),
    ],
)
def test_refused(tmp_path: Path, solver: str, part: str) -> None:
    with refused(CaffeError, [part]):
        net_of(solver, tmp_path)


def test_files_are_looked_for_here_beside_the_file_and_above_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, here, name = tmp_path / "caffe", tmp_path / "here", "examples/mnist/n.prototxt"
    solver = root / "examples" / "mnist" / "s.prototxt"
    for folder in (solver.parent / name, here / name):
        folder.parent.mkdir(parents=True)
    monkeypatch.chdir(here)
    assert find_file(name, solver, "") == (None, "")
    (root / name).touch()
    assert find_file(name, solver, "") == (root / name, str(root))
    (solver.parent / name).touch()
    path, _ = find_file(name, solver, "")
    assert path is not None
    assert path.samefile(solver.parent / name)
    (here / name).touch()
    assert find_file(name, solver, "") == (Path(name), ".")
    assert find_file(name, solver, str(root)) == (root / name, str(root))
    assert find_file(name, solver, str(tmp_path)) == (None, "")


def test_what_is_written_is_read_to_the_same() -> None:
    words = r"""
        a: 1 b: -2.5e-3 c: "x\"y\\z\n" d: WORD e: true f { g: 1 g: 2 h { } } i: 1e30 j: inf k: -inf
    """
    read = text.parse(words)
    again = text.parse(as_text(read))

    def values(message: Message) -> list[object]:
        return [
            (each.name, values(each.value) if isinstance(each.value, Message) else each.value)
            for each in message.fields
        ]

    assert values(again) == values(read)
    assert [type(each.value) for each in again.fields] == [type(each.value) for each in read.fields]


SHAPE = "shape { dim: 2 dim: 3 dim: 8 dim: 8 }"
INPUT = f'layer {{ name: "data" type: "Input" top: "data" input_param {{ {SHAPE} }} }}\n'
CONV = (
    'layer { name: "conv" type: "Convolution" bottom: "data" top: "conv" '
    "convolution_param { num_output: 4 kernel_size: 3 } %s }\n"
)


def report_of(text: str, folder: Path) -> Report:
    path = folder / "net.prototxt"
    path.write_text(text)
    return read(path, ImportRequest(folder=str(folder / "out"))).report


def lines(notes: Sequence[tuple[str, str]]) -> str:
    return "\n".join(": ".join(each) for each in notes)


def data(words: str, kind: str = "Data", more: str = "") -> str:
    return (
        f'layer {{ name: "data" type: "{kind}" top: "data" {more} {words} '
        "transform_param { crop_size: 8 } }\n"
    )


def database(source: str, backend: str = "LMDB", more: str = "") -> str:
    words = f'data_param {{ source: "{source}" batch_size: 2 backend: {backend} }}'
    return data(words, more=more)


def listed(words: str) -> str:
    words = f"image_data_param {{ {words} batch_size: 2 }}"
    return f'layer {{ name: "data" type: "ImageData" top: "data" top: "label" {words} }}\n'


OTHERS = "softmax_param { axis: 2 } loss_param { ignore_label: 255 } data_param { source: 'x' }"
DUMMY = f'dummy_data_param {{ {SHAPE} data_filler {{ type: "gaussian" }} }}'
SECOND = INPUT.replace('"data"', '"other"').replace("dim: 2", "dim: 1", 1)
CROP = (
    'layer { name: "crop" type: "Crop" bottom: "data" bottom: "other" top: "crop" '
    "crop_param { axis: 0 offset: 0 } }"
)
PARAMETER = """
layer { name: "p" type: "Parameter" top: "p" parameter_param { shape { dim: 3 } } }
layer { name: "b" type: "Bias" bottom: "data" bottom: "p" top: "b" }
"""
TEST = "include { phase: TEST }"
WINDOWS = data("window_data_param { batch_size: 2 }", "WindowData")

# net, what is left out, what is needed
NOTES = {
    "words for layers of other types": (INPUT + CONV % OTHERS, "", ""),
    "a fork's message": (INPUT + CONV % "quantization_param { bw: 8 }", "is not understood", ""),
    "a fork's word": (INPUT + CONV % "convolution_param { algorithm: 3 }", "is not understood", ""),
    "leveldb": (database("no/such", "LEVELDB") + CONV % "", "", "convert it to an LMDB"),
    "dummies": (data(DUMMY, "DummyData") + CONV % "", "", "holds no samples"),
    "windows": (WINDOWS + CONV % "", "WindowData", ""),
    "batches of inputs": (INPUT + SECOND + CROP, "", ""),
    "a parameter": (INPUT + PARAMETER, "", ""),
    "no data to train": (database("no/such", more=TEST) + CONV % "", "", "TRAIN has no data layer"),
    "data to test": (database("there", more=TEST) + CONV % "", "", "no data layer in its TRAIN"),
}


@pytest.mark.parametrize("name", NOTES)
def test_what_is_left_out_or_needed(name: str, tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    net, left_out, needed = NOTES[name]
    report = report_of(net, tmp_path)
    assert bool(report.left_out) == bool(left_out)
    assert left_out in lines(report.left_out)
    assert needed in lines(report.needed)


def images_of(side: int, stage: str, folder: Path) -> str:
    """A data layer of one image, for a stage."""
    Image.new("L", (side, side), 99).save(folder / f"{stage}.png")
    (folder / f"{stage}.txt").write_text(f"{stage}.png 0\n")
    words = f'source: "{stage}.txt" batch_size: 2 is_color: false'
    layer = f'name: "d" type: "ImageData" top: "data" image_data_param {{ {words} }}'
    return f'layer {{ {layer} include {{ stage: "{stage}" }} }}\n'


@pytest.mark.parametrize("inside", [False, True])
def test_samples_are_of_the_data_layers_that_the_solver_chooses(
    tmp_path: Path, inside: bool
) -> None:
    nets = images_of(6, "small", tmp_path) + images_of(9, "large", tmp_path) + CONV % ""
    (tmp_path / "net.prototxt").write_text(nets)
    net = f"net_param {{ {nets} }}" if inside else 'net: "net.prototxt"'
    states = 'train_state { stage: "large" } test_state { stage: "large" }'
    solver = tmp_path / "solver.prototxt"
    solver.write_text(f'{net} base_lr: 1 lr_policy: "fixed" max_iter: 3 {states}')
    imported = read(solver, ImportRequest(folder=str(tmp_path / "out")))
    assert imported.sections["model"]["args"] == {"input_CHW": [1, 9, 9]}
    assert "cannot be read" not in lines(imported.report.needed)


def batch_of(size: int) -> str:
    return database("no/such").replace("size: 2", f"size: {size}")


MOST = "2,147,483,647"
NO_LIST = ['"no/such/list.txt" is not there', "root", "input_shape"]
REFUSED: list[tuple[str, list[str]]] = [
    ("", ["says nothing", "layer { … }", "base_lr"]),
    ("# a net\n", ["says nothing"]),
    ('name: "x" a { b: 1 }', ["says name, a"]),
    ('net: "net.prototxt"', ["lr_policy"]),
    (listed('source: "no/such/list.txt"') + CONV % "", NO_LIST),
    (listed(f'source: "{"x" * 5_000}"') + CONV % "", ["is not there"]),
    (listed('sourc: "list.txt"') + CONV % "", ["without a source, with sourc, batch_size"]),
    (listed('root_folder: "list.txt"') + CONV % "", ["without a source, with root_folder"]),
    (batch_of(200_000_000_000) + CONV % "", [MOST]),
    (batch_of(2**63 - 1) + CONV % "", [MOST]),
]


@pytest.mark.parametrize(("text", "parts"), REFUSED)
def test_what_cannot_be_imported_is_said(text: str, parts: list[str], tmp_path: Path) -> None:
    with refused(CaffeError, parts):
        report_of(text, tmp_path)


def test_a_large_batch_is_cut_without_trying_each_number() -> None:
    assert micro_batch_of(2**31 - 1, "") == 1
    assert micro_batch_of(2**30, "") == 2**28
    for batch in range(1, 200):
        most = max(1, batch // 4)
        assert micro_batch_of(batch, "") == max(n for n in range(1, most + 1) if batch % n == 0)


FILES = {"net.prototxt": b"net", "report.md": b"report", "recipe.toml": b"recipe"}


def test_no_folder_is_left_if_a_file_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="no/such"):
        write_folder(tmp_path / "out", {"no/such/folder": b"", **FILES})
    assert not list(tmp_path.iterdir())


def test_the_recipe_stays_if_a_file_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "recipe.toml").write_bytes(b"before")
    (tmp_path / "report.md").mkdir()
    with pytest.raises(OSError, match=r"report\.md"):
        write_folder(tmp_path, FILES)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["recipe.toml", "report.md"]
    assert (tmp_path / "recipe.toml").read_bytes() == b"before"


def test_a_folder_that_is_there(tmp_path: Path) -> None:
    check_folder(tmp_path / "new", overwrite=False)
    check_folder(tmp_path, overwrite=False)  # an empty one
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match="overwrite"):
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
