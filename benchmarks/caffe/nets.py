"""AlexNet and GoogLeNet as prototxts, made from what their papers say: what is timed and tried."""

CONV = """layer {{ name: "{name}" type: "Convolution" bottom: "{bottom}" top: "{name}"
  param {{ lr_mult: 1 decay_mult: 1 }} param {{ lr_mult: 2 decay_mult: 0 }}
  convolution_param {{ num_output: {outputs} kernel_size: {kernel} stride: {stride} pad: {pad}
    group: {group} weight_filler {{ {filler} }}
    bias_filler {{ type: "constant" value: {bias} }} }} }}
layer {{ name: "{name}/relu" type: "ReLU" bottom: "{name}" top: "{name}" }}
"""
POOL = """layer {{ name: "{name}" type: "Pooling" bottom: "{bottom}" top: "{name}"
  pooling_param {{ pool: {method} kernel_size: {kernel} stride: {stride} pad: {pad} }} }}
"""
NORM = """layer {{ name: "{name}" type: "LRN" bottom: "{bottom}" top: "{name}"
  lrn_param {{ local_size: 5 alpha: 0.0001 beta: 0.75 }} }}
"""
FULL = """layer {{ name: "{name}" type: "InnerProduct" bottom: "{bottom}" top: "{name}"
  inner_product_param {{ num_output: {outputs} weight_filler {{ {filler} }}
    bias_filler {{ type: "constant" value: {bias} }} }} }}
"""
IN_PLACE = """layer {{ name: "{blob}/{type}" type: "{type}" bottom: "{blob}" top: "{blob}" {more} }}
"""
LOSS = """layer {{ name: "{name}" type: "SoftmaxWithLoss" bottom: "{bottom}" bottom: "label"
  top: "{name}" loss_weight: {weight} }}
"""
XAVIER = 'type: "xavier"'


def _data(name: str, batch: int, size: int, labels: bool) -> str:
    head = f'name: "{name}"\nlayer {{ name: "data" type: "Input" top: "data"'
    shapes = f"shape {{ dim: {batch} dim: 3 dim: {size} dim: {size} }}"
    if labels:
        head += ' top: "label"'
        shapes += f" shape {{ dim: {batch} }}"
    return f"{head} input_param {{ {shapes} }} }}\n"


