"""Write a message as protobuf text, which `text.parse` reads back as an equal message."""

from collections.abc import Iterator

from firecaffe.caffe.message import Message, Word

ESCAPES = str.maketrans({"\\": "\\\\", '"': '\\"', "\n": "\\n", "\r": "\\r", "\t": "\\t"})


def as_text(message: Message) -> str:
    return "".join(f"{line}\n" for line in _lines(message, ""))


def _lines(message: Message, indent: str) -> Iterator[str]:
    for field in message.fields:
        if isinstance(field.value, Message):
            yield f"{indent}{field.name} {{"
            yield from _lines(field.value, indent + "  ")
            yield f"{indent}}}"
        elif isinstance(field.value, str) and not isinstance(field.value, Word):
            yield f'{indent}{field.name}: "{field.value.translate(ESCAPES)}"'
        else:
            yield f"{indent}{field.name}: {field.value}"
