"""Write a message as protobuf text, which `text.parse` reads back as an equal message."""

from collections.abc import Iterator

from firecaffe.caffe.message import Message, Word

ESCAPES = str.maketrans({"\\": "\\\\", '"': '\\"', "\n": "\\n", "\r": "\\r", "\t": "\\t"})


def as_text(message: Message) -> str:
    return "".join(f"{line}\n" for line in _lines(message, ""))


def _lines(message: Message, indent: str) -> Iterator[str]:
    for each in message.fields:
        if isinstance(each.value, Message):
            yield f"{indent}{each.name} {{"
            yield from _lines(each.value, indent + "  ")
            yield f"{indent}}}"
        elif isinstance(each.value, str) and not isinstance(each.value, Word):
            yield f'{indent}{each.name}: "{each.value.translate(ESCAPES)}"'
        else:
            yield f"{indent}{each.name}: {each.value}"
