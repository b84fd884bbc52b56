"""Networks of published rates that are not ours: their layers, as their authors have them.

Only the shapes matter, for they run on the meta device. A test compares the numbers of weights with
what the tables of timm print.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

from benchmarks.planner.device_transformers import bert, convnext, mixer, vit
from firecaffe.models import build_model

Shape = tuple[int, ...]


def conv_norm(
    i: int, o: int, kernel: int | tuple[int, int], stride: int = 1, groups: int = 1
) -> nn.Sequential:
    sides = (kernel, kernel) if isinstance(kernel, int) else kernel
    padding = sides[0] // 2, sides[1] // 2
    conv = nn.Conv2d(i, o, sides, stride, padding, groups=groups, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(o), nn.ReLU(inplace=True))


class Squeeze(nn.Module):
    """Squeeze and excitation (Hu et al. 2017)."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gates = nn.Sequential(
            nn.AdaptiveAvgPool2d(1),
            nn.Conv2d(width, inner, 1),
            nn.ReLU(inplace=True),
            nn.Conv2d(inner, width, 1),
            nn.Sigmoid(),
        )

    def forward(self, x: Tensor) -> Tensor:
        gates: Tensor = self.gates(x)
        return x * gates


class Residual(nn.Module):
    """A block of He et al. 2015; of Xie et al. 2016 with groups, of Hu et al. 2017 with gates."""

    def __init__(self, i: int, o: int, stride: int, inner: int, groups: int, gates: bool) -> None:
        super().__init__()
        if inner:
            body = [
                conv_norm(i, inner, 1),
                conv_norm(inner, inner, 3, stride, groups),
                nn.Sequential(nn.Conv2d(inner, o, 1, bias=False), nn.BatchNorm2d(o)),
            ]
        else:
            last = nn.Conv2d(o, o, 3, padding=1, bias=False)
            body = [conv_norm(i, o, 3, stride), nn.Sequential(last, nn.BatchNorm2d(o))]
        self.body = nn.Sequential(*body, *([Squeeze(o, o // 16)] if gates else []))
        self.short = None
        if stride > 1 or i != o:
            self.short = nn.Sequential(nn.Conv2d(i, o, 1, stride, bias=False), nn.BatchNorm2d(o))
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        short = x if self.short is None else self.short(x)
        out: Tensor = self.relu(self.body(x) + short)
        return out


def resnet(
    blocks: Sequence[int], inner: int = 0, groups: int = 1, gates: bool = False, classes: int = 1000
) -> nn.Module:
    """inner: width of the 3x3 of the first bottleneck; 0: basic blocks."""
    layers: list[nn.Module] = [conv_norm(3, 64, 7, 2), nn.MaxPool2d(3, 2, 1)]
    i = 64
    for stage, count in enumerate(blocks):
        o = (256 if inner else 64) << stage
        for block in range(count):
            stride = 2 if block == 0 and stage else 1
            layers.append(Residual(i, o, stride, inner << stage, groups, gates))
            i = o
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(i, classes))


def vgg(blocks: Sequence[int], norm: bool = False) -> nn.Module:
    layers: list[nn.Module] = []
    i = 3
    for stage, count in enumerate(blocks):
        for _ in range(count):
            o = min(512, 64 << stage)
            between = [nn.BatchNorm2d(o)] if norm else []
            layers += [nn.Conv2d(i, o, 3, padding=1), *between, nn.ReLU(inplace=True)]
            i = o
        layers.append(nn.MaxPool2d(2))
    return nn.Sequential(*layers, nn.Flatten(), *_head([25088, 4096, 4096, 1000]))


def _head(widths: Sequence[int]) -> list[nn.Module]:
    layers: list[nn.Module] = []
    for i, o in pairwise(widths):
        layers += [nn.Linear(i, o), nn.ReLU(inplace=True), nn.Dropout()]
    return layers[:-2]


def overfeat() -> nn.Module:
    """The fast network of Sermanet et al. 2013."""
    convolutions = [
        nn.Conv2d(3, 96, 11, 4),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),
        nn.Conv2d(96, 256, 5),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),
        nn.Conv2d(256, 512, 3, padding=1),
        nn.ReLU(inplace=True),
        nn.Conv2d(512, 1024, 3, padding=1),
        nn.ReLU(inplace=True),
        nn.Conv2d(1024, 1024, 3, padding=1),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),
    ]
    return nn.Sequential(*convolutions, nn.Flatten(), *_head([36864, 3072, 4096, 1000]))


