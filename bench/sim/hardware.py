"""A device as data: bench/hardware/*.yaml, every number with its unit and source. No torch.

Datasheet values and calibrated constants lie apart. A calibrated constant is a *fraction* of a datasheet value, so
that it carries over to another device (``calibrated: {like: DEVICE}``); it names the rows or the measurement it was
fitted on.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from trainer_core.config import ConfigError, Problem

if TYPE_CHECKING:
    from bench.spec import HardwareRef

UNITS: dict[str, float] = {
    "TFLOPS": 1e12, "GB": 1e9, "GiB": 2.0**30, "GB/s": 1e9, "TB/s": 1e12, "Gb/s": 1e9 / 8, "us": 1e-6, "ms": 1e-3,
    "s": 1.0, "W": 1.0, "MHz": 1e6, "GHz": 1e9, "GPUs": 1.0, "ranks": 1.0, "SMs": 1.0, "cores": 1.0, "ratio": 1.0,
    "fraction": 1.0, "FLOP": 1.0,
}  # fmt: skip
"""Unit in a file -> factor to the unit in code (FLOP/s, bytes, bytes/s, seconds, Hz, W, counts)."""

QUANTITIES: dict[str, tuple[str, ...]] = {
    "gpus_per_node": ("GPUs", "ranks"),
    "peak.bf16": ("TFLOPS",),
    "peak.fp8": ("TFLOPS",),
    "peak.mxfp8": ("TFLOPS",),
    "peak.tf32": ("TFLOPS",),
    "peak.fp32": ("TFLOPS",),
    "memory.size": ("GB", "GiB"),
    "memory.bandwidth": ("GB/s", "TB/s"),
    "memory.outside_allocator": ("GB", "GiB"),
    "compute.units": ("SMs", "cores"),
    "compute.clock": ("MHz", "GHz"),
    "power.limit": ("W",),
    "power.design": ("W",),
    "launch": ("us",),
    "links.scale_up.bandwidth": ("GB/s",),
    "links.scale_up.latency": ("us",),
    "links.scale_up.domain": ("GPUs", "ranks"),
    "links.scale_out.bandwidth": ("Gb/s", "GB/s"),
    "links.scale_out.latency": ("us",),
    "links.scale_out.oversubscription": ("ratio",),
    "errors.time": ("fraction",),
    "errors.memory": ("fraction",),
}
"""Every datasheet quantity that a file may hold, and the units that it may have."""

OPTIONAL = ("peak.fp8", "peak.mxfp8", "peak.tf32", "power.limit", "power.design", "errors.time",
            "errors.memory")

PLAIN = ("name", "kind", "capability", "reported_as", "calibrated.like")
"""What is no quantity. ``reported_as``: the names under which the driver knows exactly this device."""


@dataclass(frozen=True)
class Constant:
    """A calibrated efficiency: a fraction of a datasheet value. ``fitted_on``: the published rows, or a measurement;
    ``spread``: standard deviation of its logarithm."""

    value: float
    source: str
    fitted_on: tuple[str, ...] = ()
    spread: float = 0.0


@dataclass(frozen=True)
class Links:
    """One level of the network: bytes a second and GPU in one direction, seconds a hop."""

    bandwidth: float
    latency: float


@dataclass(frozen=True)
class Hardware:
    """``kind`` is cpu or cuda; ``capability`` CUDA's (major, minor). FLOP/s, bytes, bytes/s, seconds, W.

    ``peak`` is dense, by dtype. ``domain`` is the number of GPUs that the scale-up links (NVLink) join; ``scale_out``
    is the rail of each GPU, which ``oversubscription`` divides. ``outside_allocator`` is what the driver context,
    NCCL and libraries take of the memory. ``power`` is (limit, design) in W. ``like`` is the device from which the
    constants that this one lacks are carried over. ``errors``: relative half-widths of the 80 % intervals of ``time``
    and ``memory``; twice the other device's where they are carried over.
    """

    name: str
    kind: str
    capability: tuple[int, int] | None
    gpus_per_node: int
    peak: Mapping[str, float] = field(default_factory=dict)
    memory_bytes: float = 0.0
    memory_bandwidth: float = 0.0
    outside_allocator: float = 0.0
    units: int = 1
    clock: float = 1e9
    power: tuple[float, float] = (1.0, 1.0)
    launch: float = 0.0
    scale_up: Links = Links(1.0, 0.0)
    domain: int = 1
    scale_out: Links = Links(1.0, 0.0)
    oversubscription: float = 1.0
    constants: Mapping[str, Constant] = field(default_factory=dict)
    reported_as: tuple[str, ...] = ()
    like: str | None = None
    errors: Mapping[str, float] = field(default_factory=dict)


@cache
def load(name: str) -> Hardware:
    """The device ``name`` of bench/hardware, or of a file that ``bench calibrate`` wrote (a path ending in .yaml).

    Raises ConfigError for an unknown device, with the known ones, and for a file whose number has no unit or source,
    with its line.
    """
    from bench.spec import HARDWARE_DIR

    path = Path(name) if name.endswith(".yaml") else HARDWARE_DIR / f"{name}.yaml"
    if not path.is_file():
        known = sorted(p.stem for p in HARDWARE_DIR.glob("*.yaml"))
        near = difflib.get_close_matches(name, known, 1)
        raise ConfigError([Problem("hardware", name, f"hardware={name} is not one of {', '.join(known)}",
                                   nearest=near[0] if near else None)])  # fmt: skip
    return read(path)


def read(path: Path) -> Hardware:
    """The device of one file. Raises ConfigError that lists every fault of the file with its line."""
    root = yaml.compose(path.read_text(), Loader=yaml.SafeLoader)
    if root is None:
        raise ConfigError([Problem("hardware", str(path), f"{path}: an empty hardware file")])
    problems: list[Problem] = []
    leaves: dict[str, tuple[dict[str, Any], int]] = {}
    for key, node in _leaves(root, ""):
        leaves[key] = (_plain(node), node.start_mark.line + 1)

    def fault(key: str, line: int, text: str, nearest: Any = None) -> None:
        problems.append(Problem(key, None, f"{path}:{line}: {key} {text}", nearest=nearest))

    values: dict[str, float] = {}
    constants: dict[str, Constant] = {}
    for key, (leaf, line) in leaves.items():
        if key in PLAIN:
            continue
        calibrated = key.startswith("calibrated.")
        if not calibrated and key not in QUANTITIES:
            near = difflib.get_close_matches(key, QUANTITIES, 1)
            fault(key, line, f"is not a known quantity; known: {', '.join(QUANTITIES)}", near[0] if near else None)
            continue
        missing = [k for k in ("value", "unit", "source", *(("fitted_on",) if calibrated else ())) if k not in leaf]
        units = ("fraction",) if calibrated else QUANTITIES[key]
        if missing:
            fault(key, line, f"has no {' and no '.join(missing)}: {{value: ..., unit: {units[0]}, source: ...}}")
        elif leaf["unit"] not in units:
            fault(key, line, f"has the unit {leaf['unit']!r}, needed is {' or '.join(units)}", units[0])
        elif isinstance(leaf["value"], bool) or not isinstance(leaf["value"], (int, float)) or leaf["value"] <= 0:
            fault(key, line, f"has the value {leaf['value']!r}, a positive number is needed")
        elif calibrated:
            fitted_on = tuple(map(str, leaf["fitted_on"]))
            constants[key.removeprefix("calibrated.")] = Constant(
                float(leaf["value"]), leaf["source"], fitted_on, float(leaf.get("spread", 0.0)))  # fmt: skip
        else:
            values[key] = leaf["value"] * UNITS[leaf["unit"]]
    for key in ("name", "kind", *QUANTITIES):
        if key not in leaves and key not in OPTIONAL:
            fault(key, root.end_mark.line, "is missing")
    if problems:
        raise ConfigError(problems)
    if "calibrated.like" in leaves:
        sibling = leaves["calibrated.like"][0]["value"]
        carried = {key: replace(c, source=f"carried over from {sibling}: {c.source}")
                   for key, c in load(sibling).constants.items()}  # fmt: skip
        constants = {**carried, **constants}
        values = {**{f"errors.{key}": 2 * value for key, value in load(sibling).errors.items()}, **values}
    return _hardware(path, {k: leaf for k, (leaf, _) in leaves.items()}, values, constants)


def _leaves(node: yaml.Node, prefix: str) -> Iterator[tuple[str, yaml.Node]]:
    """(dotted key, node) of every quantity: a mapping with a ``value``, ``unit`` or ``source``, or a plain value."""
    if not isinstance(node, yaml.MappingNode):
        yield prefix, node
        return
    keys = [k.value for k, _ in node.value]
    if prefix and {"value", "unit", "source"} & set(keys):
        yield prefix, node
        return
    for key, child in node.value:
        yield from _leaves(child, f"{prefix}.{key.value}" if prefix else key.value)


def _plain(node: yaml.Node) -> Any:
    data = yaml.safe_load(yaml.serialize(node))
    return data if isinstance(node, yaml.MappingNode) else {"value": data}


def _hardware(path: Path, leaves: Mapping[str, Any], v: Mapping[str, float],
              constants: Mapping[str, Constant]) -> Hardware:  # fmt: skip
    capability = leaves["capability"]["value"] if "capability" in leaves else None
    return Hardware(
        name=path.stem if path.parent.name == "hardware" else str(path),
        kind=leaves["kind"]["value"],
        capability=(capability[0], capability[1]) if capability else None,
        gpus_per_node=int(v["gpus_per_node"]),
        peak={key.removeprefix("peak."): value for key, value in v.items() if key.startswith("peak.")},
        memory_bytes=v["memory.size"],
        memory_bandwidth=v["memory.bandwidth"],
        outside_allocator=v["memory.outside_allocator"],
        units=int(v["compute.units"]),
        clock=v["compute.clock"],
        power=(v.get("power.limit", 1.0), v.get("power.design", 1.0)),
        launch=v["launch"],
        scale_up=Links(v["links.scale_up.bandwidth"], v["links.scale_up.latency"]),
        domain=int(v["links.scale_up.domain"]),
        scale_out=Links(v["links.scale_out.bandwidth"], v["links.scale_out.latency"]),
        oversubscription=v["links.scale_out.oversubscription"],
        constants=constants,
        reported_as=tuple(leaves["reported_as"]["value"]) if "reported_as" in leaves else (),
        errors={key.removeprefix("errors."): value for key, value in v.items() if key.startswith("errors.")},
        like=leaves["calibrated.like"]["value"] if "calibrated.like" in leaves else None,
    )  # fmt: skip


def reported(name: str) -> Hardware | None:
    """The device that the driver calls ``name``, exactly; None for one without a file."""
    from bench.spec import HARDWARE_DIR

    devices = (load(path.stem) for path in sorted(HARDWARE_DIR.glob("*.yaml")))
    return next((device for device in devices if name in device.reported_as), None)


def resolve(ref: HardwareRef) -> Hardware:
    """The device that a spec names, with what the site changes of it (Gb/s and W a GPU)."""
    hardware = load(ref.device)
    nodes = ref.gpus_per_node or hardware.gpus_per_node
    # A node with other than the file's GPUs has a scale-up domain of its own size; a domain beyond the node stays.
    domain = hardware.domain if hardware.domain > hardware.gpus_per_node else nodes
    rail = hardware.scale_out.bandwidth if ref.internode_gbps is None else ref.internode_gbps * UNITS["Gb/s"]
    return replace(hardware, gpus_per_node=nodes, domain=domain, scale_out=Links(rail, hardware.scale_out.latency),
                   oversubscription=ref.oversubscription or hardware.oversubscription,
                   power=(ref.power_w or hardware.power[0], hardware.power[1]))  # fmt: skip
