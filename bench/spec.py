"""RunSpec: one point of a sweep, fully resolved, with its identity and the command line that reproduces it.

No torch. Hydra's override grammar is used inside :func:`from_overrides`, so that ``KEY=VALUE`` means the same in
``python -m bench`` and in ``python -m sweeps``.
"""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import json
import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cache, lru_cache
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import yaml

from trainer_core import rules
from trainer_core.config import MODELS, ConfigError, Problem, TrainConfig, from_dict, resolve

if TYPE_CHECKING:
    from hydra.core.override_parser.types import Override

    from bench.published import Published

ROOT = Path(__file__).resolve().parent.parent
HARDWARE_DIR = Path(__file__).resolve().parent / "hardware"
PUBLISHED_DIR = Path(__file__).resolve().parent / "published"
PRESETS = Path(__file__).resolve().parent / "presets.yaml"

Engine = Literal["measure", "simulate", "torchtitan"]


@dataclass(frozen=True)
class RunOptions:
    """How a run is supervised and measured.

    ``repeats`` are windows of one process (``repeat_as=window``, for throughput) or whole runs in folders of their
    own (``repeat_as=run``, for losses). ``hang_s``: no rank made progress for so long. ``memory_limit_gib``: of all
    ranks together, resident. ``profile``: a torch.profiler trace of the last steps.
    """

    repeats: int = 5
    repeat_as: Literal["window", "run"] = "window"
    hang_s: float = 180.0
    wall_s: float = 3600.0
    memory_limit_gib: float | None = None
    profile: Literal["off", "on"] = "off"


@dataclass(frozen=True)
class HardwareRef:
    """The device (a file of bench/hardware) and what a site changes of it; null keeps the file's value."""

    device: str = "cpu"
    gpus_per_node: int | None = None
    internode_gbps: float | None = None
    oversubscription: float | None = None
    power_w: float | None = None


@dataclass(frozen=True)
class ProgramConfig:
    """What an older or other training program did differently; only the simulator reads it.

    Each is a recorded fact or assumption of a published row, never of a device. The defaults are our own trainer.

    ``kv_expanded``: K and V are repeated to all query heads before attention, so context parallel moves them expanded.
    ``cp_rotation``: how context parallel moves K and V: our own methods (``parallel.cp_method``), one all-gather of
    cat(K, V) a pass, or an all-to-all a ring step. ``cp_dkv_fp32``: the gradients of K and V travel in fp32, one
    all-to-all a ring step, the last one exposed. ``stage_outputs_kept``: every pipeline stage keeps the outputs of all
    microbatches until the step ends. ``pp_lockstep``: the interleaved schedule goes slot by slot, each slot waiting
    for its neighbours' transfers. ``root_resharded``: the root's parameters are freed after forward and gathered again.
    ``rope_complex``: the rotary embedding is complex arithmetic in fp32, which the compiler does not fuse.
    """

    kv_expanded: bool = False
    cp_rotation: Literal["own", "allgather", "alltoall"] = "own"
    cp_dkv_fp32: bool = False
    stage_outputs_kept: bool = False
    pp_lockstep: bool = False
    root_resharded: bool = False
    rope_complex: bool = False


