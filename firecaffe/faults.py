"""The kinds of faults of a rank, each with its description, its exit code and advice.

A fault is one line, stored as fault.json and sent to the other ranks, so all end with the same
message. docs/explanation/faults.md lists the kinds.
"""

import json
from dataclasses import asdict, dataclass, fields
from typing import Any, Self

from firecaffe.resume_advice import restart_hint, resume_option


@dataclass(frozen=True)
class FaultKind:
    exit_code: int
    what: str
    """The text between "rank 1 on HOST" and "at step 40"."""
    advice: str


RESUME_WORD, RESTARTS = "{resume}", "{restarts}"
"""Placeholders for words that differ between a script and the command line (`resume_advice`)."""

RESUME = f"resume from the newest checkpoint ({RESUME_WORD})"
ANEW = "start it again"

AGAIN = f"{RESUME}{RESTARTS}"
"""The advice for faults that a restart can repair. The launcher restarts for no others."""

KINDS = {
    "exception": FaultKind(1, "failed", "see its traceback"),
    "other": FaultKind(8, "cannot go on", "mend what it says"),
    "data": FaultKind(3, "has no data to go on with", "mend the data, then " + RESUME),
    "checkpoint": FaultKind(4, "cannot read or save a checkpoint", "see what the disk says"),
    "gone": FaultKind(9, "went away", AGAIN),
    "killed": FaultKind(10, "was killed", AGAIN),
    "worker_killed": FaultKind(10, "lost a data worker", AGAIN),
    "frozen": FaultKind(11, "froze", "look for a stopped process or a stalled host, then " + AGAIN),
    "unreachable": FaultKind(12, "cannot be reached", "look at its host's network, then " + AGAIN),
    "stuck": FaultKind(
        13, "is alive but makes no progress", "look at what it waits for, then " + AGAIN
    ),
    "out_of_memory": FaultKind(
        14, "ran out of memory", "take smaller micro-batches, or fewer ranks on a host"
    ),
    "launcher_killed": FaultKind(15, "lost its launcher", RESUME),
    "not_finite": FaultKind(
        18,
        "computed a number that is not finite, as all ranks did",
        "at the first step look at the data and the loss; later take a lower solver.base_lr, a "
        "longer solver.warmup_steps, or solver.clip_gradients",
    ),
    "diverged": FaultKind(
        19,
        "diverged, as all ranks did: the loss stays far above its start",
        "take a lower solver.base_lr, a longer solver.warmup_steps, or what the line says",
    ),
    "preempted": FaultKind(75, "was asked to stop", RESUME),
}

SAVED = ("preempted", "launcher_killed")
"""Kinds that are reported by their own message, because it names the checkpoint."""

TOGETHER = (*SAVED, "not_finite", "diverged")
"""Kinds that all ranks agree on at the end of a step, so no rank reports them to another."""

ITSELF = "itself"
"""`Fault.seen` of a fault that its own rank reports."""

ANOTHER = "another rank"
"""`Fault.seen` if a rank only ends because of another rank's report."""

GOES_ON = "the others go on"
"""The text after the loss of a rank without which rank 0 continues."""

MAX_TEXT = 2000


@dataclass(frozen=True)
class Fault:
    """A fault of one rank."""

    kind: str
    """A key of `KINDS`."""
    rank: int
    """The rank with the fault."""
    host: str
    """The rank's host."""
    step: int
    """The step in progress, counted from 1; 0 before the first."""
    seen: str
    """How, or by whom, the fault was noticed."""
    detail: str = ""
    """The rank's own words, or what ended it."""
    code: int = 0
    """The exit code of an error that has its own; 0 for that of the kind."""
    can_resume: bool = True
    """Whether the run has a checkpoint to resume from, as far as is known."""
    folder: str = ""
    """The run's folder; empty if it is not known."""

    @property
    def exit_code(self) -> int:
        """The exit code of a command that ends with it."""
        return self.code or KINDS[self.kind].exit_code

    @property
    def line(self) -> str:
        """The event and the advice, in one line."""
        advice = KINDS[self.kind].advice
        if not self.can_resume:
            advice = advice.replace(RESUME, ANEW)
        advice = advice.replace(RESUME_WORD, resume_option(self.folder))
        return f"{self.event}; {advice.replace(RESTARTS, restart_hint())}"

    @property
    def event(self) -> str:
        """The rank, what happened to it, at which step, and who noticed it if not itself."""
        what = f"rank {self.rank} on {self.host} {KINDS[self.kind].what}"
        when = f"at step {self.step}" if self.step else "before the first step"
        detail = f": {self.detail}" if self.detail else ""
        seen = "" if self.seen == ITSELF else f" (seen by {self.seen})"
        return f"{what} {when}{detail}{seen}"

    def as_json(self) -> dict[str, Any]:
        """Return the content of fault.json."""
        return {**asdict(self), "exit_code": self.exit_code, "line": self.line}

    def as_text(self) -> str:
        """Return one line of JSON for `parse`, with texts cut to MAX_TEXT."""
        short = {
            name: value[:MAX_TEXT] if isinstance(value, str) else value
            for name, value in asdict(self).items()
        }
        return json.dumps(short, ensure_ascii=False)

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read the JSON of another rank or a file. Raises ValueError if it is not a fault."""
        try:
            said = {"folder": "", **json.loads(text)}
            fault = cls(**{field.name: said[field.name] for field in fields(cls)})
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise ValueError(f"no fault: {error}") from error
        texts = fault.kind, fault.host, fault.seen, fault.detail, fault.folder
        if not all(isinstance(word, str) and len(word) <= MAX_TEXT for word in texts):
            raise ValueError("no fault: a text is missing or too long")
        if fault.kind not in KINDS or not all(
            type(n) is int for n in (fault.rank, fault.step, fault.code)
        ):
            raise ValueError("no fault: an unknown kind, or a rank, step or code that is no number")
        if type(fault.can_resume) is not bool:
            raise ValueError("no fault: can_resume is neither true nor false")
        return fault