class Beside(nn.Module):
    """Branches whose results are joined."""

    def __init__(self, *branches: nn.Module) -> None:
        super().__init__()
        self.branches = nn.ModuleList(branches)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([branch(x) for branch in self.branches], 1)


def _chain(i: int, *steps: tuple[int, int | tuple[int, int], int]) -> nn.Sequential:
    layers = []
    for o, kernel, stride in steps:
        layers.append(conv_norm(i, o, kernel, stride))
        i = o
    return nn.Sequential(*layers)


def inception_v3() -> nn.Module:
    """Szegedy et al. 2015 (arXiv 1512.00567), without the auxiliary head."""
    pool = nn.AvgPool2d(3, 1, 1)
    stem = _unpadded(3, (32, 3, 2), (32, 3, 1))
    layers = [stem, conv_norm(32, 64, 3), nn.MaxPool2d(3, 2)]
    layers += [_unpadded(64, (80, 1, 1), (192, 3, 1)), nn.MaxPool2d(3, 2)]
    i = 192
    for pooled in (32, 64, 64):
        five, three = ((48, 1, 1), (64, 5, 1)), ((64, 1, 1), (96, 3, 1), (96, 3, 1))
        branches = [_chain(i, (64, 1, 1)), _chain(i, *five), _chain(i, *three)]
        layers.append(Beside(*branches, nn.Sequential(pool, conv_norm(i, pooled, 1))))
        i = 224 + pooled
    shrunk = nn.Sequential(_chain(288, (64, 1, 1), (96, 3, 1)), _unpadded(96, (96, 3, 2)))
    layers.append(Beside(_unpadded(288, (384, 3, 2)), shrunk, nn.MaxPool2d(3, 2)))
    for w in (128, 160, 160, 192):
        seven = ((w, 1, 1), (w, (1, 7), 1), (192, (7, 1), 1))
        twice = ((w, 1, 1), (w, (7, 1), 1), (w, (1, 7), 1), (w, (7, 1), 1), (192, (1, 7), 1))
        branches = [_chain(768, (192, 1, 1)), _chain(768, *seven), _chain(768, *twice)]
        layers.append(Beside(*branches, nn.Sequential(pool, conv_norm(768, 192, 1))))
    left = nn.Sequential(_chain(768, (192, 1, 1)), _unpadded(192, (320, 3, 2)))
    right = _chain(768, (192, 1, 1), (192, (1, 7), 1), (192, (7, 1), 1))
    right.append(_unpadded(192, (192, 3, 2)))
    layers.append(Beside(left, right, nn.MaxPool2d(3, 2)))
    for i in (1280, 2048):
        split = Beside(_chain(384, (384, (1, 3), 1)), _chain(384, (384, (3, 1), 1)))
        again = Beside(_chain(384, (384, (1, 3), 1)), _chain(384, (384, (3, 1), 1)))
        branches = [
            _chain(i, (320, 1, 1)),
            nn.Sequential(_chain(i, (384, 1, 1)), split),
            nn.Sequential(_chain(i, (448, 1, 1), (384, 3, 1)), again),
        ]
        layers.append(Beside(*branches, nn.Sequential(pool, conv_norm(i, 192, 1))))
    return nn.Sequential(
        *layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(), nn.Linear(2048, 1000)
    )


def _unpadded(i: int, *steps: tuple[int, int, int]) -> nn.Sequential:
    layers: list[nn.Module] = []
    for o, kernel, stride in steps:
        layers += [nn.Conv2d(i, o, kernel, stride, bias=False), nn.BatchNorm2d(o)]
        layers.append(nn.ReLU(inplace=True))
        i = o
    return nn.Sequential(*layers)


class Dense(nn.Module):
    """A layer of Huang et al. 2016, which adds its outputs to its inputs."""

    def __init__(self, i: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.BatchNorm2d(i), nn.ReLU(inplace=True), nn.Conv2d(i, 128, 1, bias=False),
            nn.BatchNorm2d(128), nn.ReLU(inplace=True),
            nn.Conv2d(128, 32, 3, padding=1, bias=False),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x, self.body(x)], 1)


