"""Cases of whole nets: what the layers of a net have to do with one another, and old forms."""

from __future__ import annotations

from tools.caffe_goldens.cases import Case, below, inputs, layer, these

CONV = "convolution_param { num_output: 4 kernel_size: 3 pad: 1"
INNER = "inner_product_param { num_output: 3 }"
CLASSES = {"label": below(3)}

WHOLE = """
name: "whole"
DATA
layer {
  name: "conv1" type: "Convolution" bottom: "data" top: "conv1"
  param { lr_mult: 1 decay_mult: 1 } param { lr_mult: 2 decay_mult: 0 }
  convolution_param { num_output: 6 kernel_size: 3 pad: 1 }
}
layer { name: "relu1" type: "ReLU" bottom: "conv1" top: "conv1" }
layer {
  name: "pool1" type: "Pooling" bottom: "conv1" top: "pool1"
  pooling_param { pool: MAX kernel_size: 3 stride: 2 }
}
layer {
  name: "norm1" type: "LRN" bottom: "pool1" top: "norm1"
  lrn_param { local_size: 5 alpha: 0.1 beta: 0.75 }
}
layer {
  name: "conv2" type: "Convolution" bottom: "norm1" top: "conv2"
  param { lr_mult: 0.5 } param { lr_mult: 2 decay_mult: 0 }
  convolution_param { num_output: 8 kernel_size: 3 pad: 1 group: 2 }
}
layer { name: "relu2" type: "ReLU" bottom: "conv2" top: "conv2" }
layer {
  name: "norm2" type: "LRN" bottom: "conv2" top: "norm2"
  lrn_param { local_size: 3 alpha: 0.2 beta: 0.75 norm_region: WITHIN_CHANNEL }
}
layer {
  name: "pool2" type: "Pooling" bottom: "norm2" top: "pool2"
  pooling_param { pool: AVE kernel_size: 3 stride: 2 pad: 1 }
}
layer {
  name: "aux/pool" type: "Pooling" bottom: "norm1" top: "aux/pool"
  pooling_param { pool: AVE global_pooling: true }
}
layer {
  name: "aux/classifier" type: "InnerProduct" bottom: "aux/pool" top: "aux/classifier"
  param { lr_mult: 3 decay_mult: 2 } param { lr_mult: 1 decay_mult: 0 }
  inner_product_param { num_output: 5 }
}
layer {
  name: "aux/loss" type: "SoftmaxWithLoss" bottom: "aux/classifier" bottom: "label"
  top: "aux/loss" loss_weight: 0.3
}
layer {
  name: "mix/1x1" type: "Convolution" bottom: "pool2" top: "mix/1x1"
  convolution_param { num_output: 3 kernel_size: 1 }
}
layer {
  name: "mix/pool" type: "Pooling" bottom: "pool2" top: "mix/pool"
  pooling_param { pool: MAX kernel_size: 3 stride: 1 pad: 1 }
}
layer { name: "mix" type: "Concat" bottom: "mix/1x1" bottom: "mix/pool" top: "mix" }
layer {
  name: "drop" type: "Dropout" bottom: "mix" top: "mix" dropout_param { dropout_ratio: 0 }
}
layer {
  name: "ip" type: "InnerProduct" bottom: "mix" top: "ip"
  param { lr_mult: 1 decay_mult: 1 } param { lr_mult: 2 decay_mult: 0 }
  inner_product_param { num_output: 5 }
}
layer {
  name: "loss" type: "SoftmaxWithLoss" bottom: "ip" bottom: "label" top: "loss"
}
"""
"""Ceil and padded pooling, both LRNs, groups, an auxiliary loss, multipliers; DATA stands for the
layer that gives data (4, 3, 10, 10) and label (4).
"""