@dataclass(frozen=True)
class RunSpec:
    """One point: what is trained, on what, by which engine. Always resolved: no -1, no interpolation, no secret."""

    config: TrainConfig = field(default_factory=TrainConfig)
    run: RunOptions = field(default_factory=RunOptions)
    hardware: HardwareRef = field(default_factory=HardwareRef)
    program: ProgramConfig = field(default_factory=ProgramConfig)
    engine: Engine = "measure"
    published: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain nested data; the training sections lie at the top, beside run, hardware, program, engine, published."""
        data = dataclasses.asdict(self)
        return {**data.pop("config"), **data}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> RunSpec:
        """The inverse of :meth:`to_dict`, resolved. Raises ConfigError with every unknown key and bad value."""
        sections = [f.name for f in fields(TrainConfig)]
        own = {k: v for k, v in data.items() if k not in sections}
        problems: list[Problem] = []
        parts: dict[str, Any] = {}
        for kind, part in ((TrainConfig, {k: v for k, v in data.items() if k in sections}), (_Own, own)):
            try:
                parts[kind.__name__] = from_dict(kind, part)
            except ConfigError as error:
                problems += error.problems
        if problems:
            raise ConfigError([_with_all_sections(p, sections) for p in problems])
        rest = parts["_Own"]
        problems = _run_problems(rest.run)
        if problems:
            raise ConfigError(problems)
        return cls(resolve(parts["TrainConfig"]), **{f.name: getattr(rest, f.name) for f in fields(_Own)})

    @property
    def run_id(self) -> str:
        """12 hex digits over the resolved spec without repeats, paths, cluster and launcher."""
        data = self.to_dict()
        data["train"].pop("init_from")
        for key in ("repeats", "repeat_as"):
            data["run"].pop(key)
        return _digest(json.dumps(data, sort_keys=True))

    @property
    def world_size(self) -> int:
        return self.config.parallel.world_size

    def overrides(self) -> list[str]:
        """The shortest list of ``KEY=VALUE`` (Hydra's grammar) that :func:`from_overrides` reads back as this spec."""
        data, out = self.to_dict(), []
        if self.published is not None:
            base = published_row(self.published).spec().to_dict()
            out.append(f"published={quote(self.published)}")
        else:
            model = MODELS.get(self.config.model.name)
            if model is not None and model.name != "debug":
                out.append(f"model={model.name}")
            base = RunSpec(replace(TrainConfig(), model=model or TrainConfig().model)).to_dict()
        if self.hardware.device != base["hardware"]["device"]:
            out.append(f"hardware={quote(self.hardware.device)}")
            base["hardware"]["device"] = self.hardware.device
        for section, values in data.items():
            if not isinstance(values, dict):
                if values != base[section]:
                    out.append(f"{section}={quote(values)}")
                continue
            out += [f"{section}.{k}={quote(v)}" for k, v in values.items() if v != base[section][k]]
        return out

    def command(self, out: str = "results") -> str:
        """A shell line that runs this very point again."""
        return shlex.join(["python", "-m", "bench", "run", *self.overrides(), "-o", out])


@dataclass(frozen=True)
class _Own:
    """The part of a RunSpec that is not the trainer's."""

    run: RunOptions = field(default_factory=RunOptions)
    hardware: HardwareRef = field(default_factory=HardwareRef)
    program: ProgramConfig = field(default_factory=ProgramConfig)
    engine: Engine = "measure"
    published: str | None = None


def _run_problems(run: RunOptions) -> list[Problem]:
    """Limits that would end every run at once, or never."""
    problems = []
    if run.repeats < 1:
        problems.append(Problem("run.repeats", run.repeats, f"run.repeats={run.repeats}: at least 1", nearest=1))
    for name in ("hang_s", "wall_s", "memory_limit_gib"):
        value, default = getattr(run, name), getattr(RunOptions(), name)
        if value is not None and not (value > 0 and math.isfinite(value)):
            message = f"run.{name}={value}: a limit is a positive number"
            problems.append(Problem(f"run.{name}", value, message, nearest="null" if default is None else default))
    return problems


def _with_all_sections(problem: Problem, sections: list[str]) -> Problem:
    """An unknown top-level key is answered with the keys of both parts."""
    if "." in problem.key or not problem.message.startswith("unknown key"):
        return problem
    known = [*sections, *(f.name for f in fields(_Own))]
    near = difflib.get_close_matches(problem.key, known, 1)
    return replace(problem, message=f"unknown key {problem.key}; valid keys: {', '.join(known)}",
                   nearest=near[0] if near else None)  # fmt: skip


_NOT_TEXT = ("null", "true", "false", "nan", "inf")
"""Words that Hydra's grammar reads as something else than text."""


def quote(value: Any) -> str:
    """``value`` in Hydra's override grammar, so that any text survives: strings are quoted unless plainly a word."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if not isinstance(value, str):
        return repr(value)
    word = value and all(c.isascii() and (c.isalnum() or c in "_-/.") for c in value)
    if word and not value[0].isdigit() and value[0] not in "-." and value.lower() not in _NOT_TEXT:
        return value
    # Hydra unescapes a run of backslashes only before the quote, so only those are doubled.
    out, slashes = [], 0
    for c in value:
        if c == "\\":
            slashes += 1
            continue
        out.append("\\" * (slashes * 2 + 1 if c == "'" else slashes) + c)
        slashes = 0
    return "'" + "".join(out) + "\\" * (slashes * 2) + "'"


@cache
def groups() -> dict[str, dict[str, dict[str, Any]]]:
    """Hydra group -> option -> the keys it sets: the one source of ``model=``, ``hardware=``, ``parallel=`` ..."""
    return {
        "model": {name: dataclasses.asdict(m) for name, m in MODELS.items()},
        "hardware": {path.stem: {"device": path.stem} for path in sorted(HARDWARE_DIR.glob("*.yaml"))},
        **yaml.safe_load(PRESETS.read_text()),
    }


def merge(base: dict[str, Any], key: str, value: Any) -> None:
    """Set ``key`` (dotted, or the name of a group) in the nested ``base``."""
    options = groups().get(key)
    if options is not None and not isinstance(value, Mapping):
        if value not in options:
            near = difflib.get_close_matches(str(value), options, 1)
            raise ConfigError([Problem(key, value, f"{key}={value} is not one of {', '.join(options)}",
                                       nearest=near[0] if near else None)])  # fmt: skip
        base[key] = {**base.get(key, {}), **options[value]}
        return
    *path, last = key.split(".")
    node = base
    for part in path:
        child = node.setdefault(part, {})
        if not isinstance(child, dict):
            raise ConfigError([Problem(key, value, f"unknown key {key}: {part} is a value, not a group of keys")])
        node = child
    node[last] = {**node[last], **value} if isinstance(node.get(last), dict) and isinstance(value, Mapping) else value


def from_overrides(overrides: Sequence[str]) -> RunSpec:
    """The spec that a list of ``KEY=VALUE`` means.

    ``published=ID`` first (that row's settings), then groups (``model=llama3_8b``), so that order does not matter. Of a
    key given twice the last counts. Raises ConfigError for text that is not an override, a list of choices (that is a
    sweep), an interpolation, and what :meth:`RunSpec.from_dict` refuses.
    """
    last = {o.key_or_group: o for o in map(parse_override, overrides)}
    row = plain(last["published"].value()) if "published" in last else None
    data: dict[str, Any] = published_row(row).settings() if isinstance(row, str) else {}
    for key, o in sorted(last.items(), key=lambda item: "." in item[0]):
        if o.is_sweep_override():
            raise ConfigError([Problem(key, o.input_line, f"{o.input_line!r} is a list of choices: "
                                       "python -m sweeps -m runs one point each")])  # fmt: skip
        merge(data, key, plain(o.value()))
    return RunSpec.from_dict(data)


def published_row(name: str) -> Published:
    """Raises ConfigError for an unknown row, with the known ones."""
    from bench.published import rows

    if name not in rows():
        near = difflib.get_close_matches(name, rows(), 1)
        raise ConfigError([Problem("published", name, f"published={name} is not one of {', '.join(rows())}",
                                   nearest=near[0] if near else None)])  # fmt: skip
    return rows()[name]


@lru_cache(maxsize=4096)
def parse_override(text: str) -> Override:
    """``KEY=VALUE`` in Hydra's grammar. Raises ConfigError for anything else; a grid repeats its texts: cached."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    key, _, value = text.partition("=")
    try:
        parsed = OverridesParser.create().parse_override(text)
    except HydraException as error:
        raise ConfigError([Problem(key, text, f"{text!r} is not KEY=VALUE: {error}. A value with commas, colons, "
                                   "braces, spaces or quotes goes in quotes: KEY='a, b'")]) from None  # fmt: skip
    if parsed.is_delete():
        raise ConfigError([Problem(key, text, f"{text!r}: a key can not be deleted, only set")])
    if "${" in value:
        raise ConfigError([Problem(key, value, f"{text!r}: ${{...}} is not resolved here, so that a stored spec is "
                                   "whole and holds no secret; write the value itself")])  # fmt: skip
    return parsed


def plain(value: Any) -> Any:
    """Hydra's parsed value as plain data: quoted strings lose their wrapper."""
    from hydra.core.override_parser.types import QuotedString

    if isinstance(value, QuotedString):
        return value.text
    if isinstance(value, list):
        return [plain(v) for v in value]
    if isinstance(value, dict):
        return {str(plain(k)): plain(v) for k, v in value.items()}
    return value


def check(spec: RunSpec) -> tuple[list[Problem], list[Problem]]:
    """(errors, warnings) of a spec on its device."""
    device = rule_device(spec.hardware)
    return rules.check(spec.config, device), rules.warn(spec.config, device)


def rule_device(ref: HardwareRef) -> rules.Device:
    """What the plan rules need to know of the device. Raises ConfigError for an unknown one."""
    from bench.sim import hardware

    device = hardware.resolve(ref)
    return rules.Device(device.kind, device.capability, device.gpus_per_node)


@cache
def code_id(device: str) -> str:
    """Digest of trainer_core, bench, the versions of torch and torchao, and the hardware file."""
    from bench.sim.hardware import load

    parts = [f"{name}={_version(name)}" for name in ("torch", "torchao")]
    for path in sorted([*ROOT.glob("trainer_core/**/*.py"), *ROOT.glob("bench/**/*.py")]):
        parts += [path.relative_to(ROOT).as_posix(), path.read_text()]
    return _digest("\0".join([*parts, repr(load(device))]))


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "absent"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]
