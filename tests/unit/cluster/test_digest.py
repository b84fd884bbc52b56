"""Digests of tensors: what enters, and what does not."""

import torch

from firecaffe.cluster.agree import digest, digest_each


def test_names_types_shapes_order_and_every_byte_enter() -> None:
    zeros = torch.zeros(2, 3)
    others = [
        [("weight", zeros)],
        [("bias", zeros)],
        [("weight", zeros.int())],  # the same bytes
        [("weight", zeros.view(3, 2))],
        [("weight", -zeros)],  # equal numbers
        [("weight", zeros), ("bias", zeros)],
        [("bias", zeros), ("weight", zeros)],
        [],
    ]
    assert len({digest(tensors) for tensors in others}) == len(others)


def test_memory_layout_does_not_enter() -> None:
    matrix = torch.arange(6.0).view(2, 3)
    strided = torch.stack([matrix, matrix], dim=2)[..., 0]
    assert not strided.is_contiguous()
    assert digest([("weight", matrix)]) == digest([("weight", strided)])


def test_each_alone_has_the_digest_of_itself() -> None:
    tensors = {"a": torch.ones(2), "b": torch.ones(3)}
    assert digest_each(tensors.items()) == {
        name: digest([(name, tensor)]) for name, tensor in tensors.items()
    }
