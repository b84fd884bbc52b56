"""Cases of layers without a loss, a family a record."""

from __future__ import annotations

from tools.caffe_goldens.cases import (
    Case,
    batch_normalized,
    below,
    inputs,
    layer,
    normal,
    positive,
    scaled,
    single,
    these,
)
from tools.caffe_goldens.more import MORE

MAPS = (2, 4, 6, 7)
"""Batch, channels, height, width."""


def convolution(name: str, words: str, x: tuple[int, ...] = MAPS) -> Case:
    return single(name, "Convolution", f"convolution_param {{ {words} }}", x=x)


def deconvolution(name: str, words: str, x: tuple[int, ...] = (2, 4, 3, 4)) -> Case:
    return single(name, "Deconvolution", f"convolution_param {{ {words} }}", x=x)


def pooling(name: str, words: str, x: tuple[int, ...] = MAPS) -> Case:
    return single(name, "Pooling", f"pooling_param {{ {words} }}", x=x)


CONVOLUTION = [
    convolution("plain", "num_output: 3 kernel_size: 3"),
    convolution("without_bias", "num_output: 3 kernel_size: 3 bias_term: false"),
    convolution("padded_stride", "num_output: 3 kernel_size: 3 pad: 1 stride: 2"),
    convolution("group", "num_output: 6 kernel_size: 3 pad: 1 group: 2"),
    convolution("depthwise", "num_output: 4 kernel_size: 3 group: 4"),
    convolution("dilation", "num_output: 3 kernel_size: 2 dilation: 2 pad: 2"),
    convolution(
        "rectangle",
        "num_output: 3 kernel_h: 3 kernel_w: 2 pad_h: 0 pad_w: 1 stride_h: 2 stride_w: 1",
    ),
    convolution(
        "rectangle_lists",
        "num_output: 3 kernel_size: 2 kernel_size: 3 pad: 1 pad: 0 stride: 1 stride: 2 "
        "dilation: 2 dilation: 1",
    ),
    Case(
        "two_bottoms",
        inputs(x=MAPS, z=MAPS)
        + layer(
            "Convolution",
            "x z",
            "y w",
            "convolution_param { num_output: 3 kernel_size: 3 }",
            "conv",
        ),
    ),
    deconvolution("transposed", "num_output: 3 kernel_size: 3 stride: 2"),
    deconvolution("transposed_padded", "num_output: 3 kernel_size: 4 stride: 2 pad: 1"),
    deconvolution(
        "transposed_group",
        "num_output: 4 kernel_size: 4 stride: 2 pad: 1 group: 4 bias_term: false",
    ),
    deconvolution("transposed_group_2", "num_output: 6 kernel_size: 3 group: 2"),
    deconvolution("transposed_dilation", "num_output: 2 kernel_size: 2 dilation: 2 stride: 2"),
]

POOLING = [
    pooling("max", "kernel_size: 2 stride: 2"),
    pooling("max_ceil", "kernel_size: 3 stride: 2"),
    pooling("max_default", "pool: MAX kernel_size: 3"),
    pooling("max_padded", "kernel_size: 3 stride: 2 pad: 1"),
    pooling("max_last_window_dropped", "kernel_size: 2 stride: 2 pad: 1", x=(2, 2, 7, 7)),
    pooling("max_kernel_below_stride", "kernel_size: 1 stride: 3", x=(2, 2, 7, 10)),
    pooling("max_kernel_2_stride_3", "kernel_size: 2 stride: 3", x=(2, 2, 7, 8)),
    pooling("max_rectangle", "kernel_h: 3 kernel_w: 2 stride_h: 1 stride_w: 2 pad_h: 0 pad_w: 1"),
    pooling("max_global", "global_pooling: true"),
    single(
        "max_mask",
        "Pooling",
        "pooling_param { kernel_size: 3 stride: 2 }",
        tops="y mask",
        headless=("mask",),
        x=MAPS,
    ),
    pooling("max_floor", "kernel_size: 3 stride: 2 round_mode: FLOOR", x=(2, 2, 6, 8)),
    pooling("ave", "pool: AVE kernel_size: 2 stride: 2"),
    pooling("ave_ceil", "pool: AVE kernel_size: 3 stride: 2"),
    pooling("ave_padded", "pool: AVE kernel_size: 3 stride: 2 pad: 1"),
    pooling("ave_padded_same", "pool: AVE kernel_size: 3 stride: 1 pad: 1"),
    pooling("ave_last_window_dropped", "pool: AVE kernel_size: 2 stride: 2 pad: 1", x=(2, 2, 7, 7)),
    pooling("ave_kernel_below_stride", "pool: AVE kernel_size: 1 stride: 3", x=(2, 2, 7, 10)),
    pooling("ave_kernel_2_stride_3", "pool: AVE kernel_size: 2 stride: 3", x=(2, 2, 7, 8)),
    pooling("ave_ceil_and_padded", "pool: AVE kernel_size: 3 stride: 2 pad: 1", x=(2, 2, 8, 8)),
    pooling("ave_global", "pool: AVE global_pooling: true"),
    single("pyramid", "SPP", "spp_param { pyramid_height: 3 }", x=(2, 2, 9, 7)),
    single("pyramid_ave", "SPP", "spp_param { pyramid_height: 2 pool: AVE }", x=(2, 2, 6, 6)),
    single("pyramid_1", "SPP", "spp_param { pyramid_height: 1 }", x=(2, 2, 6, 6)),
]

