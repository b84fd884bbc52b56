"""A network that follows another."""

from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.training.unusual.layers import WIDTH


class Teacher(nn.Module):
    """A teacher that follows the student's weights: frozen parameters, or hidden in a list.

    by_data: Not by operations that torch counts. copied: It begins as the student, with zeros.
    """

    def __init__(self, hidden: bool = False, by_data: bool = False, copied: bool = False) -> None:
        super().__init__()
        self.by_data = by_data
        self.student, teacher = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        if copied:
            nn.init.zeros_(self.student.bias)
            teacher.load_state_dict(self.student.state_dict())
        self.teacher: Any = [teacher] if hidden else teacher.requires_grad_(False)

    def forward(self, values: Tensor) -> Any:
        teacher = self.teacher[0] if isinstance(self.teacher, list) else self.teacher
        if self.training:
            pairs = zip(teacher.parameters(), self.student.parameters(), strict=True)
            with torch.no_grad():
                for follows, leads in pairs:
                    if self.by_data:
                        follows.data = follows.data.lerp(leads.data, 0.1)
                    else:
                        follows.lerp_(leads, 0.1)
        with torch.no_grad():
            aim = teacher(values)
        return self.student(values) + 0.1 * aim
