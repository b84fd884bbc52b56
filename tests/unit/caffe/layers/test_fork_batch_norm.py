"""BN of PSPNet's fork and of SegNet's, against plain loops over the channels."""

import torch
from torch import Tensor, nn

from tests.unit.caffe.layers.made import layer, module_of, on_meta, refusal

SHAPE = (4, 3, 2, 5)
FILLERS = "slope_filler { value: 2 } bias_filler { value: 0.5 }"


def averaged(words: str = "") -> nn.Module:
    module = module_of(layer("BN", f"bn_param {{ {FILLERS} {words} }}"), SHAPE).double()
    for name, blob in [*module.named_parameters(), *module.named_buffers()]:
        assert blob.shape == (1, 3, 1, 1), name
        blob.data += torch.rand(blob.shape, dtype=torch.double)
    return module


def expected(planes: Tensor, module: nn.Module, eps: float, statistics: str) -> Tensor:
    """x less the mean, over the root of variance + eps, times the slope, plus the bias."""
    blobs = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    out = torch.zeros_like(planes)
    for c in range(planes.shape[1]):
        values = planes[:, c]
        mean = values.sum() / values.numel()
        variance = ((values - mean) ** 2).sum() / values.numel()
        if statistics == "averages":
            mean, variance = blobs["mean"][0, c, 0, 0], blobs["variance"][0, c, 0, 0]
        slope, bias = blobs["weight"][0, c, 0, 0], blobs["bias"][0, c, 0, 0]
        out[:, c] = (values - mean) / (variance + eps) ** 0.5 * slope + bias
    return out


def test_averages_are_kept_while_training_and_used_otherwise() -> None:
    module = averaged("momentum: 0.75 eps: 0.01")
    planes = torch.randn(SHAPE, dtype=torch.double, requires_grad=True)
    before = {name: blob.clone() for name, blob in module.named_buffers()}
    found = module.train()(planes)
    torch.testing.assert_close(found, expected(planes, module, 0.01, "own"))
    for c in range(3):
        values = planes.detach()[:, c]
        own = {"mean": values.mean(), "variance": values.var(correction=0)}
        for name, blob in module.named_buffers():
            kept = 0.75 * before[name][0, c, 0, 0] + 0.25 * own[name]
            torch.testing.assert_close(blob[0, c, 0, 0], kept)
    assert torch.autograd.gradcheck(module, (planes,), fast_mode=True)
    found = module.eval()(planes)
    torch.testing.assert_close(found, expected(planes, module, 0.01, "averages"))
    assert torch.autograd.gradcheck(module, (planes,), fast_mode=True)


def test_frozen_averages_are_used_in_training_and_nothing_is_trained() -> None:
    module = averaged("frozen: true").train()
    assert not list(module.parameters())
    planes = torch.randn(SHAPE, dtype=torch.double)
    before = [blob.clone() for blob in module.buffers()]
    torch.testing.assert_close(module(planes), expected(planes, module, 1e-5, "averages"))
    assert all(map(torch.equal, before, module.buffers()))


def test_blobs_start_as_the_file_says() -> None:
    module = module_of(layer("BN", f"bn_param {{ {FILLERS} frozen: true }}"), SHAPE)
    starts = {name: float(blob[0, 0, 0, 0]) for name, blob in module.named_buffers()}
    assert starts == {"weight": 2, "bias": 0.5, "mean": 0, "variance": 1}
    module = module_of(layer("BN", "bn_param { shift_filler { value: 0.25 } }"), SHAPE)
    starts = {name: float(blob.detach()[0, 2, 0, 0]) for name, blob in module.named_parameters()}
    assert starts == {"weight": 0, "bias": 0.25}


def test_its_own_statistics_are_used_in_each_phase() -> None:
    module = module_of(layer("BN", "bn_param { scale_filler { value: 2 } }"), SHAPE).double()
    planes = torch.randn(SHAPE, dtype=torch.double, requires_grad=True)
    for training in (True, False):
        found = module.train(training)(planes)
        torch.testing.assert_close(found, expected(planes, module, 1e-9, "own"))
    assert torch.autograd.gradcheck(module, (planes,), fast_mode=True)


def test_inference_scales_and_shifts() -> None:
    words = "bn_param { bn_mode: INFERENCE scale_filler { value: 2 } shift_filler { value: 3 } }"
    planes = torch.randn(SHAPE)
    assert torch.equal(module_of(layer("BN", words), SHAPE)(planes), planes * 2 + 3)


def test_planes_of_one_value_and_the_meta_device() -> None:
    text = layer("BN", f"bn_param {{ {FILLERS} }}")
    found = module_of(text, (1, 3, 1, 1))(torch.randn(1, 3, 1, 1))
    torch.testing.assert_close(found, torch.full((1, 3, 1, 1), 0.5), atol=1e-4, rtol=0)
    assert on_meta(text, SHAPE) == [SHAPE]


def test_what_cannot_be_is_one_line() -> None:
    for words, part in (
        ("", "no fork"),
        ("frozen: true bn_mode: LEARN", "two forks"),
        ("momentum: 2", "momentum is 2"),
    ):
        assert part in refusal(layer("BN", f"bn_param {{ {words} }}"), SHAPE), words
    assert "4 axes" in refusal(layer("BN", "bn_param { frozen: true }"), (2, 3))
