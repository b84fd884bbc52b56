"""What layers refuse, in one line that names the line of the file."""

import pytest

from firecaffe.caffe.layers.spec import Shape
from tests.unit.caffe.layers.made import layer, refusal

MAPS = (2, 4, 5, 6)

REFUSED: dict[str, tuple[str, str, list[Shape], str]] = {
    "crop: another number of axes": ("Crop", "", [MAPS, (2, 4)], "as many axes"),
    "crop: out of the border": (
        "Crop",
        "crop_param { offset: 3 }",
        [MAPS, (1, 1, 3, 3)],
        "axis 2 of 'it' is cut to 3 from 3 on; the bottom has 5",
    ),
    "crop: offsets": (
        "Crop",
        "crop_param { offset: 1 offset: 1 offset: 1 }",
        [MAPS, MAPS],
        "1, or 2",
    ),
    "permute: twice": ("Permute", "permute_param { order: 1 order: 1 }", [MAPS], "each once"),
    "permute: no such axis": ("Permute", "permute_param { order: 4 }", [MAPS], "0 to 3"),
    "reverse": ("Reverse", "reverse_param { axis: 4 }", [MAPS], "axis is 4"),
    "argmax: too many": ("ArgMax", "argmax_param { axis: 1 top_k: 5 }", [MAPS], "has 4 values"),
    "argmax: none": ("ArgMax", "argmax_param { top_k: 0 }", [MAPS], "top_k is 0"),
    "reduction": ("Reduction", "reduction_param { operation: MAX }", [MAPS], "SUM, ASUM"),
    "tile": ("Tile", "", [MAPS], "no tiles"),
    "embed": ("Embed", "embed_param { num_output: 3 }", [(4,)], "no input_dim"),
    "mvn": ("MVN", "", [(2, 4)], "planes"),
    "reindex": ("BatchReindex", "", [MAPS, (2, 1)], "takes a bottom of 1 axes"),
    "filter: by what": ("Filter", "", [MAPS, (2, 4)], "chooses by (2, 4)"),
    "filter: how many": ("Filter", "", [MAPS, (3,)], "among 2 samples by 3"),
    "parameter": ("Parameter", "parameter_param { shape { dim: 0 } }", [], "above 0"),
    "pyramid: stochastic": (
        "SPP",
        "spp_param { pyramid_height: 2 pool: STOCHASTIC }",
        [MAPS],
        "AVE",
    ),
    "pyramid: too high": ("SPP", "spp_param { pyramid_height: 3 }", [MAPS], "too small for 4"),
    "lstm unit": ("LSTMUnit", "", [(1, 2, 3), (1, 2, 9), (1, 2)], "4 · D"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_it_is_refused_in_one_line(name: str) -> None:
    kind, words, shapes, part = REFUSED[name]
    line = refusal(layer(kind, words, tops=2 if kind == "LSTMUnit" else 1), *shapes)
    assert line.startswith("net.prototxt:1: ")
    assert part in line, line
    assert "\n" not in line