INNER = "inner_product_param"
EMBED = "embed_param { num_output: 3 input_dim: 7"
DENSE = [
    single("plain", "InnerProduct", f"{INNER} {{ num_output: 5 }}", x=(3, 2, 3, 2)),
    single("no_bias", "InnerProduct", f"{INNER} {{ num_output: 5 bias_term: false }}", x=(3, 4)),
    single("transposed", "InnerProduct", f"{INNER} {{ num_output: 5 transpose: true }}", x=(3, 4)),
    single("axis_2", "InnerProduct", f"{INNER} {{ num_output: 5 axis: 2 }}", x=(3, 2, 3, 2)),
    single("axis_last", "InnerProduct", f"{INNER} {{ num_output: 5 axis: -1 }}", x=(3, 2, 4)),
    single("axis_0", "InnerProduct", f"{INNER} {{ num_output: 5 axis: 0 }}", x=(3, 4)),
    single(
        "embed",
        "Embed",
        f"{EMBED} }} loss_weight: 1",
        draws={"x": below(7)},
        passes="backward",
        x=(4, 3),
    ),
    single(
        "embed_no_bias",
        "Embed",
        f"{EMBED} bias_term: false }} loss_weight: 1",
        draws={"x": below(7)},
        passes="backward",
        x=(6,),
    ),
    single("scale", "Scale", "scale_param { bias_term: true }", x=MAPS),
    single("scale_no_bias", "Scale", x=MAPS),
    single("scale_axes", "Scale", "scale_param { axis: 1 num_axes: 2 bias_term: true }", x=MAPS),
    single("scale_all", "Scale", "scale_param { axis: 0 num_axes: -1 }", x=(2, 3, 4)),
    single("scale_one", "Scale", "scale_param { num_axes: 0 bias_term: true }", x=MAPS),
    single("scale_two", "Scale", "scale_param { axis: 0 }", x=MAPS, s=(2, 4)),
    single("scale_two_bias", "Scale", "scale_param { bias_term: true }", x=MAPS, s=(4,)),
    single("bias", "Bias", x=MAPS),
    single("bias_axes", "Bias", "bias_param { axis: 2 num_axes: 2 }", x=MAPS),
    single("bias_one", "Bias", "bias_param { num_axes: 0 }", x=MAPS),
    single("bias_two", "Bias", "bias_param { axis: 0 }", x=MAPS, b=(2, 4)),
    Case(
        "parameter_is_in_place",
        inputs(x=MAPS)
        + layer("Scale", "x", "y", "scale_param { bias_term: true }")
        + layer("Bias", "y", "y", name="bias")
        + layer("ReLU", "y", "y", name="relu"),
    ),
]

