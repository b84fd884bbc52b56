"""A Datum: what Caffe's databases hold under each key.

Source: BVLC/caffe, src/caffe/proto/caffe.proto (message Datum).
"""

from functools import cache
from pathlib import Path
from typing import Any

from firecaffe.errors import DataError

FIELDS = (
    ("channels", 1, "INT32"),
    ("height", 2, "INT32"),
    ("width", 3, "INT32"),
    ("data", 4, "BYTES"),
    ("label", 5, "INT32"),
    ("float_data", 6, "FLOAT"),
    ("encoded", 7, "BOOL"),
)
REPEATED = ("FLOAT",)
"""Types of the fields that may be there more than once."""


def check_protobuf(path: Path) -> None:
    """path: of what needs it. Raises: DataError if it is not installed."""
    try:
        import google.protobuf  # noqa: F401
    except ImportError:
        raise DataError(
            f"{path}: Caffe's LMDBs need protobuf; pip install 'firecaffe[lmdb]'"
        ) from None


def parse_datum(value: bytes) -> Any:
    """The message that bytes hold. Raises: google.protobuf's DecodeError."""
    found = message_of("Datum", FIELDS)()
    found.ParseFromString(value)
    return found


@cache
def message_of(name: str, fields: tuple[tuple[str, int, str], ...]) -> Any:
    """The class of a message of such fields: name, number and type."""
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

    file = descriptor_pb2.FileDescriptorProto(name=f"{name}.proto", package="firecaffe")
    message = file.message_type.add(name=name)
    of_field = descriptor_pb2.FieldDescriptorProto
    for field, number, kind in fields:
        message.field.add(
            name=field,
            number=number,
            type=getattr(of_field, f"TYPE_{kind}"),
            label=of_field.LABEL_REPEATED if kind in REPEATED else of_field.LABEL_OPTIONAL,
        )
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName(f"firecaffe.{name}"))
