"""From the text of a command line to the points of a sweep: named points x choices, each one spec or its faults."""

from __future__ import annotations

import difflib
import hashlib
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from bench.spec import RunSpec, check, from_overrides, groups, merge, parse_override, plain, quote
from trainer_core.config import ConfigError, Problem, from_dict

if TYPE_CHECKING:
    from hydra.core.override_parser.types import Glob, Override

SWEEPS = Path(__file__).resolve().parent / "conf" / "sweep"
ADHOC = "runs"
"""The folder of points that come from the command line alone, as of ``bench run``."""


@dataclass(frozen=True)
class SweepFile:
    """``sweeps/conf/sweep/NAME.yaml``. Every override may be a list of choices: their product is the grid.

    ``overrides`` hold for every point; ``points`` gives names to lists of overrides (none: one unnamed point);
    ``baseline`` names the point that the others are compared with.
    """

    about: str = ""
    overrides: tuple[str, ...] = ()
    points: dict[str, list[str]] = field(default_factory=dict)
    baseline: str | None = None

    @classmethod
    def load(cls, name: str) -> SweepFile:
        """Raises ConfigError for an unknown sweep, with the known ones, and for what the file gets wrong."""
        path = SWEEPS / f"{name}.yaml"
        if not path.exists():
            known = sorted(p.stem for p in SWEEPS.glob("*.yaml"))
            near = difflib.get_close_matches(name, known, 1)
            raise ConfigError([Problem("sweep", name, f"sweep={name} is not one of {', '.join(known)}",
                                       nearest=near[0] if near else None)])  # fmt: skip
        data = yaml.safe_load(path.read_text())
        data["overrides"] = tuple(data.get("overrides", ()))
        unknown = sorted(data.keys() - {"about", "overrides", "points", "baseline"})
        if unknown or data.get("baseline") not in (None, *data.get("points", {})):
            text = f"unknown keys {unknown}" if unknown else f"baseline {data['baseline']!r} is none of its points"
            raise ConfigError([Problem("sweep", name, f"sweep={name}: {text}")])
        return cls(**data)


@dataclass(frozen=True)
class OwnKeys:
    """Keys of a command line that choose and place points and never enter a spec."""

    results: str = "results"
    sweep: str | None = None
    point: str | None = None
    only: str | None = None
    cluster: str | None = None
    report: str | None = None
    cluster_changes: dict[str, Any] = field(default_factory=dict)


OWN = tuple(name for name in OwnKeys.__dataclass_fields__ if name != "cluster_changes")
CLUSTER = "cluster."
"""``cluster.FIELD=VALUE`` changes a field of the chosen cluster."""


def is_own(key: str) -> bool:
    return key in OWN or key.startswith(CLUSTER)


@dataclass(frozen=True)
class Point:
    """One point: its name, the sweep it belongs to, its ``KEY=VALUE`` texts, and the spec or what is wrong with it."""

    name: str
    sweep: str
    overrides: tuple[str, ...]
    spec: RunSpec | None
    problems: tuple[Problem, ...] = ()
    warnings: tuple[Problem, ...] = ()

    @classmethod
    def build(cls, texts: Sequence[str]) -> Point:
        """Read and check one point; ``point=NAME`` and ``sweep=NAME`` among the texts place it."""
        own = {o.key_or_group: str(plain(o.value())) for o in map(parse_override, texts) if is_own(o.key_or_group)}
        overrides = tuple(t for t in texts if not is_own(parse_override(t).key_or_group))
        name, sweep = own.get("point", ""), own.get("sweep", ADHOC)
        try:
            spec = from_overrides(overrides)
            errors, warnings = check(spec)
        except ConfigError as error:
            return cls(name, sweep, overrides, None, tuple(error.problems))
        return cls(name, sweep, overrides, spec, tuple(errors), tuple(warnings))

    @cached_property
    def run_id(self) -> str:
        """The spec's; of a point that makes no spec, a digest of its texts."""
        if self.spec is not None:
            return self.spec.run_id
        return hashlib.sha256("\0".join(sorted(self.overrides)).encode()).hexdigest()[:12]

    @property
    def reason(self) -> str:
        return "; ".join(p.message for p in self.problems)


