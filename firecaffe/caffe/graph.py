"""The graph of a net: the layers of a phase as steps in the file's order. No torch is needed.

An in-place layer overwrites its bottom; later layers take the new values. Data layers are not
modules: their tops are the net's inputs, and data sets replace them.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from firecaffe.caffe.layers.spec import Kind, Shape, Spec
from firecaffe.caffe.message import CaffeError, Message

PHASES = ("TRAIN", "TEST")


@dataclass(frozen=True)
class NetState:
    phase: str
    level: int
    stages: frozenset[str]


def layers_of(
    net: Message, phase: str, stages: Sequence[str] = (), level: int = 0
) -> list[Message]:
    """Return a phase's layers in the file's order, as objects of `net`, which is in current form.

    `stages` are added to those of the net's `state`. `level` replaces its level if not 0, as in
    Caffe's solver. Raises CaffeError if a layer has both include and exclude. Checked against
    Caffe.
    """
    net_state = net.message("state")
    net_state.ignore("phase")
    state = NetState(
        phase, level or net_state.integer("level"), frozenset((*stages, *net_state.texts("stage")))
    )
    return [message for message in net.messages("layer") if _is_in(message, state)]


def phase_of(layer: Message, phase: str) -> str:
    """Return the phase in which a layer runs: its own, or else the net's. It selects no layers."""
    return layer.choice("phase", PHASES, phase)


def _is_in(layer: Message, state: NetState) -> bool:
    included = [_meets(rule, state) for rule in layer.messages("include")]
    excluded = [_meets(rule, state) for rule in layer.messages("exclude")]
    if included and excluded:
        raise layer.error("both include and exclude; expected one of them")
    return any(included) if included else not any(excluded)


def _meets(rule: Message, state: NetState) -> bool:
    """Whether all conditions hold. All are read, so that none is reported as unread."""
    no_bound = state.level
    return all(
        (
            rule.choice("phase", PHASES, state.phase) == state.phase,
            rule.integer("min_level", no_bound) <= state.level,
            rule.integer("max_level", no_bound) >= state.level,
            state.stages.issuperset(rule.texts("stage")),
            state.stages.isdisjoint(rule.texts("not_stage")),
        )
    )


MAX_NAMED = 12

FRESH = ("BatchNorm", "Bias", "Concat", "Convolution", "Eltwise", "InnerProduct", "Scale")
"""Types whose gradient does not need their (new) top, so that a ReLU may overwrite it."""


@dataclass(frozen=True)
class InputBlob:
    """An input of the net: a top of a layer that reads samples."""

    blob: str
    shape: Shape | None
    layer: Message
    is_first: bool
    """Whether it is its layer's first top: the samples, not their targets."""


@dataclass(frozen=True)
class GraphStep:
    name: str
    """The layer's name, with a number if an earlier layer has it too."""
    type: str
    layer: Message
    kind: Kind
    bottoms: tuple[str, ...]
    tops: tuple[str, ...]
    loss_weights: tuple[float, ...]
    may_overwrite: bool
    """Whether it works in place and no other step needs the overwritten values."""

    @property
    def is_loss(self) -> bool:
        return any(self.loss_weights)

    def spec(self, bottoms: Sequence[Shape], phase: str) -> Spec:
        """Describe the layer for bottoms of these shapes. Raises CaffeError for a wrong number."""
        layer, kind = self.layer, self.kind
        param = layer.message(kind.param) if kind.param else Message(where=layer.where)
        param.ignore(*kind.ignored)
        phase = phase_of(layer, phase)
        spec = Spec(self.name, self.type, layer, param, bottoms, len(self.tops), phase)
        if kind.bottoms:
            spec.check_bottoms(*kind.bottoms)
        return spec


@dataclass(frozen=True)
class Graph:
    sources: tuple[InputBlob, ...]
    steps: tuple[GraphStep, ...]

    @property
    def outputs(self) -> tuple[str, ...]:
        """The losses and the blobs that no later layer takes, in the order of their first write."""
        written: dict[str, bool] = {source.blob: True for source in self.sources}
        losses = set()
        for step in self.steps:
            written.update((blob, False) for blob in step.bottoms)
            written.update((blob, True) for blob in step.tops)
            losses |= {t for t, w in zip(step.tops, step.loss_weights, strict=True) if w}
        return tuple(blob for blob, is_last in written.items() if is_last or blob in losses)

    @property
    def losses(self) -> dict[str, float]:
        return {
            top: weight
            for step in self.steps
            for top, weight in zip(step.tops, step.loss_weights, strict=True)
            if weight
        }


