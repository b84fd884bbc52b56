"""Mixed and erased samples: against the papers' formulas, torch's soft targets, and as keyed."""

import pytest
import torch
import torch.nn.functional as F

from firecaffe.errors import RecipeError
from firecaffe.training.mix import Mixed, Mixing

IMAGES = torch.rand(4, 3, 12, 10, generator=torch.Generator().manual_seed(1)) + 1
TARGETS = torch.tensor([0, 2, 1, 2])


def drawn(mixing: Mixing, count: int = 300) -> list[Mixed]:
    return [mixing(IMAGES, TARGETS, step, leaf) for step in range(count // 3) for leaf in range(3)]


def test_mixup_is_a_weighted_mean_with_the_one_before() -> None:
    start = IMAGES.clone()
    found = drawn(Mixing(7, mixup=0.4))
    for each in found:
        expected = each.share * IMAGES + (1 - each.share) * IMAGES[[3, 0, 1, 2]]
        torch.testing.assert_close(each.inputs, expected)
        assert each.partners.tolist() == [2, 0, 2, 1]
        assert each.counted is (each.targets if each.share >= 0.5 else each.partners)
    assert torch.equal(IMAGES, start)
    # Beta(a, a): mean 1/2, variance 1 / (4 (2 a + 1)).
    shares = torch.tensor([each.share for each in found])
    assert shares.mean().item() == pytest.approx(0.5, abs=0.06)
    assert shares.var().item() == pytest.approx(1 / 7.2, rel=0.15)


def test_cutmix_is_a_box_of_the_one_before_and_shares_its_area() -> None:
    before = IMAGES[[3, 0, 1, 2]]
    shares = set()
    for each in drawn(Mixing(7, cutmix=1.0), 60):
        is_other = (each.inputs != IMAGES)[:, 0]
        rows, columns = is_other[0].any(1), is_other[0].any(0)
        assert torch.equal(is_other, (rows[:, None] & columns).expand(4, 12, 10))
        assert torch.equal(each.inputs, torch.where(is_other[:, None], before, IMAGES))
        assert each.share == pytest.approx(1 - is_other[0].float().mean().item())
        shares.add(each.share)
    assert len(shares) > 20


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_the_loss_is_cross_entropy_with_soft_targets(smoothing: float) -> None:
    logits = torch.randn(4, 3, generator=torch.Generator().manual_seed(2))
    (mixed, *_) = drawn(Mixing(7, mixup=1.0), 3)
    one_hot = F.one_hot(TARGETS, 3).float()
    soft = mixed.share * one_hot + (1 - mixed.share) * one_hot[[3, 0, 1, 2]]
    found = mixed.loss(lambda o, t: F.cross_entropy(o, t, label_smoothing=smoothing), logits)
    torch.testing.assert_close(found, F.cross_entropy(logits, soft, label_smoothing=smoothing))


def test_erasing_sets_a_box_of_some_images_to_zero() -> None:
    found = drawn(Mixing(7, erasing=0.5))
    erased = 0
    for each in found:
        assert each.partners is None
        for image, whole in zip(each.inputs, IMAGES, strict=True):
            gone = (image == 0)[0]
            assert torch.equal(image, torch.where(gone, 0.0, whole))
            if gone.any():
                erased += 1
                rows, columns = gone.any(1), gone.any(0)
                assert torch.equal(gone, rows[:, None] & columns)
                # 2 to 33 % of the area, but for the rounding of sides.
                assert 0 < gone.float().mean() < 0.4
    assert erased / (4 * len(found)) == pytest.approx(0.5, abs=0.06)


def test_what_is_drawn_depends_on_seed_step_and_micro_batch_alone() -> None:
    both = Mixing(7, mixup=0.4, cutmix=1.0, erasing=0.3)
    first, again = drawn(both, 30), drawn(both, 30)
    for one, two in zip(first, again, strict=True):
        assert torch.equal(one.inputs, two.inputs)
        assert one.share == two.share
    shares = [each.share for each in first]
    assert len(set(shares)) > 20
    other = [each.share for each in drawn(Mixing(8, 0.4, 1.0, 0.3), 30)]
    assert sum(one == two for one, two in zip(shares, other, strict=True)) < 3
    # Both ways are drawn: of a box, all of an image outside it is as it was.
    own = torch.cat([IMAGES, torch.zeros(1, 3, 12, 10)])
    assert {bool(torch.isin(each.inputs, own).all()) for each in first} == {True, False}
    # Nothing is done unless it is asked for.
    bare = Mixing(7)(IMAGES, TARGETS, 0, 0)
    assert bare.inputs is IMAGES
    assert bare.counted is TARGETS


def test_refused() -> None:
    with pytest.raises(RecipeError, match=r"data\.cutmix .*\(4, 7\)"):
        Mixing(7, cutmix=1.0)(torch.rand(4, 7), TARGETS, 0, 0)
    with pytest.raises(RecipeError, match=r"data\.cutmix .*\(4, 12, 10\)"):
        Mixing(7, cutmix=1.0)(IMAGES, torch.zeros(4, 12, 10), 0, 0)
    with pytest.raises(RecipeError, match=r"targets that are one tensor; found a dict"):
        Mixing(7, mixup=1.0)(IMAGES, {"a": TARGETS}, 0, 0)
