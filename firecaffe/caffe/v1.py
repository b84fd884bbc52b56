"""Layers of Caffe before 2015: `layers { type: CONVOLUTION blobs_lr: 1 weight_decay: 1 … }`."""

from collections.abc import Sequence

from firecaffe.caffe.message import Field, Message, Word

TYPES = {
    "NONE": (0, ""),
    "ACCURACY": (1, "Accuracy"),
    "BNLL": (2, "BNLL"),
    "CONCAT": (3, "Concat"),
    "CONVOLUTION": (4, "Convolution"),
    "DATA": (5, "Data"),
    "DROPOUT": (6, "Dropout"),
    "EUCLIDEAN_LOSS": (7, "EuclideanLoss"),
    "FLATTEN": (8, "Flatten"),
    "HDF5_DATA": (9, "HDF5Data"),
    "HDF5_OUTPUT": (10, "HDF5Output"),
    "IM2COL": (11, "Im2col"),
    "IMAGE_DATA": (12, "ImageData"),
    "INFOGAIN_LOSS": (13, "InfogainLoss"),
    "INNER_PRODUCT": (14, "InnerProduct"),
    "LRN": (15, "LRN"),
    "MULTINOMIAL_LOGISTIC_LOSS": (16, "MultinomialLogisticLoss"),
    "POOLING": (17, "Pooling"),
    "RELU": (18, "ReLU"),
    "SIGMOID": (19, "Sigmoid"),
    "SOFTMAX": (20, "Softmax"),
    "SOFTMAX_LOSS": (21, "SoftmaxWithLoss"),
    "SPLIT": (22, "Split"),
    "TANH": (23, "TanH"),
    "WINDOW_DATA": (24, "WindowData"),
    "ELTWISE": (25, "Eltwise"),
    "POWER": (26, "Power"),
    "SIGMOID_CROSS_ENTROPY_LOSS": (27, "SigmoidCrossEntropyLoss"),
    "HINGE_LOSS": (28, "HingeLoss"),
    "MEMORY_DATA": (29, "MemoryData"),
    "ARGMAX": (30, "ArgMax"),
    "THRESHOLD": (31, "Threshold"),
    "DUMMY_DATA": (32, "DummyData"),
    "SLICE": (33, "Slice"),
    "MVN": (34, "MVN"),
    "ABSVAL": (35, "AbsVal"),
    "SILENCE": (36, "Silence"),
    "CONTRASTIVE_LOSS": (37, "ContrastiveLoss"),
    "EXP": (38, "Exp"),
    "DECONVOLUTION": (39, "Deconvolution"),
}
"""The number, from a real Caffe's enum, and today's name of each member."""
FORKS = {
    "CROP": "Crop",
    "INTERP": "Interp",
    "NORMALIZE": "Normalize",
    "PRELU": "PReLU",
    "PYTHON": "Python",
    "RESHAPE": "Reshape",
    "ROI_POOLING": "ROIPooling",
    "SMOOTH_L1_LOSS": "SmoothL1Loss",
}
"""Members that forks added, with today's names. Their numbers differed between forks."""
NAMES = {name: today for name, (_, today) in TYPES.items()} | FORKS
BY_NUMBER = dict(TYPES.values())
PER_BLOB = ("param", "blob_share_mode", "blobs_lr", "weight_decay")
SHARE_MODES = ("STRICT", "PERMISSIVE")
DATA_PARAMS = {
    "Data": "data_param",
    "ImageData": "image_data_param",
    "WindowData": "window_data_param",
}
TRANSFORM = ("scale", "mean_file", "crop_size", "mirror")


def in_current(layers: Message) -> Message:
    """Convert a layer to today's form. An unknown type stays. Raises CaffeError on wrong values."""
    fields = [field for field in layers.fields if field.name not in (*PER_BLOB, "type")]
    kind = ""
    for field in layers.all("type"):
        kind = _type(layers, field)
        fields.append(field._replace(value=kind))
    fields.extend(_params(layers))
    if kind in DATA_PARAMS:
        fields = _transformed(layers, fields, DATA_PARAMS[kind])
    return Message(fields, layers.line, layers.where)


def _type(layers: Message, field: Field) -> str:
    value = field.value
    if isinstance(value, str):
        return NAMES.get(value, str(value))
    if not isinstance(value, int) or value not in BY_NUMBER:
        raise layers.error(f"type is {value!s:.40}; expected a name such as RELU", field.line)
    return BY_NUMBER[value]


def _params(layers: Message) -> list[Field]:
    lists: tuple[tuple[str, str, Sequence[float | str]], ...] = (
        ("name", "param", layers.texts("param")),
        (
            "share_mode",
            "blob_share_mode",
            [Word(choice) for choice in layers.choices("blob_share_mode", SHARE_MODES)],
        ),
        ("lr_mult", "blobs_lr", layers.numbers("blobs_lr")),
        ("decay_mult", "weight_decay", layers.numbers("weight_decay")),
    )
    most = max(len(values) for _, _, values in lists)
    blobs: list[list[Field]] = [[] for _ in range(most)]
    for name, old, values in lists:
        for blob, value, field in zip(blobs, values, layers.all(old), strict=False):
            blob.append(Field(name, value, field.line))
    return [
        Field("param", Message(blob, blob[0].line, layers.where), blob[0].line) for blob in blobs
    ]


def _transformed(layers: Message, fields: list[Field], param: str) -> list[Field]:
    param_message = layers.message(param)
    moved = [field for field in param_message.fields if field.name in TRANSFORM]
    if not moved:
        return fields
    kept = [field for field in param_message.fields if field.name not in TRANSFORM]
    others = [field for field in fields if field.name not in (param, "transform_param")]
    transform = [*layers.message("transform_param").fields, *moved]
    inside = {param: (kept, param_message.line), "transform_param": (transform, moved[0].line)}
    return others + [
        Field(name, Message(part_fields, line, layers.where), line)
        for name, (part_fields, line) in inside.items()
    ]