LINE = (3, 5)
NEURONS = [
    single("relu", "ReLU", x=MAPS),
    single("relu_slope", "ReLU", "relu_param { negative_slope: 0.1 }", x=LINE),
    single("prelu", "PReLU", draws={"layer/0": normal}, x=MAPS),
    single("prelu_shared", "PReLU", "prelu_param { channel_shared: true }", x=MAPS),
    single("prelu_line", "PReLU", x=LINE),
    single("elu", "ELU", x=LINE),
    single("elu_alpha", "ELU", "elu_param { alpha: 0.5 }", x=LINE),
    single("sigmoid", "Sigmoid", x=LINE),
    single("tanh", "TanH", x=LINE),
    single("absval", "AbsVal", x=LINE),
    single("bnll", "BNLL", draws={"x": scaled(5)}, x=LINE),
    single("power", "Power", "power_param { power: 2 scale: 0.5 shift: 3 }", x=LINE),
    single(
        "power_of_fraction",
        "Power",
        "power_param { power: -0.75 scale: 2 shift: 1 }",
        draws={"x": positive},
        x=LINE,
    ),
    single("power_1", "Power", "power_param { scale: -2 shift: 3 }", x=LINE),
    single("power_0", "Power", "power_param { power: 0 scale: 2 shift: 3 }", x=LINE),
    single("power_without_scale", "Power", "power_param { power: 3 scale: 0 shift: 2 }", x=LINE),
    single("exp", "Exp", x=LINE),
    single("exp_base", "Exp", "exp_param { base: 2 scale: 0.5 shift: 1 }", x=LINE),
    single("exp_shift", "Exp", "exp_param { scale: 0.5 shift: 1 }", x=LINE),
    single("log", "Log", draws={"x": positive}, x=LINE),
    single(
        "log_base", "Log", "log_param { base: 10 scale: 2 shift: 1 }", draws={"x": positive}, x=LINE
    ),
    single("dropout_test", "Dropout", "dropout_param { dropout_ratio: 0.4 }", phase="TEST", x=LINE),
    single(
        "threshold", "Threshold", "threshold_param { threshold: 0.3 }", passes="forward", x=LINE
    ),
    single("swish", "Swish", "swish_param { beta: 1.5 }", x=LINE),
]

CONV3 = "convolution_param { num_output: 3 kernel_size: 3 }"
LRN = "local_size: 3 alpha: 0.5 beta: 0.75"
STORED = {"layer/0": scaled(2, 1), "layer/1": positive, "layer/2": these(2.5)}
"""The sums that a BatchNorm has stored, and by what they are divided."""
NORM = [
    single("lrn", "LRN", f"lrn_param {{ {LRN} }}", x=(2, 7, 3, 4)),
    single("lrn_defaults", "LRN", x=(2, 7, 3, 4)),
    single("lrn_k", "LRN", f"lrn_param {{ {LRN} k: 2 }}", x=(2, 7, 3, 4)),
    single("lrn_within", "LRN", f"lrn_param {{ {LRN} norm_region: WITHIN_CHANNEL }}", x=MAPS),
    single(
        "lrn_within_k",
        "LRN",
        "lrn_param { local_size: 5 alpha: 0.4 beta: 0.5 k: 3 norm_region: WITHIN_CHANNEL }",
        x=(2, 2, 8, 9),
    ),
    single("batch", "BatchNorm", stand_in=batch_normalized("x", "y"), x=MAPS),
    single("batch_stored", "BatchNorm", phase="TEST", draws=STORED, x=MAPS),
    single(
        "batch_words",
        "BatchNorm",
        "batch_norm_param { eps: 0.01 moving_average_fraction: 0.9 }",
        stand_in=batch_normalized("x", "y", axes=2, eps=0.01),
        x=(5, 3),
    ),
    single(
        "batch_global_in_train",
        "BatchNorm",
        "batch_norm_param { use_global_stats: true }",
        draws=STORED,
        x=MAPS,
    ),
    single(
        "batch_own_in_test",
        "BatchNorm",
        "batch_norm_param { use_global_stats: false }",
        phase="TEST",
        stand_in=batch_normalized("x", "y"),
        x=MAPS,
    ),
    single("batch_empty", "BatchNorm", phase="TEST", draws={"layer/2": these(0)}, x=MAPS),
    Case(
        "batch_scale_in_place",
        inputs(x=MAPS)
        + layer("Convolution", "x", "y", CONV3)
        + layer("BatchNorm", "y", "y", name="bn")
        + layer("Scale", "y", "y", "scale_param { bias_term: true }", "scale")
        + layer("ReLU", "y", "y", name="relu")
        + layer("Pooling", "y", "z", "pooling_param { kernel_size: 2 stride: 2 }"),
        stand_in=inputs(x=MAPS)
        + layer("Convolution", "x", "_y", CONV3, "y")
        + batch_normalized("_y", "_n")
        + layer("Scale", "_n", "_s", "scale_param { bias_term: true }", "scale")
        + layer("ReLU", "_s", "y", name="relu")
        + layer("Pooling", "y", "z", "pooling_param { kernel_size: 2 stride: 2 }"),
    ),
    single("mvn", "MVN", x=MAPS),
    single("mvn_mean", "MVN", "mvn_param { normalize_variance: false }", x=MAPS),
    single("mvn_across", "MVN", "mvn_param { across_channels: true eps: 0.00001 }", x=MAPS),
]