def densenet(blocks: Sequence[int]) -> nn.Module:
    layers: list[nn.Module] = [conv_norm(3, 64, 7, 2), nn.MaxPool2d(3, 2, 1)]
    i = 64
    for stage, count in enumerate(blocks):
        for _ in range(count):
            layers.append(Dense(i))
            i += 32
        layers += [nn.BatchNorm2d(i), nn.ReLU(inplace=True)]
        if stage + 1 < len(blocks):
            layers += [nn.Conv2d(i, i // 2, 1, bias=False), nn.AvgPool2d(2)]
            i //= 2
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(i, 1000))


class Inverted(nn.Module):
    """An inverted bottleneck: Sandler et al. 2018, and Tan and Le 2019 with gates."""

    def __init__(self, i: int, o: int, stride: int, kernel: int, expand: int, gates: bool) -> None:
        super().__init__()
        inner = i * expand
        act = nn.SiLU(inplace=True) if gates else nn.ReLU6(inplace=True)
        steps: list[nn.Module] = []
        if expand > 1:
            steps += [nn.Conv2d(i, inner, 1, bias=False), nn.BatchNorm2d(inner), act]
        deep = nn.Conv2d(inner, inner, kernel, stride, kernel // 2, groups=inner, bias=False)
        steps += [deep, nn.BatchNorm2d(inner), act]
        steps += [Squeeze(inner, i // 4)] if gates else []
        steps += [nn.Conv2d(inner, o, 1, bias=False), nn.BatchNorm2d(o)]
        self.body = nn.Sequential(*steps)
        self.adds = stride == 1 and i == o

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.body(x)
        return x + y if self.adds else y


MOBILENET = ((1, 16, 1, 1, 3), (6, 24, 2, 2, 3), (6, 32, 3, 2, 3), (6, 64, 4, 2, 3),
             (6, 96, 3, 1, 3), (6, 160, 3, 2, 3), (6, 320, 1, 1, 3))  # fmt: skip
EFFICIENTNET = ((1, 16, 1, 1, 3), (6, 24, 2, 2, 3), (6, 40, 2, 2, 5), (6, 80, 3, 2, 3),
                (6, 112, 3, 1, 5), (6, 192, 4, 2, 5), (6, 320, 1, 1, 3))  # fmt: skip
"""Expansion, outputs, blocks, stride, kernel."""


def inverted(rows: Sequence[Sequence[int]], gates: bool) -> nn.Module:
    act = nn.SiLU(inplace=True) if gates else nn.ReLU6(inplace=True)
    first = nn.Conv2d(3, 32, 3, 2, 1, bias=False)
    layers: list[nn.Module] = [first, nn.BatchNorm2d(32), act]
    i = 32
    for expand, o, count, stride, kernel in rows:
        for block in range(count):
            layers.append(Inverted(i, o, 1 if block else stride, kernel, expand, gates))
            i = o
    layers += [nn.Conv2d(i, 1280, 1, bias=False), nn.BatchNorm2d(1280), act]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(1280, 1000))


class Ssd(nn.Module):
    """SSD300 on ResNet-50 up to its third stage, at stride 8 (NVIDIA's variant of Liu 2015)."""

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = [conv_norm(3, 64, 7, 2), nn.MaxPool2d(3, 2, 1)]
        i = 64
        for stage, count in enumerate((3, 4, 6)):
            for block in range(count):
                stride = 2 if block == 0 and stage == 1 else 1
                layers.append(Residual(i, 256 << stage, stride, 64 << stage, 1, False))
                i = 256 << stage
        self.body = nn.Sequential(*layers)
        widths, inner = (1024, 512, 512, 256, 256, 256), (256, 256, 128, 128, 128)
        self.extra = nn.ModuleList(
            nn.Sequential(conv_norm(i, c, 1), _unpadded(c, (o, 3, 1)) if k > 2 else
                          conv_norm(c, o, 3, 2))
            for k, (i, o, c) in enumerate(zip(widths, widths[1:], inner, strict=False))
        )  # fmt: skip
        boxes = (4, 6, 6, 6, 4, 4)
        self.heads = nn.ModuleList(
            nn.Conv2d(i, 85 * count, 3, padding=1) for i, count in zip(widths, boxes, strict=True)
        )

    def forward(self, x: Tensor) -> list[Tensor]:
        maps = [self.body(x)]
        for part in self.extra:
            maps.append(part(maps[-1]))
        return [head(each) for head, each in zip(self.heads, maps, strict=True)]


IMAGE = (3, 224, 224)
OURS = ("alexnet_owt", "googlenet_bn", "vgg16", "vgg19", "nin",
        "squeezenet1_0", "squeezenet1_1")  # fmt: skip


def one_kernel_norms(name: str) -> nn.Module:
    """Our network with each normalization across channels as one kernel, as libraries have it."""
    network = build_model(name)
    for part in [*network.modules()]:
        for child, layer in part.named_children():
            if isinstance(layer, nn.LocalResponseNorm):
                setattr(part, child, nn.Softplus())
    return network


BUILDERS: dict[str, tuple[Callable[[], nn.Module], Shape]] = {
    **{name: (lambda name=name: build_model(name), IMAGE) for name in OURS},  # type: ignore[misc]
    "alexnet": (lambda: one_kernel_norms("alexnet"), IMAGE),
    "googlenet": (lambda: one_kernel_norms("googlenet"), IMAGE),
    "resnet18": (lambda: resnet((2, 2, 2, 2)), IMAGE),
    "resnet34": (lambda: resnet((3, 4, 6, 3)), IMAGE),
    "resnet26": (lambda: resnet((2, 2, 2, 2), 64), IMAGE),
    "resnet50": (lambda: resnet((3, 4, 6, 3), 64), IMAGE),
    "resnet101": (lambda: resnet((3, 4, 23, 3), 64), IMAGE),
    "resnet152": (lambda: resnet((3, 8, 36, 3), 64), IMAGE),
    "resnet200": (lambda: resnet((3, 24, 36, 3), 64), IMAGE),
    "wide_resnet50_2": (lambda: resnet((3, 4, 6, 3), 128), IMAGE),
    "wide_resnet101_2": (lambda: resnet((3, 4, 23, 3), 128), IMAGE),
    "resnext50_32x4d": (lambda: resnet((3, 4, 6, 3), 128, 32), IMAGE),
    "resnext101_32x4d": (lambda: resnet((3, 4, 23, 3), 128, 32), IMAGE),
    "resnext101_32x8d": (lambda: resnet((3, 4, 23, 3), 256, 32), IMAGE),
    "seresnet18": (lambda: resnet((2, 2, 2, 2), gates=True), IMAGE),
    "seresnet34": (lambda: resnet((3, 4, 6, 3), gates=True), IMAGE),
    "seresnet50": (lambda: resnet((3, 4, 6, 3), 64, gates=True), IMAGE),
    "seresnext101_32x4d": (lambda: resnet((3, 4, 23, 3), 128, 32, True), IMAGE),
    "vgg11": (lambda: vgg((1, 1, 2, 2, 2)), IMAGE),
    "vgg11_bn": (lambda: vgg((1, 1, 2, 2, 2), True), IMAGE),
    "vgg13": (lambda: vgg((2, 2, 2, 2, 2)), IMAGE),
    "vgg16_bn": (lambda: vgg((2, 2, 3, 3, 3), True), IMAGE),
    "overfeat": (overfeat, (3, 231, 231)),
    "inception_v3": (inception_v3, (3, 299, 299)),
    "densenet121": (lambda: densenet((6, 12, 24, 16)), IMAGE),
    "densenet169": (lambda: densenet((6, 12, 32, 32)), IMAGE),
    "densenet201": (lambda: densenet((6, 12, 48, 32)), IMAGE),
    "mobilenetv2_100": (lambda: inverted(MOBILENET, False), IMAGE),
    "efficientnet_b0": (lambda: inverted(EFFICIENTNET, True), IMAGE),
    "ssd300": (Ssd, (3, 300, 300)),
    "vit_tiny_patch16_224": (lambda: vit(192, 12, 16), IMAGE),
    "vit_small_patch16_224": (lambda: vit(384, 12, 16), IMAGE),
    "vit_base_patch16_224": (lambda: vit(768, 12, 16), IMAGE),
    "vit_large_patch16_224": (lambda: vit(1024, 24, 16), IMAGE),
    "vit_small_patch32_224": (lambda: vit(384, 12, 32), IMAGE),
    "vit_base_patch32_224": (lambda: vit(768, 12, 32), IMAGE),
    "mixer_s32_224": (lambda: mixer(512, 8, 32, 256, 2048), IMAGE),
    "mixer_s16_224": (lambda: mixer(512, 8, 16, 256, 2048), IMAGE),
    "mixer_b16_224": (lambda: mixer(768, 12, 16, 384, 3072), IMAGE),
    "convnext_tiny": (lambda: convnext((96, 192, 384, 768), (3, 3, 9, 3)), IMAGE),
    "convnext_small": (lambda: convnext((96, 192, 384, 768), (3, 3, 27, 3)), IMAGE),
    "convnext_base": (lambda: convnext((128, 256, 512, 1024), (3, 3, 27, 3)), IMAGE),
    "bert_base_128": (lambda: bert(768, 12, True), (128,)),
    "bert_base_384": (lambda: bert(768, 12, False), (384,)),
    "bert_large_384": (lambda: bert(1024, 24, False), (384,)),
}
"""By name: what builds it, and the shape of a sample; token numbers if it has one dimension."""
