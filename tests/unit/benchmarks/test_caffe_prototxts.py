"""What the benchmark of public prototxts counts as what, on files written here."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.caffe.prototxts import apart, distinct
from benchmarks.caffe.prototxts_file import differences, image_of, kind_of, look, shapes
from benchmarks.caffe.prototxts_page import group_of, is_whole, page, reasons

INPUT = 'input: "data" input_shape { dim: 2 dim: 3 dim: 8 dim: 8 }\n'
NET = (
    INPUT
    + 'layer { name: "c" type: "Convolution" bottom: "data" top: "c" '
    + "convolution_param { num_output: 4 kernel_size: 3 %s } %s }\n"
)
SHARED = 'layer { name: "%s" type: "InnerProduct" bottom: "%s" top: "%s" param { name: "w" } %s }\n'
SCHEMA: dict[str, Any] = {
    "NetParameter": {"name": None, "input": None, "input_shape": None, "layer": "Layer"},
    "Layer": dict.fromkeys(("name", "type", "bottom", "top", "include"), None)
    | {"convolution_param": "C"},
    "C": {"num_output": None, "kernel_size": None},
    "SolverParameter": {"net": None, "base_lr": None, "lr_policy": None, "max_iter": None},
}
SOLVER = 'net: "net.prototxt" base_lr: 0.1 lr_policy: "fixed" max_iter: 3\n'


def row_of(folder: Path, name: str, text: str, **answers: Any) -> dict[str, Any]:
    path = folder / "a+b" / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    return look(folder, path, {"TRAIN": {}, "TEST": {}} | answers, SCHEMA)


@pytest.mark.parametrize(
    ("text", "group", "whole"),
    [
        (NET % ("", ""), "own", True),
        (NET % ("winograd: true", ""), "fields", False),
        ((NET % ("", "")).replace("Convolution", "Deformed"), "types", False),
        (NET % ("", "") + 'layer { type: "Python" python_param { module: "m" } }', "python", False),
        (NET % ('weight_filler { type: "gabor" }', ""), "fields", False),
    ],
)
def test_groups_of_nets(tmp_path: Path, text: str, group: str, whole: bool) -> None:
    row = row_of(tmp_path, "net.prototxt", text)
    assert (group_of(row), is_whole(row)) == (group, whole)
    assert whole or reasons(row)


def test_what_a_real_caffe_refuses_counts_where_there_are_samples(tmp_path: Path) -> None:
    """And a net with the filler of a fork is refused."""
    wrong = {"error": "F1 12:00 1 net.cpp:1] no"}
    data = 'layer { name: "d" type: "Data" top: "data" include { phase: TRAIN } }\n'
    text = data + (NET % ("", "")).removeprefix(INPUT)
    row = row_of(tmp_path, "net.prototxt", text, TEST=wrong)
    assert row["phases"] == ["TRAIN"]
    assert group_of(row) != "refused"
    assert group_of(row_of(tmp_path, "net.prototxt", text, TRAIN=wrong)) == "refused"
    loaded = {"inputs": {}, "blobs": {}, "params": {}, "count": 0}  # without fillers
    text = NET % ('weight_filler { type: "gabor" }', "")
    row = row_of(tmp_path, "net.prototxt", text, TEST=loaded)
    assert (row["refused"], row["equal"]) == ({"TEST": "Unknown filler gabor"}, {})


def test_shapes_are_held_against_a_real_caffes(tmp_path: Path) -> None:
    inner = "inner_product_param { num_output: 192 bias_term: false }"
    text = INPUT + SHARED % ("x", "data", "x", inner) + SHARED % ("y", "x", "y", inner)
    path = tmp_path / "net.prototxt"
    path.write_text(text)
    ours = shapes(path, "TEST", {"data": [2, 3, 8, 8]})
    assert ours["count"] == 192 * 192  # one tensor, shared
    assert ours["blobs"] == {"data": [2, 3, 8, 8], "x": [2, 192], "y": [2, 192]}
    assert differences(ours, ours) == []
    theirs = json.loads(json.dumps(ours))
    theirs["blobs"]["x"] = [2, 193]
    assert differences(ours, theirs) == ["blobs x: [2, 192]; Caffe has [2, 193]"]
    del theirs["params"]["y"]
    assert "params y" in differences(ours, theirs)[1]


def test_kinds_of_files(tmp_path: Path) -> None:
    for text, kind in (
        (NET % ("", ""), "net"),
        (SOLVER, "solver"),
        ("item { id: 1 }", "other"),
        ("${X}", "template"),
        ("a: }", "broken"),
    ):
        (tmp_path / "a").write_text(text)
        assert kind_of(tmp_path / "a")[0] == kind
    assert image_of(Path("examples/cifar10/x.prototxt")) == (3, 32, 32)
    assert image_of(Path("x.prototxt")) == (3, 224, 224)


def test_the_page_counts_what_was_found(tmp_path: Path) -> None:
    texts = {
        "BVLC+caffe/net.prototxt": 'layer { name: "d" type: "Data" top: "data" top: "label" '
        'data_param { source: "x" batch_size: 4 backend: LMDB } '
        "transform_param { crop_size: 8 } }\n"
        + (NET % ("", "")).removeprefix(INPUT)
        + SHARED % ("fc", "c", "fc", "inner_product_param { num_output: 4 }")
        + 'layer { type: "SoftmaxWithLoss" name: "l" bottom: "fc" bottom: "label" }',
        "BVLC+caffe/solver.prototxt": SOLVER,
        "a+b/copy.prototxt": SOLVER,
        "a+b/other.prototxt": NET % ("strange: 1", ""),
    }
    for name, text in texts.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "sources.tsv").write_text("BVLC/caffe\tabc\t2\na/b\tdef\t2\n")
    files = list(distinct(tmp_path))
    assert [str(path.relative_to(tmp_path)) for path, _ in files] == [
        *list(texts)[:2],
        "a+b/other.prototxt",
    ]
    out = tmp_path / "rows.jsonl"
    with out.open("w") as file:
        for row in apart([(tmp_path, path, {}, {}) for path, _ in files], 2):
            file.write(json.dumps({"kind": "file", **row}) + "\n")
    text = page(tmp_path, out)
    for part in (
        "3 different files of 2 repositories: 2 nets, 1 solvers",
        "1 are imported with nothing left out: **50.0 %**",
        "| the others: Caffe's own | 1 | 1 |",
        "`a+b/other.prototxt`",
    ):
        assert part in text
    assert "tmp" not in text  # no place of this machine
