"""What layers refuse, in one line that names the line of the file."""

import pytest

from firecaffe.caffe.layers.spec import Shape
from tests.unit.caffe.layers.made import layer, own, refusal

MAPS, LINE = (2, 4, 5, 6), (2, 4)
DETECTED = [(3, 160), (3, 160), (1, 2, 160)]
TOPS = {"LSTMUnit": 2, "Slice": 3}

# type, words of its own message, shapes of the bottoms, what is named
REFUSED: list[tuple[str, str, list[Shape], str]] = [
    ("Axpy", "", [(2, 5), MAPS, MAPS], "expected (B, C, 1, 1)"),
    ("ArgMax", "axis: 1 top_k: 5", [MAPS], "has 4 values"),
    ("ArgMax", "top_k: 0", [MAPS], "top_k is 0"),
    ("BN", "", [MAPS], "no fork"),
    ("BN", "frozen: true bn_mode: LEARN", [MAPS], "two forks"),
    ("BN", "momentum: 2", [MAPS], "momentum is 2"),
    ("BN", "frozen: true", [LINE], "4 axes"),
    ("BatchReindex", "", [MAPS, (2, 1)], "takes a bottom of 1 axes"),
    ("Bias", "axis: 2 num_axes: 3", [MAPS], "its bottom has 4"),
    ("Concat", "", [MAPS, (2, 4, 5, 7)], "differ along axis 1 alone"),
    ("Convolution", "kernel_size: 3", [(2, 4, 9)], "three dimensions are not built"),
    ("Convolution", "num_output: 4 kernel_size: 3 group: 3", [MAPS], "multiples of group"),
    ("Convolution", "num_output: 4", [MAPS], "has no kernel_size"),
    ("Convolution", "num_output: 4 kernel_size: 0", [MAPS], "kernel_size of 0 x 0"),
    ("Convolution", "num_output: 4 kernel_size: 3 stride: 0", [MAPS], "stride of 0 x 0"),
    ("Convolution", "num_output: 4 kernel_size: 3 pad: -1", [MAPS], "padding of -1 x -1"),
    ("Deconvolution", "num_output: 4 kernel_size: 3 dilation: 0", [MAPS], "dilation of 0 x 0"),
    ("Convolution", "num_output: 4 kernel_h: 3", [MAPS], "both kernel_h and kernel_w"),
    ("Convolution", "num_output: 4 kernel_size: 3 kernel_h: 3 kernel_w: 3", [MAPS], "one of them"),
    ("Convolution", "num_output: 4 kernel_size: 3 axis: 2", [MAPS], "expected axis 1"),
    ("Convolution", "num_output: 4 kernel_size: 30", [MAPS], "cannot take 2 x 4 x 5 x 6"),
    ("ConvolutionDepthwise", "num_output: 3 kernel_size: 3", [MAPS], "3 channels of 4"),
    ("DepthwiseConvolution", "num_output: 3 kernel_size: 3", [MAPS], "3 channels of 4"),
    ("Crop", "", [MAPS, LINE], "as many axes"),
    ("Crop", "offset: 3", [MAPS, (1, 1, 3, 3)], "axis 2 of 'it' is cut to 3 from 3 on; the"),
    ("Crop", "offset: 1 offset: 1 offset: 1", [MAPS, MAPS], "1, or 2"),
    ("DetectionOutput", "num_classes: 4 nms_param { eta: 0 }", DETECTED, "eta is 0"),
    ("DetectionOutput", "num_classes: 4 nms_param { nms_threshold: -1 }", DETECTED, "is -1"),
    ("DetectionOutput", "", DETECTED, "no num_classes"),
    ("DetectionOutput", "num_classes: 4 share_location: false", DETECTED, "40 priors"),
    ("Dropout", "dropout_ratio: 1", [LINE], "expected 0 to below 1"),
    ("Eltwise", "", [MAPS], "two or more"),
    ("Eltwise", "", [MAPS, LINE], "of the same shape"),
    ("Eltwise", "coeff: 1", [MAPS, MAPS], "1 coeff for 2 bottoms"),
    ("Eltwise", "operation: PROD coeff: 1 coeff: 2", [MAPS, MAPS], "for SUM"),
    ("Embed", "num_output: 3", [(4,)], "no input_dim"),
    ("Filter", "", [MAPS, LINE], "chooses by (2, 4)"),
    ("Filter", "", [MAPS, (3,)], "among 2 samples by 3"),
    ("InnerProduct", "", [MAPS], "num_output is 0"),
    ("InnerProduct", "num_output: 7 axis: 4", [MAPS], "its bottom has 4 axes"),
    ("InnerProduct", "num_output: 7", [MAPS, MAPS], "has 2 bottoms; expected 1"),
    ("Interp", "", [MAPS], "neither"),
    ("Interp", "height: 3 width: 3 zoom_factor: 2", [MAPS], "both"),
    ("Interp", "height: 3", [MAPS], "no width"),
    ("Interp", "zoom_factor: 0", [MAPS], "zoom_factor is 0"),
    ("Interp", "zoom_factor: 2 pad_beg: 1", [MAPS], "pad_beg is 1"),
    ("Interp", "zoom_factor: 2 pad_beg: -3 pad_end: -2", [MAPS], "leave nothing"),
    ("LRN", "local_size: 4", [MAPS], "expected an odd number"),
    ("Log", "base: 0", [MAPS], "expected above 0, or -1 for e"),
    ("MVN", "", [LINE], "planes"),
    ("PReLU", "", [(4,)], "has no channels"),
    ("PSROIPooling", "output_dim: 2 group_size: 3", [(2, 17, 8, 7), (9, 5)], "17 channels"),
    ("Parameter", "shape { dim: 0 }", [], "above 0"),
    ("Permute", "order: 1 order: 1", [MAPS], "each once"),
    ("Permute", "order: 4", [MAPS], "0 to 3"),
    ("Pooling", "global_pooling: true kernel_size: 3", [MAPS], "no kernel_size"),
    ("Pooling", "global_pooling: true pad: 1", [MAPS], "no pad"),
    ("Pooling", "kernel_size: 2 pad: 2", [MAPS], "padding below"),
    ("Pooling", "pool: STOCHASTIC kernel_size: 3 pad: 1", [MAPS], "no padding"),
    ("Pooling", "kernel_size: 9", [MAPS], "fits 5 x 6"),
    ("Pooling", "pool: MEDIAN kernel_size: 2", [MAPS], "one of MAX, AVE, STOCHASTIC"),
    ("PriorBox", "", [MAPS, MAPS], "needs min_size"),
    ("PriorBox", "min_size: 5 max_size: 4", [MAPS, MAPS], "max_size is 4"),
    ("PriorBox", "min_size: 5 min_size: 6 max_size: 9", [MAPS, MAPS], "expected as many"),
    ("PriorBox", "min_size: 5 variance: 1 variance: 2", [MAPS, MAPS], "expected 1 or 4"),
    ("PriorBox", "min_size: 5 aspect_ratio: 0", [MAPS, MAPS], "aspect_ratio is 0"),
    ("PriorBox", "min_size: 5 step: 4 step_h: 3", [MAPS, MAPS], "beside"),
    ("PriorBox", "min_size: 5 img_h: 4", [MAPS, MAPS], "img_size, or img_h and img_w"),
    ("ROIPooling", "pooled_h: 3 pooled_w: 2", [MAPS, (9, 4)], "(R, 5)"),
    ("ROIPooling", "", [MAPS, (9, 5)], "pooled_h"),
    ("Reduction", "operation: MAX", [MAPS], "SUM, ASUM"),
    ("Reshape", "shape { dim: 0 dim: 0 dim: 0 dim: 0 dim: 0 }", [MAPS], "as many elements"),
    ("Reshape", "shape { dim: 7 dim: -1 }", [MAPS], "as many elements"),
    ("Reshape", "shape { dim: -1 dim: -1 }", [MAPS], "at most one -1"),
    ("Reverse", "axis: 4", [MAPS], "axis is 4"),
    ("SPP", "pyramid_height: 2 pool: STOCHASTIC", [MAPS], "AVE"),
    ("SPP", "pyramid_height: 3", [MAPS], "too small for 4"),
    ("Scale", "", [MAPS, (3,)], "its second bottom is 3; expected 4"),
    ("ShuffleChannel", "group: 3", [MAPS], "4 channels"),
    ("Tile", "", [MAPS], "no tiles"),
    ("Upsample", "", [MAPS, (2, 4, 5, 7)], "same shape"),
    ("LSTMUnit", "", [(1, 2, 3), (1, 2, 9), (1, 2)], "4 · D"),
    ("Slice", "axis: 2", [MAPS], "Slice 'it' cuts"),
    ("Slice", "slice_point: 2", [MAPS], "Slice 'it' cuts"),
    ("Slice", "slice_point: 4 slice_point: 2", [MAPS], "Slice 'it' cuts"),
]


@pytest.mark.parametrize(("kind", "words", "shapes", "part"), REFUSED)
def test_it_is_refused_in_one_line(kind: str, words: str, shapes: list[Shape], part: str) -> None:
    line = refusal(layer(kind, own(kind, words), TOPS.get(kind, 1)), *shapes)
    assert line.startswith("net.prototxt:1: ")
    assert part in line, line
