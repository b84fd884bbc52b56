"""All readers that are fuzzed, by name."""

from collections.abc import Mapping

from benchmarks.faults.fuzzed import binary, caffe, data, records, trained
from benchmarks.faults.fuzzed.reader import Reader

READERS: Mapping[str, Reader] = {
    **records.READERS,
    **trained.READERS,
    **data.READERS,
    **caffe.READERS,
    **binary.READERS,
}