V1 = """
input: "data" input: "label"
input_dim: 2 input_dim: 3 input_dim: 6 input_dim: 5
input_dim: 2 input_dim: 1 input_dim: 1 input_dim: 1
layers {
  name: "conv" type: CONVOLUTION bottom: "data" top: "conv" blobs_lr: 1 blobs_lr: 2
  weight_decay: 1 weight_decay: 0 convolution_param { num_output: 4 kernel_size: 3 }
}
layers { name: "relu" type: RELU bottom: "conv" top: "conv" }
layers {
  name: "pool" type: POOLING bottom: "conv" top: "pool"
  pooling_param { kernel_size: 3 stride: 2 }
}
layers {
  name: "drop" type: DROPOUT bottom: "pool" top: "pool" dropout_param { dropout_ratio: 0.5 }
  include { phase: TRAIN }
}
layers {
  name: "ip" type: INNER_PRODUCT bottom: "pool" top: "ip" inner_product_param { num_output: 3 }
}
layers { name: "loss" type: SOFTMAX_LOSS bottom: "ip" bottom: "label" top: "loss" }
layers {
  name: "accuracy" type: ACCURACY bottom: "ip" bottom: "label" top: "accuracy"
  include { phase: TEST }
}
"""
V0 = """
input: "data" input: "label"
input_dim: 2 input_dim: 3 input_dim: 6 input_dim: 5
input_dim: 2 input_dim: 1 input_dim: 1 input_dim: 1
layers {
  layer { name: "pad" type: "padding" pad: 1 } bottom: "data" top: "pad"
}
layers {
  layer { name: "conv" type: "conv" num_output: 4 kernelsize: 3 blobs_lr: 1 blobs_lr: 2 }
  bottom: "pad" top: "conv"
}
layers { layer { name: "relu" type: "relu" } bottom: "conv" top: "conv" }
layers {
  layer { name: "pool" type: "pool" pool: MAX kernelsize: 3 stride: 2 } bottom: "conv" top: "pool"
}
layers {
  layer { name: "norm" type: "lrn" local_size: 3 alpha: 0.1 beta: 0.75 } bottom: "pool" top: "norm"
}
layers { layer { name: "ip" type: "innerproduct" num_output: 3 } bottom: "norm" top: "ip" }
layers { layer { name: "loss" type: "softmax_loss" } bottom: "ip" bottom: "label" top: "loss" }
"""
DEPLOY = """
name: "deploy"
input: "data"
input_shape { dim: 2 dim: 3 dim: 6 dim: 5 }
layer {
  name: "conv" type: "Convolution" bottom: "data" top: "conv"
  convolution_param { num_output: 4 kernel_size: 3 }
}
layer { name: "ip" type: "InnerProduct" bottom: "conv" top: "ip" inner_product_param {
  num_output: 3 } }
layer { name: "prob" type: "Softmax" bottom: "ip" top: "prob" }
"""

FROZEN = "param { lr_mult: 0 } param { lr_mult: 0 }"


def inner(bottom: str, top: str, words: str = "") -> str:
    return layer("InnerProduct", bottom, top, f"{INNER} {words}")


def own(name: str, rules: str) -> str:
    """A layer in place that not every state of the net has."""
    return layer("Scale", "ip", "ip", f"scale_param {{ bias_term: true }} {rules}", name)


