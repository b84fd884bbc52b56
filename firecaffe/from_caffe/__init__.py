"""Import of a Caffe solver or net: a folder with a recipe and a report of the conversion."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from firecaffe.caffe.message import CaffeError, Message, Note


@dataclass
class Report:
    """Settings understood, changed, needed or left out."""

    understood: list[Note] = field(default_factory=list)
    """Settings that give Caffe's results."""
    changed: list[Note] = field(default_factory=list)
    """Settings that work differently here, and how."""
    needed: list[Note] = field(default_factory=list)
    """Things that the user must add before training."""
    left_out: list[Note] = field(default_factory=list)

    def became(self, message: Message, name: str, what: str) -> None:
        self.understood.append(Note(message.place(name), what))

    def differs(self, message: Message, name: str, what: str) -> None:
        self.changed.append(Note(message.place(name), what))

    def needs(self, message: Message, name: str, what: str) -> None:
        self.needed.append(Note(message.place(name), what))

    def lacks(self, message: Message, name: str, what: str) -> None:
        self.left_out.append(Note(message.place(name), what))

    def add_unread(self, message: Message, line: int, name: str) -> None:
        self.left_out.append(Note(message.place(line), f"{name} is not understood"))

    def lines(self) -> list[str]:
        lines = []
        for heading, notes in self._parts("understood", "changed", "needed", "left out"):
            if notes:
                lines.append(f"{heading}:")
                lines += [f"  {note.place}: {note.what}" for note in notes]
        return lines

    def markdown(self, title: str) -> str:
        headings = ("Understood", "Changed", "Needed before a training", "Left out")
        parts = [f"# {title}"]
        for heading, notes in self._parts(*headings):
            rows = [f"- `{note.place}`: {note.what}" for note in notes] or ["Nothing."]
            parts.append("\n".join([f"## {heading}", "", *rows]))
        return "\n\n".join(parts) + "\n"

    def _parts(self, *headings: str) -> Iterator[tuple[str, list[Note]]]:
        parts = (self.understood, self.changed, self.needed, self.left_out)
        return zip(headings, parts, strict=True)


def note_of(error: CaffeError) -> Note:
    match = re.match(r"(.*?:\d+): (.*)", str(error))
    return Note(match[1], match[2]) if match else Note("", str(error))
