"""Which net a solver trains: a file, two files, its own, stages; and where files are looked for."""

from pathlib import Path

import pytest

from firecaffe.caffe import text
from firecaffe.caffe.as_text import as_text
from firecaffe.caffe.message import CaffeError, Message
from firecaffe.caffe.phase import layers_of
from firecaffe.from_caffe.import_report import Report
from firecaffe.from_caffe.nets import NetFile, find_file, find_net, is_net
from firecaffe.from_caffe.training import State


def layer(name: str, words: str = "") -> str:
    return f'layer {{ name: "{name}" type: "ReLU" bottom: "x" top: "x" {words} }}\n'


def net_of(
    solver: str, folder: Path, root: str = "", states: dict[str, State] | None = None
) -> tuple[NetFile, Report]:
    report, path = Report(), folder / "solver.prototxt"
    return find_net(text.parse(solver, "s.prototxt"), path, root, states or {}, report), report


def names(net: Message, phase: str) -> list[str]:
    return [each.text("name") for each in layers_of(net, phase)]


def of_content(file: NetFile, phase: str) -> list[str]:
    """The layers of what is written down."""
    return names(text.parse(file.content.decode()), phase)


def test_one_file_is_kept_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "net.prototxt").write_text(f"# mine\n{layer('a')}")
    file, report = net_of('net: "net.prototxt"', tmp_path)
    assert file.content == (tmp_path / "net.prototxt").read_bytes()
    assert [note.place for note in report.understood] == ["s.prototxt:1"]
    assert not report.changed


def test_two_files_become_one(tmp_path: Path) -> None:
    (tmp_path / "train.prototxt").write_text(layer("a") + layer("t"))
    (tmp_path / "test.prototxt").write_text(layer("a") + layer("b", "include { phase: TEST }"))
    file, report = net_of('train_net: "train.prototxt" test_net: "test.prototxt"', tmp_path)
    for found in (file.net, text.parse(file.content.decode())):
        assert names(found, "TRAIN") == ["a", "t"]
        assert names(found, "TEST") == ["a", "b"]
    assert len(report.changed) == 1
    (tmp_path / "test.prototxt").write_text(layer("a") + layer("t"))
    same, _ = net_of('train_net: "train.prototxt" test_net: "test.prototxt"', tmp_path)
    assert same.content == (tmp_path / "train.prototxt").read_bytes()


def test_a_solvers_own_net_is_written_down(tmp_path: Path) -> None:
    file, report = net_of(
        f"net_param {{ {layer('a', 'relu_param {{ negative_slope: 0.5 }}')} }}".replace(
            "{{", "{"
        ).replace("}}", "}"),
        tmp_path,
    )
    assert of_content(file, "TRAIN") == ["a"]
    assert [note.place for note in report.changed] == ["s.prototxt:1"]


def test_stages_are_resolved(tmp_path: Path) -> None:
    (tmp_path / "net.prototxt").write_text(
        layer("always")
        + layer("x", 'include { phase: TRAIN stage: "x" }')
        + layer("y", 'include { phase: TEST stage: "y" }')
        + layer("other", 'include { stage: "z" }')
        + layer("high", "include { min_level: 2 }")
    )
    states = {"TRAIN": State(("x",)), "TEST": State(("y",), 3)}
    file, report = net_of('net: "net.prototxt"', tmp_path, states=states)
    assert of_content(file, "TRAIN") == names(file.net, "TRAIN") == ["always", "x"]
    assert of_content(file, "TEST") == names(file.net, "TEST") == ["always", "y", "high"]
    assert len(report.changed) == 1


def test_several_nets_to_test_are_left_out(tmp_path: Path) -> None:
    for name in ("a", "b", "c"):
        (tmp_path / f"{name}.prototxt").write_text(layer(name))
    file, report = net_of('net: "a.prototxt" test_net: "b.prototxt"', tmp_path)
    assert of_content(file, "TEST") == ["a"]
    assert len(report.left_out) == 1
    words = 'train_net: "a.prototxt" test_net: "b.prototxt" test_net: "c.prototxt"'
    file, report = net_of(words, tmp_path)
    assert of_content(file, "TEST") == ["b"]
    assert len(report.left_out) == 1


@pytest.mark.parametrize(
    ("solver", "said"),
    [
        ("base_lr: 1", "s.prototxt:1: found none; expected one of net, net_param"),
        ('net: "a"\ntrain_net: "b"', "found net and train_net; expected one"),
        ('\nnet: "no.prototxt"', 's.prototxt:2: net "no.prototxt" is not there; looked in'),
        ('net: "/no/such"', "expected a file there"),
    ],
)
def test_refused(tmp_path: Path, solver: str, said: str) -> None:
    with pytest.raises(CaffeError) as raised:
        net_of(solver, tmp_path)
    assert said in str(raised.value)


def test_files_are_looked_for_here_beside_the_file_and_above_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    solver = tmp_path / "caffe" / "examples" / "mnist" / "s.prototxt"
    solver.parent.mkdir(parents=True)
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    name = "examples/mnist/n.prototxt"
    assert find_file(name, solver, "") == (None, "")
    (tmp_path / "caffe" / name).write_text("")
    assert find_file(name, solver, "") == (tmp_path / "caffe" / name, str(tmp_path / "caffe"))
    beside = solver.parent / name
    beside.parent.mkdir(parents=True)
    beside.write_text("")
    assert find_file(name, solver, "")[0].samefile(beside)  # type: ignore[union-attr]
    (here / name).parent.mkdir(parents=True)
    (here / name).write_text("")
    assert find_file(name, solver, "") == (Path(name), ".")
    root = str(tmp_path / "caffe")
    assert find_file(name, solver, root) == (tmp_path / "caffe" / name, root)
    assert find_file(name, solver, str(tmp_path)) == (None, "")


def test_a_net_is_told_from_a_solver() -> None:
    assert is_net(text.parse(layer("a")))
    assert is_net(text.parse("layers { }"))
    assert is_net(text.parse('input: "data"'))
    assert not is_net(text.parse('net: "x" base_lr: 1'))


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