PHASES = (
    inputs(data=(2, 4), label=(2,))
    + inner("data", "ip")
    + own("train", "include { phase: TRAIN }")
    + own("test", "include { phase: TEST }")
    + own("not_test", "exclude { phase: TEST }")
    + own("extra", 'include { stage: "extra" }')
    + own("not_extra", 'include { phase: TEST not_stage: "extra" }')
    + own("level", "include { min_level: 1 }")
    + layer("SoftmaxWithLoss", "ip label", "loss")
)
GATED = (
    inputs(x=(2, 6, 1, 1), label=(2,))
    + inner("x", "left")
    + inner("x", "right")
    + layer("Slice", "left", "a1 a2 a3", name="cut_left")
    + layer("Slice", "right", "b1 b2 b3", name="cut_right")
    + layer("Eltwise", "a1 a2", "a", "eltwise_param { operation: MAX }")
    + layer("Eltwise", "b1 b2", "b", "eltwise_param { operation: MAX }")
    + layer("Concat", "a b", "both")
    + layer("Softmax", "both", "shares")
    + layer("Slice", "shares", "p q", name="cut_shares")
    + inner("p", "gate_left", FROZEN)
    + inner("q", "gate_right", FROZEN)
    + layer("Eltwise", "left gate_left", "y", "eltwise_param { operation: PROD }")
    + layer("Eltwise", "right gate_right", "z", "eltwise_param { operation: PROD }")
    + layer("Eltwise", "y z", "sum")
    + layer("SoftmaxWithLoss", "sum label", "loss")
)
"""Two layers, each times its share, which comes of both: a3 and b3 are taken by nobody, and layers
that learn nothing stand between.
"""
SIAMESE = (
    inputs(a=(3, 4), b=(3, 4), similar=(3,))
    + inner("a", "ya", 'param { name: "w" } param { name: "b" }')
    + inner("b", "yb", 'param { name: "w" } param { name: "b" }')
    + layer("ContrastiveLoss", "ya yb similar", "loss")
)

NETS = [
    Case(
        "whole",
        WHOLE.replace("DATA", inputs(data=(4, 3, 10, 10), label=(4,))),
        draws={"label": below(5)},
    ),
    Case("v1", V1, phase="TEST", draws=CLASSES, passes="forward"),
    Case("v1_train", V1.replace("ratio: 0.5", "ratio: 0"), draws=CLASSES),
    Case("v0", V0, draws=CLASSES),
    Case("deploy", DEPLOY, phase="TEST"),
    Case("phase_train", PHASES, draws=CLASSES),
    Case("phase_test", PHASES, phase="TEST", draws=CLASSES),
    Case("stage", PHASES, phase="TEST", draws=CLASSES, stages=("extra",)),
    Case("gated", GATED, draws=CLASSES),
    Case("gated_as_the_loss_asks", GATED, draws=CLASSES, passes="backward"),
    Case("shared", SIAMESE, draws={"similar": these(1, 0, 1)}),
    # In place, Caffe's ReLU and Power have right gradients only where no layer behind them needs
    # what stood there.
    Case(
        "in_place",
        inputs(x=(2, 3, 5, 5))
        + layer("Convolution", "x", "y", f"{CONV} }}")
        + layer("Scale", "y", "y", "scale_param { bias_term: true }", "scale")
        + layer("ReLU", "y", "y", "relu_param { negative_slope: 0.1 }", "relu")
        + layer("Dropout", "y", "y", "dropout_param { dropout_ratio: 0 }", "drop")
        + layer("Eltwise", "y y", "z")
        + layer("TanH", "z", "z", name="tanh"),
    ),
    Case(
        "in_place_then_read",
        inputs(x=(2, 3, 5, 5))
        + layer("Convolution", "x", "y", f"{CONV} }}")
        + layer("ReLU", "y", "y", name="relu")
        + layer("Pooling", "y", "p", "pooling_param { kernel_size: 2 stride: 2 }")
        + layer("Pooling", "y", "q", "pooling_param { pool: AVE kernel_size: 2 stride: 2 }")
        + layer("Eltwise", "p q", "s", "eltwise_param { operation: PROD }"),
    ),
    Case(
        "weights_of_losses",
        inputs(x=(3, 4), label=(3,), target=(3, 3))
        + inner("x", "a")
        + inner("x", "b")
        + layer("SoftmaxWithLoss", "a label", "first", "loss_weight: 0.3")
        + layer("EuclideanLoss", "b target", "second", "loss_weight: 2")
        + layer("HingeLoss", "b label", "third", "loss_weight: 0")
        + layer(
            "Reduction", "a", "fourth", "reduction_param { operation: SUMSQ } loss_weight: 0.1"
        ),
        draws=CLASSES,
    ),
    Case(
        "loss_without_top",
        inputs(x=(3, 4), label=(3,)) + inner("x", "a") + layer("SoftmaxWithLoss", "a label", ""),
        draws=CLASSES,
    ),
]

FAMILIES = {"nets": NETS}