LABELS_AXES = 8
"""Numbers per box in AnnotatedData's labels: image, class, instance, four corners, difficult."""


def _image_shape(layer: Message, name: str) -> Shape | None:
    param, transform = layer.message(name), layer.message("transform_param")
    batch = max(1, param.integer("batch_size", 1))
    is_gray = transform.flag("force_gray") or not param.flag("is_color", True)
    channels = 1 if is_gray else 3
    resized = transform.message("resize_param")
    crop = transform.integer("crop_size") or param.integer("crop_size")
    rows = crop or param.integer("new_height") or resized.integer("height")
    columns = crop or param.integer("new_width") or resized.integer("width")
    return (batch, channels, rows, columns) if rows > 0 and columns > 0 else None


def _labelled(name: str) -> Callable[[Message], list[Shape | None]]:
    def shapes(layer: Message) -> list[Shape | None]:
        batch = max(1, layer.message(name).integer("batch_size", 1))
        return [_image_shape(layer, name), (batch,)]

    return shapes


def _memory(layer: Message) -> list[Shape | None]:
    param = layer.message("memory_data_param")
    names = ("batch_size", "channels", "height", "width")
    shape = tuple(param.integer(word) for word in names)
    return [shape if min(shape) > 0 else None, (max(1, shape[0]),)]


def _said_shapes(layer: Message, name: str) -> list[Shape | None]:
    return [tuple(message.integers("dim")) for message in layer.message(name).messages("shape")]


def _dummy(layer: Message) -> list[Shape | None]:
    param = layer.message("dummy_data_param")
    sizes = [param.integers(word) for word in ("num", "channels", "height", "width")]
    old = [*zip(*sizes, strict=False)]
    return _said_shapes(layer, "dummy_data_param") or [tuple(shape) for shape in old]


SOURCES: dict[str, Callable[[Message], list[Shape | None]]] = {
    "AnnotatedData": lambda layer: [_image_shape(layer, "data_param"), (1, 1, 1, LABELS_AXES)],
    "Data": _labelled("data_param"),
    "DummyData": _dummy,
    "HDF5Data": lambda layer: [],
    "ImageData": _labelled("image_data_param"),
    "Input": lambda layer: _said_shapes(layer, "input_param"),
    "MemoryData": _memory,
    "WindowData": _labelled("window_data_param"),
}


def shapes_of(layer: Message) -> list[Shape | None]:
    """Return the shape of each top of a data layer; None if the file does not state it."""
    tops = layer.texts("top")
    kind = layer.text("type")
    shapes = SOURCES[kind](layer) if kind in SOURCES else []
    if len(shapes) == 1:  # one shape for all tops
        shapes = shapes * len(tops)
    return [*shapes, *[None] * len(tops)][: len(tops)]


def read_graph(layers: Sequence[Message], kinds: Mapping[str, Kind]) -> Graph:
    """Read a phase's graph. Raises CaffeError, which lists all layers of unknown types."""
    _check_types(layers, kinds)
    sources: list[InputBlob] = []
    steps: list[GraphStep] = []
    names: set[str] = set()
    writers: dict[str, str] = {}
    readers: dict[str, int] = {}
    for layer in layers:
        kind_name = layer.text("type")
        name = _unique(layer.text("name") or kind_name, names)
        tops, bottoms = layer.texts("top"), layer.texts("bottom")
        _check_blobs(layer, name, tops, bottoms, writers)
        if _is_source(layer, kinds):
            shapes = shapes_of(layer)
            sources += [
                InputBlob(top, shape, layer, place == 0)
                for place, (top, shape) in enumerate(zip(tops, shapes, strict=True))
            ]
            writers.update(dict.fromkeys(tops, kind_name))
            readers.update(dict.fromkeys(tops, 0))
            continue
        kind = kinds[kind_name]
        if kind.is_loss and not tops:
            tops = [_unique(name, {*writers})]
        may_overwrite = (
            len(bottoms) == 1
            and tops == bottoms
            and writers[bottoms[0]] in FRESH
            and readers[bottoms[0]] == 0
        )
        weights = _loss_weights(layer, kind, len(tops))
        steps.append(
            GraphStep(name, kind_name, layer, kind, (*bottoms,), (*tops,), weights, may_overwrite)
        )
        for blob in bottoms:
            readers[blob] += 1
        for blob in tops:
            writers[blob], readers[blob] = kind_name, 0
    return Graph(tuple(sources), tuple(steps))


