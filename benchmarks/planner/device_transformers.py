"""Transformers of published rates, with the attention of their time: no fused kernel."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn


class Attention(nn.Module):
    """dropout: of the weights, which then have a mask, too, as BERT's."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.drop = nn.Dropout(dropout) if dropout else None
        self.heads, self.each = width // 64, 64
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(x).reshape(batch, length, 3, self.heads, self.each).permute(2, 0, 3, 1, 4)
        query, key, value = qkv.unbind(0)
        scores = query @ key.transpose(-2, -1) * self.each**-0.5
        if self.drop is None:
            weights = scores.softmax(-1)
        else:
            mask = torch.zeros(batch, 1, 1, length, device=x.device)
            weights = self.drop((scores + mask).softmax(-1))
        mixed = (weights @ value).transpose(1, 2).reshape(batch, length, width)
        out: Tensor = self.proj(mixed)
        return out


def feed_forward(width: int, inner: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, inner), nn.GELU(), nn.Linear(inner, width))


class Block(nn.Module):
    """norms_first: as in ViT (Dosovitskiy et al. 2020); else as in BERT (Devlin et al. 2018)."""

    def __init__(self, width: int, norms_first: bool, dropout: float) -> None:
        super().__init__()
        self.norms_first = norms_first
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention, self.mlp = Attention(width, dropout), feed_forward(width, 4 * width)
        self.drop1 = nn.Dropout(dropout) if dropout else nn.Identity()
        self.drop2 = nn.Dropout(dropout) if dropout else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        if self.norms_first:
            x = x + self.attention(self.norm1(x))
            y: Tensor = x + self.mlp(self.norm2(x))
            return y
        x = self.norm1(x + self.drop1(self.attention(x)))
        out: Tensor = self.norm2(x + self.drop2(self.mlp(x)))
        return out


class Vit(nn.Module):
    def __init__(self, width: int, depth: int, patch: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, patch)
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.places = nn.Parameter(torch.zeros(1, 1 + (224 // patch) ** 2, width))
        self.blocks = nn.Sequential(*(Block(width, True, 0.0) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 1000)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.places
        x = self.norm(self.blocks(x))
        out: Tensor = self.head(x[:, 0])
        return out


def vit(width: int, depth: int, patch: int) -> nn.Module:
    return Vit(width, depth, patch)


class Mixing(nn.Module):
    """A block of MLP-Mixer (Tolstikhin et al. 2021)."""

    def __init__(self, width: int, length: int, tokens: int, channels: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.tokens, self.channels = feed_forward(length, tokens), feed_forward(width, channels)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.tokens(self.norm1(x).transpose(1, 2)).transpose(1, 2)
        out: Tensor = x + self.channels(self.norm2(x))
        return out


class Patches(nn.Module):
    def __init__(self, width: int, patch: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, width, patch, patch)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.conv(x)
        return y.flatten(2).transpose(1, 2)


class Mean(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mean(1)


def mixer(width: int, depth: int, patch: int, tokens: int, channels: int) -> nn.Module:
    length = (224 // patch) ** 2
    blocks = (Mixing(width, length, tokens, channels) for _ in range(depth))
    ends = (nn.LayerNorm(width), Mean(), nn.Linear(width, 1000))
    return nn.Sequential(Patches(width, patch), *blocks, *ends)


class Channels(nn.Module):
    """LayerNorm over the channels of images."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.norm(x.permute(0, 2, 3, 1))
        return y.permute(0, 3, 1, 2)


class Next(nn.Module):
    """A block of ConvNeXt (Liu et al. 2022)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.deep = nn.Conv2d(width, width, 7, padding=3, groups=width)
        self.norm, self.mlp = nn.LayerNorm(width), feed_forward(width, 4 * width)
        self.scale = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.mlp(self.norm(self.deep(x).permute(0, 2, 3, 1)))
        return x + (y * self.scale).permute(0, 3, 1, 2)


def convnext(widths: Sequence[int], blocks: Sequence[int]) -> nn.Module:
    layers: list[nn.Module] = [nn.Conv2d(3, widths[0], 4, 4), Channels(widths[0])]
    for stage, (width, count) in enumerate(zip(widths, blocks, strict=True)):
        if stage:
            layers += [Channels(widths[stage - 1]), nn.Conv2d(widths[stage - 1], width, 2, 2)]
        layers += [Next(width) for _ in range(count)]
    ends = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.LayerNorm(widths[-1]))
    return nn.Sequential(*layers, *ends, nn.Linear(widths[-1], 1000))


class Bert(nn.Module):
    """pretrains: with a score of every word of the vocabulary at a sixth of the places."""

    def __init__(self, width: int, depth: int, pretrains: bool) -> None:
        super().__init__()
        self.words = nn.Embedding(30522, width)
        self.places = nn.Parameter(torch.zeros(512, width))
        self.norm, self.drop = nn.LayerNorm(width), nn.Dropout(0.1)
        self.blocks = nn.Sequential(*(Block(width, False, 0.1) for _ in range(depth)))
        self.pretrains = pretrains
        self.head = nn.Linear(width, 30522 if pretrains else 2)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens) + self.places[: tokens.shape[1]]
        x = self.blocks(self.drop(self.norm(x)))
        if self.pretrains:
            x = x[:, : tokens.shape[1] * 20 // 128]
        out: Tensor = self.head(x)
        return out


def bert(width: int, depth: int, pretrains: bool) -> nn.Module:
    return Bert(width, depth, pretrains)
