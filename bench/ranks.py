"""What the ranks of a run wrote, read back: one JSON line an event, restarts merged. No torch.

A rank appends to ``ranks/<r>.jsonl``: ``start``, ``phase``, ``step``, ``memory``, ``evidence``, ``resume``, ``error``,
``interrupted`` and, when all is done, ``end``. A restart appends to the same file.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.store import RunDir, read_jsonl

Row = dict[str, Any]


@dataclass
class RankLog:
    """One rank. ``steps`` holds each step once; ``error``, ``end`` and ``interrupted`` belong to the last attempt."""

    rank: int
    attempts: int = 0
    start: Row | None = None
    error: Row | None = None
    end: Row | None = None
    interrupted: Row | None = None
    last: Row = field(default_factory=dict)
    steps: dict[int, Row] = field(default_factory=dict)
    resumed_at: list[int] = field(default_factory=list)
    evidence: Row = field(default_factory=dict)

    @property
    def steps_done(self) -> int:
        return max(self.steps, default=0)

    def started_since(self, time: float) -> bool:
        """Whether this rank came up in the attempt that began at ``time`` (unix seconds)."""
        return self.start is not None and float(self.start["time"]) >= time

    def add(self, row: Row) -> None:
        """Take one line in. A step that is done again replaces what was recorded from there on."""
        kind = row.get("kind")
        self.last = row
        if kind == "start":
            self.attempts += 1
            self.start, self.error, self.end, self.interrupted = row, None, None, None
        elif kind == "resume":
            self.resumed_at.append(int(row["step"]))
            self.steps = {n: s for n, s in self.steps.items() if n <= row["step"]}
        elif kind == "step":
            self.steps = {n: s for n, s in self.steps.items() if n < row["step"]}
            self.steps[int(row["step"])] = row
        elif kind == "evidence":
            self.evidence |= row.get("evidence", {})
        elif kind in ("error", "end", "interrupted"):
            setattr(self, kind, row)


def read_rank(path: Path) -> RankLog:
    log = RankLog(int(path.stem))
    for row in read_jsonl(path):
        log.add(row)
    return log


def read_ranks(run: RunDir) -> list[RankLog]:
    """Every rank that wrote, in rank order."""
    return sorted((read_rank(p) for p in run.ranks.glob("*.jsonl") if p.stem.isdigit()), key=lambda log: log.rank)


class Tail:
    """Follows all rank files of a live run; :meth:`read` returns the lines that came since the last call."""

    def __init__(self, run: RunDir):
        self.folder = run.ranks
        self.offsets: dict[Path, int] = {}

    def read(self) -> list[tuple[int, Row]]:
        """(rank, line) of every new complete line."""
        rows = []
        for path in sorted(self.folder.glob("*.jsonl")):
            offset = self.offsets.get(path, 0)
            with open(path, "rb") as file:
                file.seek(offset)
                new = file.read()
            whole = new[: new.rfind(b"\n") + 1]
            self.offsets[path] = offset + len(whole)
            for line in whole.splitlines():
                try:
                    row = json.loads(line)
                except ValueError:
                    continue
                if isinstance(row, dict):
                    rows.append((int(path.stem), row))
        return rows

    def skip(self) -> None:
        """Leave out what is there already: the lines of an earlier attempt."""
        self.read()
