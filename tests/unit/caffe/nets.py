"""Prototxts with all that such files have, to be damaged."""

from itertools import product

CURRENT = """
name: "small" # comment
layer { name: "data" type: "Data" top: "data" top: "label" include { phase: TRAIN }
  transform_param { mirror: true crop_size: 24 mean_value: [104, 117, 123] scale: 0.00390625 }
  data_param { source: "train_lmdb" batch_size: 32 backend: LMDB } }
layer { name: "conv1" type: "Convolution" bottom: "data" top: "conv1"
  param { lr_mult: 1 decay_mult: 1 } param { lr_mult: 2 decay_mult: 0 name: "b" share_mode: STRICT }
  convolution_param { num_output: 8 kernel_h: 3 kernel_w: 5 pad: 1 stride: 2 group: 2
    weight_filler { type: "xavier" variance_norm: AVERAGE } bias_filler < value: -.5 > } }
layer { name: "bn" type: "BatchNorm" bottom: "conv1" top: "conv1"
  param { lr_mult: 0 } param { lr_mult: 0 } param { lr_mult: 1 } }
layer { name: "loss" type: "SoftmaxWithLoss" bottom: "conv1" bottom: "label" loss_weight: 3e-1 }
"""
V1 = """
name: 'old' input: "data" input_dim: 1 input_dim: 3 input_dim: 8 input_dim: 8
layers { name: "c" type: CONVOLUTION bottom: "data" top: "c" param: "w" param: "b"
  blob_share_mode: PERMISSIVE blobs_lr: 1 blobs_lr: 2 weight_decay: 1 weight_decay: 0
  convolution_param { num_output: 4 kernel_size: 3 } exclude { phase: TEST stage: "s" } }
layers { name: "d" type: DATA top: "x" data_param { source: "s" scale: 0.5 mirror: true } }
layers { name: "r" type: 18 bottom: "c" top: "c" include { min_level: -1 not_stage: "q" } }
"""
V0 = """
input: "data" input_shape { dim: [1, 3, 8, 8] }
layers { layer { name: "p" type: "padding" pad: 2 } bottom: "data" top: "padded" }
layers { layer { name: "c" type: "conv" num_output: 4 kernelsize: 3 blobs_lr: 1. weight_decay: 1.
  weight_filler { type: "gaussian" std: 0.1 } } bottom: "padded" top: "c" }
layers { layer { name: "q" type: "pool" pool: MAX kernelsize: 2 } bottom: "c" top: "q" }
layers { layer { name: "i" type: "images" source: "l" meanfile: "m" cropsize: 8 } top: "x" }
"""
SOLVER = """
net: "net.prototxt"; test_iter: 10, test_interval: 0x10 base_lr: 1e-2 momentum: .9
lr_policy: "multistep" stepvalue: [10, 20,\t30] gamma: 0.1f solver_mode: GPU type: "SGD"
snapshot_prefix: "a" 'b' "\\x63\\144\\t" random_seed: -1 clip_gradients: inf
train_state { stage: "s" level: 1 } test_state: < stage: "t" > regularization_type: L1
"""
WORDS = """
a: nan b: -inf c: [ ] d { e { f { g { h: 07 } } } } i: - 3 j: "\\u4f60\\U0001F600" k [ { }, < > ]
layer { type: "Python" python_param { module: "m" layer: "L" param_str: "{'a': \\"b\\"}" } }
layer { include { } exclude { phase: TRAIN } } state { stage: "s" level: 2 phase: TEST }
"""
FORMS = {"current": CURRENT, "v1": V1, "v0": V0, "solver": SOLVER, "words": WORDS}


def texts() -> dict[str, bytes]:
    """Thirteen files: each form, and three as an editor of Windows or of China leaves them."""
    found = {name: text.encode() for name, text in FORMS.items()}
    comment = "# 卷积层\r\n".encode("gbk")
    for (name, text), way in product([*FORMS.items()][:4], ("crlf", "one line")):
        if way == "crlf":
            found[f"{name}, {way}"] = (
                b"\xef\xbb\xbf" + comment + text.replace("\n", "\r\n").encode()
            )
        else:
            found[f"{name}, {way}"] = text.replace("# comment", "").replace("\n", " ").encode()
    return found
