"""A device as data: bench/hardware/*.yaml. No torch."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from functools import cache
from typing import Any

import yaml

from trainer_core.config import ConfigError, Problem


@dataclass(frozen=True)
class Hardware:
    """``kind`` is cpu or cuda; ``capability`` CUDA's (major, minor)."""

    name: str
    kind: str
    capability: tuple[int, int] | None
    gpus_per_node: int
    data: dict[str, Any]


@cache
def load(name: str) -> Hardware:
    """Raises ConfigError for an unknown device, with the known ones."""
    from bench.spec import HARDWARE_DIR

    path = HARDWARE_DIR / f"{name}.yaml"
    if not path.exists():
        known = sorted(p.stem for p in HARDWARE_DIR.glob("*.yaml"))
        near = difflib.get_close_matches(name, known, 1)
        raise ConfigError([Problem("hardware", name, f"hardware={name} is not one of {', '.join(known)}",
                                   nearest=near[0] if near else None)])  # fmt: skip
    data = yaml.safe_load(path.read_text())
    capability = data.get("capability")
    return Hardware(name, data["kind"], tuple(capability) if capability else None, data["gpus_per_node"]["value"], data)
