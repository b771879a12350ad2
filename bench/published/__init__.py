"""Published rows as data: ``rows()`` reads every document of this folder. No torch.

A row is its figures with unit and rounding, what the source states as settings of a RunSpec, and what we assume beyond
it. Assumptions come from the training program of its day (programs.yaml) or from the document, each with a source.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from bench.result import METRICS
from bench.spec import PUBLISHED_DIR, RunSpec, check, merge
from trainer_core.config import ConfigError, Problem

PROGRAMS = "programs.yaml"


@dataclass(frozen=True)
class Figure:
    """A published number; ``rounding`` is the last digit that the source prints."""

    value: float
    unit: str
    rounding: float


@dataclass(frozen=True)
class Source:
    """Where a row was published: a repository and commit (or another place), document, table, row, date, versions."""

    title: str
    repository: str
    path: str
    commit: str
    table: str
    row: str
    date: str
    versions: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Assumption:
    """Settings that the source does not state, and why we believe them."""

    settings: Mapping[str, Any]
    source: str


@dataclass(frozen=True)
class Published:
    """One published row.

    ``stated`` are dotted settings (and groups) of a RunSpec as the source gives them. ``figures``: metric -> Figure.
    ``baseline`` is the row that it was compared with, ``workload`` joins rows that train the same model in the same
    way. ``fault``: a known fault of the published run itself, which keeps the row out of every score.
    """

    id: str
    document: str
    source: Source
    workload: str
    gpus: int
    stated: Mapping[str, Any]
    figures: Mapping[str, Figure]
    assumed: tuple[Assumption, ...] = ()
    unstated: tuple[str, ...] = ()
    baseline: str | None = None
    fault: str | None = None
    note: str | None = None

    @property
    def table(self) -> str:
        """The table among all documents."""
        return f"{self.document}/{self.source.table}"

    def settings(self) -> dict[str, Any]:
        """What is stated and assumed as nested plain data; automatic values are not resolved."""
        flat: dict[str, Any] = {"train.warmup_steps": 5}
        for assumption in self.assumed:
            flat.update(assumption.settings)
        flat.update(self.stated)
        data: dict[str, Any] = {"engine": "simulate", "published": self.id}
        for key, value in sorted(flat.items(), key=lambda item: "." in item[0]):
            merge(data, key, value)
        merge(data, "parallel.world_size", self.gpus)
        return data

    def spec(self) -> RunSpec:
        """The row as a point to simulate. Raises ConfigError where the settings make no plan."""
        return RunSpec.from_dict(self.settings())


@cache
def rows() -> dict[str, Published]:
    """Every row of this folder by id. Raises ConfigError that names the file, the row and what is wrong with it."""
    found: dict[str, Published] = {}
    for path in sorted(PUBLISHED_DIR.glob("*.yaml")):
        if path.name != PROGRAMS:
            for row in read(path):
                if row.id in found:
                    raise ConfigError([Problem("published", row.id, f"{path}: row {row.id} exists twice")])
                found[row.id] = row
    for row in found.values():
        if row.baseline is not None and row.baseline not in found:
            raise ConfigError([Problem("published", row.id, f"row {row.id}: its baseline {row.baseline} is no row")])
    return found


def select(pattern: str) -> list[Published]:
    """The rows whose id matches a shell pattern. Raises ConfigError, with all ids, where none does."""
    chosen = [row for name, row in rows().items() if fnmatch.fnmatchcase(name, pattern)]
    if not chosen:
        raise ConfigError([Problem("published", pattern, f"published={pattern} matches none of {', '.join(rows())}")])
    return chosen


def read(path: Path) -> list[Published]:
    """The rows of one document, checked."""
    data = yaml.safe_load(path.read_text())
    document = data["document"]
    result = []
    for raw in data["rows"]:
        where = f"{path}: row {raw.get('id', '?')}"
        needed = ("id", "table", "row", "workload", "gpus", "stated", "figures")
        if missing := [key for key in needed if key not in raw]:
            raise ConfigError([Problem("published", raw.get("id"), f"{where} has no {', '.join(missing)}")])
        facts = ("title", "repository", "path", "commit", "date")
        if missing := [key for key in facts if not document.get(key)]:
            raise ConfigError([Problem("published", raw["id"], f"{where} has no source: {', '.join(missing)} missing")])
        stated = {**data.get("stated", {}), **raw["stated"]}
        source = Source(**{k: str(document[k]) for k in facts}, table=raw["table"], row=raw["row"],
                        versions=document.get("versions", {}))  # fmt: skip
        options = [*program(data.get("program"), source)["options"], *data.get("assumed", [])]
        row = Published(
            raw["id"], document["id"], source, raw["workload"], raw["gpus"], stated,
            {name: _figure(name, figure, where) for name, figure in raw["figures"].items()},
            assume(options, stated), tuple(data.get("unstated", ())), raw.get("baseline"), raw.get("fault"),
            raw.get("note"),
        )  # fmt: skip
        _check(row, where)
        result.append(row)
    return result


def _figure(name: str, raw: Any, where: str) -> Figure:
    unit = METRICS[name].unit if name in METRICS else None
    if not isinstance(raw, list) or len(raw) != 3 or raw[1] != unit:
        raise ConfigError([Problem("published", name, f"{where}: {name}={raw!r} is not [value, {unit}, rounding]")])
    return Figure(float(raw[0]), raw[1], float(raw[2]))


def _check(row: Published, where: str) -> None:
    """The settings make a plan on that many GPUs."""
    try:
        errors, _ = check(row.spec())
    except ConfigError as error:
        errors = error.problems
    if errors:
        raise ConfigError([replace(p, message=f"{where}: {p.message}") for p in errors])


@cache
def _programs() -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load((PUBLISHED_DIR / PROGRAMS).read_text())
    return loaded


def program(name: str | None, source: Source) -> Mapping[str, Any]:
    """The training program ``name``, or the one of the source's repository and date; no options where none fits."""
    if name is not None:
        if name not in _programs():
            raise ConfigError([Problem("program", name, f"program {name} is not one of {', '.join(_programs())}")])
        chosen: Mapping[str, Any] = _programs()[name]
        return chosen
    for candidate in _programs().values():
        if source.repository == candidate["repository"] and candidate["from"] <= source.date[:7] <= candidate["until"]:
            chosen = candidate
            return chosen
    return {"options": []}


def assume(options: list[Mapping[str, Any]], stated: Mapping[str, Any]) -> tuple[Assumption, ...]:
    """The options that apply to what is stated; what is stated is never assumed otherwise."""
    chosen = []
    for option in options:
        when = all(stated.get(key) == value for key, value in option.get("when", {}).items())
        degree = option.get("when_above_one")
        settings = {key: value for key, value in option["set"].items() if key not in stated}
        if when and settings and (degree is None or stated.get(degree, 1) > 1):
            chosen.append(Assumption(settings, option["source"]))
    return tuple(chosen)
