"""Photos on their way to a GPU: pinned, moved, and normalized there to what the CPU gives."""

from pathlib import Path

import pytest
import torch

from firecaffe.data import Batches, DataConfig, SampleOrder, open_data
from firecaffe.data.train_batches import BatchesAhead
from tests.kit.data_photos import make_folder, pack

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("augment", ["caffe", "inception"])
def test_batches_on_the_gpu_are_those_of_the_cpu(tmp_path: Path, augment: str) -> None:
    pack(make_folder(tmp_path / "photos"), tmp_path / "packed")
    config = DataConfig(
        "packed",
        str(tmp_path / "packed"),
        resize=16,
        crop=12,
        mirror=True,
        augment=augment,
        mean=[0.5, 0.4, 0.3],
        std=[0.2, 0.3, 0.4],
    )
    train, order = open_data(config).train, SampleOrder(5, 30, 8, 4)
    there = BatchesAhead(Batches(train, order, config, "cuda"), range(2), 0, 8)
    here = Batches(train, order, config, "cpu")
    for step in range(8):
        for leaf in range(2):
            images, labels = there.train_batch(step, leaf)
            expected, expected_labels = here.train_batch(step, leaf)
            assert images.device.type == labels.device.type == "cuda"
            torch.testing.assert_close(images.cpu(), expected, rtol=1e-6, atol=1e-6)
            assert torch.equal(labels.cpu(), expected_labels)
    there.close()