def read_phases(net: Message, kinds: Mapping[str, Kind]) -> dict[str, Graph]:
    return {phase: read_graph(layers, kinds) for phase, layers in both_phases(net, kinds).items()}


def both_phases(net: Message, kinds: Mapping[str, Kind]) -> dict[str, list[Message]]:
    """Return TRAIN's and TEST's layers; without data, the other phase's. Raises CaffeError."""
    layers = {phase: layers_of(net, phase) for phase in PHASES}
    there = {
        phase: of_phase
        for phase, of_phase in layers.items()
        if any(_is_source(layer, kinds) for layer in of_phase)
    }
    first = next(iter(there.values()), layers["TRAIN"])
    return {phase: there.get(phase, first) for phase in PHASES}


def _is_source(layer: Message, kinds: Mapping[str, Kind]) -> bool:
    name = layer.text("type")
    return name in SOURCES or (name not in kinds and not layer.has("bottom") and layer.has("top"))


def _check_types(layers: Sequence[Message], kinds: Mapping[str, Kind]) -> None:
    unknown: dict[str, list[Message]] = {}
    for layer in layers:
        name = layer.text("type")
        if name not in kinds and not _is_source(layer, kinds):
            what = f'"{name:.40}"'
            if name == "Python":
                param = layer.message("python_param")
                what = f'Python "{param.text("module"):.40}.{param.text("layer"):.40}"'
            unknown.setdefault(what, []).append(layer)
    if not unknown:
        return
    said = [f"{what} at {_lines(unknown_layers)}" for what, unknown_layers in unknown.items()]
    count = sum(map(len, unknown.values()))
    hint = "; a layer in Python would have to be written in PyTorch"
    raise CaffeError(
        f"{layers[0].where}: {count} {'layer' if count == 1 else 'layers'} of types that are not "
        f"known: {', '.join(said)}{hint if any(w.startswith('Python') for w in unknown) else ''}"
    )


def _lines(layers: Sequence[Message]) -> str:
    lines = [str(layer.line) for layer in layers[:MAX_NAMED]]
    more = " …" if len(layers) > MAX_NAMED else ""
    return f"{'line' if len(layers) == 1 else 'lines'} {', '.join(lines)}{more}"


def _unique(name: str, taken: set[str]) -> str:
    free_name, number = name, 1
    while free_name in taken:
        number += 1
        free_name = f"{name}_{number}"
    taken.add(free_name)
    return free_name


def _check_blobs(
    layer: Message, name: str, tops: list[str], bottoms: list[str], writers: Mapping[str, str]
) -> None:
    for blob in bottoms:
        if blob not in writers:
            raise layer.error(
                f"{layer.text('type')} {name!r} takes {blob!r}, which no layer before it gives",
                "bottom",
            )
    for blob in tops:
        if (blob in writers and blob not in bottoms) or tops.count(blob) > 1:
            raise layer.error(
                f"{layer.text('type')} {name!r} gives {blob!r}, which another layer gives too",
                "top",
            )


def _loss_weights(layer: Message, kind: Kind, tops: int) -> tuple[float, ...]:
    weights = layer.numbers("loss_weight")
    if len(weights) > tops:
        raise layer.error(
            f"{layer.text('type')} has {len(weights)} loss_weight for {tops} tops", "loss_weight"
        )
    default = [1.0 if kind.is_loss and place == 0 else 0.0 for place in range(tops)]
    return (*weights, *default[len(weights) :])
