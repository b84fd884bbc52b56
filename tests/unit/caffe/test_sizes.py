"""What a file asks for is compared with Caffe's own bound before anything is made."""

import tracemalloc

import pytest
import torch

from firecaffe.caffe import text
from firecaffe.caffe.message import CaffeError
from firecaffe.caffe.net import Net
from firecaffe.caffe.trained import Trained
from tests.golden.caffe.cases import inputs, layer

LINE = inputs(x=(2, 100_000))
MAPS = inputs(x=(1, 3, 4, 4))
CONVOLVED = "convolution_param { num_output: 4 kernel_size: %d %s }"
HUGE = {
    "an input": inputs(x=(200_000, 200_000)),
    "a batch": inputs(x=(2**62, 2**62)),
    "a weight": LINE + layer("InnerProduct", "x", "y", "inner_product_param { num_output: 90000 }"),
    "beyond 64 bits": MAPS + layer("Convolution", "x", "y", CONVOLVED % (2**40, "")),
    "a filler": MAPS
    + layer("Convolution", "x", "y", CONVOLVED % (2**40, 'weight_filler { type: "bilinear" }')),
    "a top": LINE + layer("Tile", "x", "y", "tile_param { tiles: 20000 }"),
    "a blob without bottoms": layer(
        "Parameter", "", "y", "parameter_param { shape { dim: 4000000000 dim: 8 } }"
    ),
    "ones": layer(
        *("ContinuationIndicator", "", "y"),
        "continuation_indicator_param { time_step: 100000 batch_size: 100000 }",
    ),
    "steps": inputs(x=(1_000_000, 1, 2), cont=(1_000_000, 1))
    + layer("LSTM", "x cont", "y", "recurrent_param { num_output: 2 }"),
}


@pytest.mark.parametrize("net", HUGE.values(), ids=HUGE)
def test_one_line_and_no_memory(net: str) -> None:
    message = text.parse(net)
    tracemalloc.start()
    try:
        with pytest.raises(CaffeError) as found:
            Net(message)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert "prototxt:" in str(found.value)
    assert str(found.value).isprintable()
    assert peak < 64 << 20


def test_the_outline_draws_no_numbers() -> None:
    """A layer's outline is made before the layer: its fillers must not be."""
    words = 'inner_product_param { num_output: 3 weight_filler { type: "gaussian" } }'
    torch.manual_seed(7)
    net = Net(text.parse(inputs(x=(2, 5)) + layer("InnerProduct", "x", "y", words)))
    torch.manual_seed(7)
    expected = torch.empty(3, 5).normal_(0, 1)
    assert torch.equal(net.get_parameter("y.weight"), expected)


def test_a_net_without_layers_is_told() -> None:
    with pytest.raises(CaffeError, match="no layer in TEST"):
        Net(text.parse('name: "nothing"'))


def test_an_input_of_no_shape_that_nobody_takes_is_told() -> None:
    net = 'layer { name: "d" type: "Data" top: "x" data_param { source: "s" } }'
    with pytest.raises(CaffeError, match="does not say the shape"):
        Trained(text.parse(net))