SHAPES = [
    single("eltwise", "Eltwise", x=LINE, z=LINE),
    single(
        "eltwise_coefficients",
        "Eltwise",
        "eltwise_param { operation: SUM coeff: 0.5 coeff: -2 coeff: 1 }",
        x=LINE,
        z=LINE,
        w=LINE,
    ),
    single("product", "Eltwise", "eltwise_param { operation: PROD }", x=LINE, z=LINE, w=LINE),
    single(
        "product_unstable",
        "Eltwise",
        "eltwise_param { operation: PROD stable_prod_grad: false }",
        x=LINE,
        z=LINE,
    ),
    single("maximum", "Eltwise", "eltwise_param { operation: MAX }", x=LINE, z=LINE, w=LINE),
    single("concat", "Concat", x=(2, 1, 3, 2), z=(2, 3, 3, 2), w=(2, 2, 3, 2)),
    single("concat_0", "Concat", "concat_param { axis: 0 }", x=(2, 3), z=(1, 3)),
    single("concat_last", "Concat", "concat_param { axis: -1 }", x=(2, 3), z=(2, 4)),
    single("concat_dim", "Concat", "concat_param { concat_dim: 1 }", x=(2, 3), z=(2, 4)),
    single("slice", "Slice", tops="a b", x=MAPS),
    single(
        "slice_points",
        "Slice",
        "slice_param { axis: 2 slice_point: 1 slice_point: 4 }",
        tops="a b c",
        x=MAPS,
    ),
    single("slice_dim", "Slice", "slice_param { slice_dim: 0 }", tops="a b", x=(2, 3)),
    single("crop", "Crop", "crop_param { offset: 1 }", x=MAPS, like=(1, 1, 4, 5)),
    single(
        "crop_axis",
        "Crop",
        "crop_param { axis: 1 offset: 2 offset: 0 offset: 3 }",
        x=MAPS,
        like=(2, 2, 5, 4),
    ),
    single("flatten", "Flatten", x=MAPS),
    single("flatten_axes", "Flatten", "flatten_param { axis: 0 end_axis: -3 }", x=MAPS),
    single("reshape", "Reshape", "reshape_param { shape { dim: 0 dim: 2 dim: -1 } }", x=MAPS),
    single(
        "reshape_axes",
        "Reshape",
        "reshape_param { shape { dim: 2 dim: -1 } axis: 1 num_axes: 2 }",
        x=MAPS,
    ),
    single(
        "reshape_insert",
        "Reshape",
        "reshape_param { shape { dim: 1 dim: 1 } axis: -1 num_axes: 0 }",
        x=LINE,
    ),
    single(
        "permute",
        "Permute",
        "permute_param { order: 0 order: 2 order: 3 order: 1 }",
        x=(2, 3, 4, 2),
    ),
    single("permute_some", "Permute", "permute_param { order: 2 }", x=(2, 3, 4)),
    single("softmax", "Softmax", x=(2, 5, 3)),
    single("softmax_axis", "Softmax", "softmax_param { axis: -1 }", x=(2, 5, 3)),
    single("softmax_0", "Softmax", "softmax_param { axis: 0 }", draws={"x": scaled(30)}, x=(4, 2)),
    single("argmax", "ArgMax", passes="forward", x=(3, 2, 4)),
    single(
        "argmax_values",
        "ArgMax",
        "argmax_param { top_k: 2 out_max_val: true }",
        passes="forward",
        x=LINE,
    ),
    single(
        "argmax_axis", "ArgMax", "argmax_param { axis: 1 top_k: 2 }", passes="forward", x=(2, 4, 3)
    ),
    single(
        "argmax_axis_values",
        "ArgMax",
        "argmax_param { axis: -1 out_max_val: true }",
        passes="forward",
        x=(2, 4, 3),
    ),
    single("reduction", "Reduction", x=(2, 3, 4)),
    single("reduction_axis", "Reduction", "reduction_param { axis: 1 coeff: 3 }", x=(2, 3, 4)),
    single("asum", "Reduction", "reduction_param { operation: ASUM axis: -1 }", x=(2, 3, 4)),
    single("sumsq", "Reduction", "reduction_param { operation: SUMSQ axis: 1 }", x=(2, 3, 4)),
    single("mean", "Reduction", "reduction_param { operation: MEAN axis: 1 coeff: 2 }", x=LINE),
    single("tile", "Tile", "tile_param { tiles: 3 }", x=(2, 2, 3)),
    single("tile_axis", "Tile", "tile_param { axis: -1 tiles: 2 }", x=(2, 2, 3)),
    single("reverse", "Reverse", x=(3, 2, 2)),
    Case(
        "batch_reindex",
        inputs(x=(3, 4), index=(4,))
        + layer("InnerProduct", "x", "a", "inner_product_param { num_output: 2 }")
        + layer("BatchReindex", "a index", "y", "loss_weight: 1"),
        draws={"index": these(0, 2, 2, 1)},
        passes="backward",
    ),
    Case(
        "split_and_silence",
        inputs(x=MAPS, z=LINE)
        + layer("ReLU", "x", "a")
        + layer("Power", "x", "b", "power_param { power: 2 }")
        + layer("Eltwise", "a b", "y")
        + layer("Power", "x", "c")
        + layer("Silence", "z c", ""),
    ),
    Case(
        "parameter",
        inputs(x=LINE)
        + layer("Parameter", "", "p", "parameter_param { shape { dim: 3 dim: 5 } }")
        + layer("Eltwise", "x p", "y", "eltwise_param { operation: PROD }"),
    ),
]