def expand(arguments: Sequence[str]) -> list[list[str]]:
    """Every point of a command line as texts without choices, ``point=`` and ``sweep=`` included.

    A sweep's own overrides come first, then the point's, then the command line's, which so apply on top of every
    point; of a key given twice the last counts. Raises ConfigError for what is no point of any sweep.
    """
    parsed = [parse_override(text) for text in arguments]
    user = [o for o in parsed if not is_own(o.key_or_group)]
    chosen = [name for o in parsed if o.key_or_group == "sweep" for name in _choices(o)]
    wanted = [name for o in parsed if o.key_or_group == "point" for name in _choices(o)]
    jobs: list[list[str]] = []
    for sweep in chosen or [None]:
        file = SweepFile() if sweep is None else SweepFile.load(sweep)
        unknown = [name for name in wanted if name not in file.points]
        if unknown:
            raise ConfigError([Problem("point", name, f"point={name} is not one of {', '.join(file.points) or 'none'} "
                                       f"(the points of sweep={sweep})") for name in unknown])  # fmt: skip
        for name, texts in file.points.items() if file.points else [("", [])]:
            if not wanted or name in wanted:
                layers = [*map(parse_override, (*file.overrides, *texts)), *user]
                jobs += _product(name, sweep or ADHOC, layers)
    return jobs


def _product(name: str, sweep: str, layers: list[Override]) -> Iterator[list[str]]:
    """The product of all choices; each point is named by its own name and the choices it took."""
    last = {o.key_or_group: o for o in layers}
    choices = [[(key, value) for value in _choices(o)] for key, o in last.items()]
    varying = [key for key, values in zip(last, choices, strict=True) if len(values) > 1]
    for combination in itertools.product(*choices):
        took = [f"{key.rsplit('.', 1)[-1]}={value}" for key, value in combination if key in varying]
        texts = [f"{key}={quote(value)}" for key, value in combination]
        yield [*texts, f"point={quote(' '.join([name, *took]).strip())}", f"sweep={quote(sweep)}"]


def _choices(override: Override) -> list[Any]:
    """The values an override stands for: one, or those of a choice, a range or a glob over a group's options."""
    from hydra.core.override_parser.types import ValueType

    if not override.is_sweep_override():
        return [plain(override.value())]
    value: Any = override.value()
    if override.value_type is ValueType.GLOB_CHOICE_SWEEP:
        return _matches(override.key_or_group, override.input_line, value)
    if override.is_interval_sweep():
        raise ConfigError([Problem(override.key_or_group, override.input_line, f"{override.input_line!r}: an interval "
                                   "has no end of points; use range(from,to,step) or a,b,c")])  # fmt: skip
    return [plain(v) for v in override.sweep_iterator()]


def _matches(key: str, text: str | None, glob: Glob) -> list[str]:
    """The options that ``glob`` matches. Raises ConfigError, with all options, where there are none."""
    options = _options(key)
    found = list(glob.filter(options))
    if not found:
        what = "published row" if key == "published" else f"option of {key}"
        raise ConfigError([Problem(key, text, f"{text} matches no {what}; there are {', '.join(options)}")])
    return found


def _options(key: str) -> list[str]:
    """What ``glob()`` chooses from. Raises ConfigError for a key that is no group."""
    from bench.published import rows

    names = {
        "published": list(rows()),
        "sweep": sorted(p.stem for p in SWEEPS.glob("*.yaml")),
        **{group: list(options) for group, options in groups().items()},
    }
    if key not in names:
        raise ConfigError([Problem(key, "glob", f"{key}: glob() works for {', '.join(names)}")])
    return names[key]


def own_keys(arguments: Sequence[str]) -> OwnKeys:
    """The keys of a command line that are not the spec's. Raises ConfigError for an unknown value."""
    values: dict[str, Any] = {"cluster_changes": {}}
    for o in map(parse_override, arguments):
        if o.key_or_group.startswith(CLUSTER):
            if o.is_sweep_override():
                message = f"{o.input_line!r} is a list, but a sweep goes to one cluster; quote a value with commas"
                raise ConfigError([Problem(o.key_or_group, o.input_line, message)])
            merge(values["cluster_changes"], o.key_or_group.removeprefix(CLUSTER), plain(o.value()))
        elif o.key_or_group in OWN:
            value = _choices(o)
            values[o.key_or_group] = None if value == [None] else ",".join(map(str, value))
    own = from_dict(OwnKeys, values)
    for key, legal in (("only", ("failed",)), ("report", ("after",))):
        value = getattr(own, key)
        if value not in (None, *legal):
            raise ConfigError([Problem(key, value, f"{key}={value} is not one of {', '.join(legal)}",
                                       nearest=legal[0])])  # fmt: skip
    return own


def unique(points: Sequence[Point]) -> list[Point]:
    """Points without repetitions: two names of one spec in one sweep are one run, under the first name."""
    first: dict[tuple[str, str], Point] = {}
    for point in points:
        first.setdefault((point.sweep, point.run_id), point)
    return list(first.values())
