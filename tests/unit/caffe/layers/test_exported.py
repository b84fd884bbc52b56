"""torch.export takes the layers whose shapes do not depend on the numbers, all in one graph."""

import torch
from torch import Tensor, nn

from firecaffe.caffe.layers.spec import Shape
from tests.unit.caffe.layers.made import layer, module_of

MAPS = (2, 4, 6, 8)
EXPORTED: dict[str, tuple[str, list[Shape]]] = {
    "ArgMax": ("argmax_param { axis: 1 }", [MAPS]),
    "Axpy": ("", [(2, 4, 1, 1), MAPS, MAPS]),
    "BN": ("bn_param { scale_filler { value: 2 } }", [MAPS]),
    "BatchReindex": ("", [MAPS, (3,)]),
    "Crop": ("crop_param { offset: 1 }", [MAPS, (2, 4, 3, 3)]),
    "Interp": ("interp_param { zoom_factor: 2 pad_beg: -1 }", [MAPS]),
    "LSTM": ("recurrent_param { num_output: 3 }", [(4, 2, 5), (4, 2)]),
    "MVN": ("", [MAPS]),
    "Normalize": ("norm_param { across_spatial: false channel_shared: false }", [MAPS]),
    "PSROIPooling": ("psroi_pooling_param { output_dim: 1 group_size: 2 }", [MAPS, (3, 5)]),
    "Permute": ("permute_param { order: 0 order: 2 order: 3 order: 1 }", [MAPS]),
    "PriorBox": ("prior_box_param { min_size: 5 aspect_ratio: 2 }", [MAPS, (2, 3, 60, 80)]),
    "Reduction": ("reduction_param { operation: ASUM axis: 1 }", [MAPS]),
    "Reverse": ("reverse_param { axis: 1 }", [MAPS]),
    "SPP": ("spp_param { pyramid_height: 2 }", [MAPS]),
    "ShuffleChannel": ("shuffle_channel_param { group: 2 }", [MAPS]),
    "Tile": ("tile_param { axis: 2 tiles: 2 }", [MAPS]),
    "Upsample": ("upsample_param { scale: 2 }", [MAPS]),
}


class Together(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        made = [
            module_of(layer(kind, words), *bottoms) for kind, (words, bottoms) in EXPORTED.items()
        ]
        self.layers = nn.ModuleList(made)

    def forward(self, bottoms: list[tuple[Tensor, ...]]) -> list[Tensor]:
        return [each(*values) for each, values in zip(self.layers, bottoms, strict=True)]


def test_they_are_exported_as_they_are() -> None:
    together = Together().eval()
    bottoms = [tuple(torch.rand(each) for each in shapes) for _, shapes in EXPORTED.values()]
    exported = torch.export.export(together, (bottoms,))
    others = [tuple(torch.rand(each) for each in shapes) for _, shapes in EXPORTED.values()]
    for kind, found, expected in zip(
        EXPORTED, exported.module()(others), together(others), strict=True
    ):
        assert torch.equal(found, expected), kind