CONT = {"cont": these(0, 0, 1, 1, 1, 0, 1, 1)}
"""Where a sequence goes on, (time, batch)."""
OWN = "recurrent_param { num_output: 3 }"
EXPOSED = "recurrent_param { num_output: 3 expose_hidden: true }"
STEPS, MARKS, STATE = (4, 2, 5), (4, 2), (1, 2, 3)


def recurrent(
    name: str, kind: str, words: str = OWN, tops: str = "y", **more: tuple[int, ...]
) -> Case:
    shapes = {"x": STEPS, "cont": MARKS, **more}
    net = inputs(**shapes) + layer(kind, " ".join(shapes), tops, words, "layer")
    return Case(name, net, draws=CONT, skipped=("cont", "h0", "c0"))


RECURRENT = [
    recurrent("lstm", "LSTM"),
    recurrent("lstm_images", "LSTM", x=(4, 2, 2, 2)),
    recurrent("lstm_static", "LSTM", still=(2, 4)),
    recurrent("lstm_exposed", "LSTM", EXPOSED, "y h c", h0=STATE, c0=STATE),
    recurrent("rnn", "RNN"),
    recurrent("rnn_static", "RNN", still=(2, 4)),
    recurrent("rnn_exposed", "RNN", EXPOSED, "y h", h0=STATE),
]

FAMILIES = {
    "convolution": CONVOLUTION,
    "pooling": POOLING,
    "dense": DENSE,
    "neurons": NEURONS,
    "norm": NORM,
    "shapes": SHAPES,
    "recurrent": RECURRENT,
    "more": MORE,
}