def alexnet(batch: int = 1, classes: int = 1000, labels: bool = False) -> str:
    """Two groups, normalization before pooling; with labels, its loss."""

    def gaussian(std: float) -> str:
        return f'type: "gaussian" std: {std}'

    def conv(name: str, bottom: str, outputs: int, kernel: int, **more: object) -> str:
        words = {"stride": 1, "pad": kernel // 2, "group": 1, "bias": 0.0, **more}
        return CONV.format(
            name=name, bottom=bottom, outputs=outputs, kernel=kernel, filler=gaussian(0.01), **words
        )

    def pool(name: str, bottom: str) -> str:
        return POOL.format(name=name, bottom=bottom, method="MAX", kernel=3, stride=2, pad=0)

    def full(name: str, bottom: str, outputs: int, std: float, bias: float) -> str:
        return FULL.format(
            name=name, bottom=bottom, outputs=outputs, filler=gaussian(std), bias=bias
        )

    def behind(blob: str) -> str:
        dropout = "dropout_param { dropout_ratio: 0.5 }"
        return IN_PLACE.format(blob=blob, type="ReLU", more="") + IN_PLACE.format(
            blob=blob, type="Dropout", more=dropout
        )

    parts = [
        _data("AlexNet", batch, 227, labels),
        conv("conv1", "data", 96, 11, stride=4, pad=0),
        NORM.format(name="norm1", bottom="conv1"),
        pool("pool1", "norm1"),
        conv("conv2", "pool1", 256, 5, group=2, bias=0.1),
        NORM.format(name="norm2", bottom="conv2"),
        pool("pool2", "norm2"),
        conv("conv3", "pool2", 384, 3),
        conv("conv4", "conv3", 384, 3, group=2, bias=0.1),
        conv("conv5", "conv4", 256, 3, group=2, bias=0.1),
        pool("pool5", "conv5"),
        full("fc6", "pool5", 4096, 0.005, 0.1),
        behind("fc6"),
        full("fc7", "fc6", 4096, 0.005, 0.1),
        behind("fc7"),
        full("fc8", "fc7", classes, 0.01, 0.0),
    ]
    if labels:
        parts.append(LOSS.format(name="loss", bottom="fc8", weight=1))
    return "".join(parts)


WIDTHS = {
    "3a": (64, 96, 128, 16, 32, 32),
    "3b": (128, 128, 192, 32, 96, 64),
    "4a": (192, 96, 208, 16, 48, 64),
    "4b": (160, 112, 224, 24, 64, 64),
    "4c": (128, 128, 256, 24, 64, 64),
    "4d": (112, 144, 288, 32, 64, 64),
    "4e": (256, 160, 320, 32, 128, 128),
    "5a": (256, 160, 320, 32, 128, 128),
    "5b": (384, 192, 384, 48, 128, 128),
}
"""Of the Inception blocks, as the columns of the paper's table 1."""


def googlenet(batch: int = 1, classes: int = 1000, labels: bool = False, heads: bool = True) -> str:
    """With both auxiliary heads unless told otherwise; with labels, the losses."""

    def conv(name: str, bottom: str, outputs: int, kernel: int, stride: int = 1) -> str:
        words = {"stride": stride, "pad": kernel // 2, "group": 1, "bias": 0.2}
        return CONV.format(
            name=name, bottom=bottom, outputs=outputs, kernel=kernel, filler=XAVIER, **words
        )

    def pool(
        name: str, bottom: str, stride: int = 2, pad: int = 0, method: str = "MAX", kernel: int = 3
    ) -> str:
        return POOL.format(
            name=name, bottom=bottom, method=method, kernel=kernel, stride=stride, pad=pad
        )

    def full(name: str, bottom: str, outputs: int, bias: float) -> str:
        return FULL.format(name=name, bottom=bottom, outputs=outputs, filler=XAVIER, bias=bias)

    def dropout(blob: str, ratio: float) -> str:
        more = f"dropout_param {{ dropout_ratio: {ratio} }}"
        return IN_PLACE.format(blob=blob, type="Dropout", more=more)

    def inception(name: str, bottom: str) -> str:
        one, reduce3, three, reduce5, five, projection = WIDTHS[name]
        at = f"inception_{name}"
        branches = ("1x1", "3x3", "5x5", "pool_proj")
        bottoms = " ".join(f'bottom: "{at}/{branch}"' for branch in branches)
        return "".join(
            [
                conv(f"{at}/1x1", bottom, one, 1),
                conv(f"{at}/3x3_reduce", bottom, reduce3, 1),
                conv(f"{at}/3x3", f"{at}/3x3_reduce", three, 3),
                conv(f"{at}/5x5_reduce", bottom, reduce5, 1),
                conv(f"{at}/5x5", f"{at}/5x5_reduce", five, 5),
                pool(f"{at}/pool", bottom, stride=1, pad=1),
                conv(f"{at}/pool_proj", f"{at}/pool", projection, 1),
                f'layer {{ name: "{at}" type: "Concat" {bottoms} top: "{at}" }}\n',
            ]
        )

    def head(number: int, bottom: str) -> str:
        at = f"loss{number}"
        parts = [
            pool(f"{at}/ave_pool", bottom, stride=3, method="AVE", kernel=5),
            conv(f"{at}/conv", f"{at}/ave_pool", 128, 1),
            full(f"{at}/fc", f"{at}/conv", 1024, 0.2),
            IN_PLACE.format(blob=f"{at}/fc", type="ReLU", more=""),
            dropout(f"{at}/fc", 0.7),
            full(f"{at}/classifier", f"{at}/fc", classes, 0.0),
        ]
        if labels:
            parts.append(LOSS.format(name=f"{at}/loss", bottom=f"{at}/classifier", weight=0.3))
        return "".join(parts)

    parts = [
        _data("GoogLeNet", batch, 224, labels),
        conv("conv1/7x7_s2", "data", 64, 7, stride=2),
        pool("pool1", "conv1/7x7_s2"),
        NORM.format(name="pool1/norm1", bottom="pool1"),
        conv("conv2/3x3_reduce", "pool1/norm1", 64, 1),
        conv("conv2/3x3", "conv2/3x3_reduce", 192, 3),
        NORM.format(name="conv2/norm2", bottom="conv2/3x3"),
        pool("pool2", "conv2/norm2"),
        inception("3a", "pool2"),
        inception("3b", "inception_3a"),
        pool("pool3", "inception_3b"),
        inception("4a", "pool3"),
        head(1, "inception_4a") if heads else "",
        inception("4b", "inception_4a"),
        inception("4c", "inception_4b"),
        inception("4d", "inception_4c"),
        head(2, "inception_4d") if heads else "",
        inception("4e", "inception_4d"),
        pool("pool4", "inception_4e"),
        inception("5a", "pool4"),
        inception("5b", "inception_5a"),
        pool("pool5", "inception_5b", stride=1, method="AVE", kernel=7),
        dropout("pool5", 0.4),
        full("loss3/classifier", "pool5", classes, 0.0),
    ]
    if labels:
        parts.append(LOSS.format(name="loss3/loss3", bottom="loss3/classifier", weight=1))
    return "".join(parts)
