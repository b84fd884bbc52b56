"""Further cases of layers beside the common ones: defaults, equal values, levels, streams."""

from __future__ import annotations

from tools.caffe_goldens.cases import Case, below, inputs, layer, single, these

MAPS = (2, 4, 5, 6)
SMALL = {"x": below(3)}
"""So that many values are equal."""
DENSE = "inner_product_param { num_output: 3 }"
SQUARES = "reduction_param { operation: SUMSQ } loss_weight: 1"


def argmax(name: str, words: str, x: tuple[int, ...], equal: bool = False) -> Case:
    draws = SMALL if equal else {}
    return single(name, "ArgMax", f"argmax_param {{ {words} }}", draws=draws, passes="forward", x=x)


def pyramid(name: str, words: str, x: tuple[int, ...]) -> Case:
    return single(name, "SPP", f"spp_param {{ {words} }}", x=x)


MORE = [
    single("crop_default", "Crop", x=MAPS, like=(9, 1, 2, 4)),
    single("reverse_axis", "Reverse", "reverse_param { axis: 1 }", x=(2, 3, 2)),
    single("mvn_eps", "MVN", "mvn_param { eps: 0.5 }", x=MAPS),
    argmax("argmax_maps", "top_k: 2 out_max_val: true", (3, 2, 4, 2)),
    argmax("argmax_channels", "axis: 1 top_k: 2", (2, 4, 3, 2)),
    argmax("argmax_equal", "axis: 1", (4, 9), equal=True),
    argmax("argmax_equal_top", "top_k: 4", (4, 9), equal=True),
    single(
        "sumsq_coeff", "Reduction", "reduction_param { operation: SUMSQ axis: 2 coeff: -2 }", x=MAPS
    ),
    pyramid("pyramid_4", "pyramid_height: 4", (1, 2, 15, 24)),
    pyramid("pyramid_ave_3", "pyramid_height: 3 pool: AVE", (2, 2, 9, 7)),
    pyramid("pyramid_ave_4", "pyramid_height: 4 pool: AVE", (1, 2, 15, 24)),
    pyramid("pyramid_ave_1", "pyramid_height: 1 pool: AVE", (2, 2, 5, 6)),
    Case(
        "filter",
        inputs(x=(6, 2), z=(6, 2, 2), chosen=(6, 1, 1))
        + layer("InnerProduct", "x", "a", DENSE)
        + layer("Filter", "a z chosen", "y w")
        + layer("Reduction", "y", "loss", SQUARES),
        draws={"chosen": these(0, 1, 1, 0, 0.5, 0)},
        passes="backward",
    ),
    single(
        "lstm_unit",
        "LSTMUnit",
        tops="c h",
        draws={"cont": these(1, 0)},
        skipped=("cont",),
        state=(1, 2, 3),
        gates=(1, 2, 12),
        cont=(1, 2),
    ),
    Case(
        "continuation",
        inputs(x=(4, 2))
        + layer(
            "ContinuationIndicator",
            "",
            "cont",
            "continuation_indicator_param { time_step: 4 batch_size: 2 }",
        )
        + layer("Eltwise", "x cont", "y"),
        skipped=("cont",),
    ),
]
