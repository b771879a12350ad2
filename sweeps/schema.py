"""Hydra's picture of the keys: the structured configs of the trainer and of bench, and the options of each group.

Hydra uses it for ``--help``, ``--cfg`` and tab completion and to refuse unknown keys; the values themselves are read
by :func:`bench.spec.from_overrides`, the same code that ``python -m bench`` uses, so OmegaConf ends here.
"""

from __future__ import annotations

import dataclasses
import typing
from typing import Any

from bench.spec import RunSpec, groups
from sweeps.cluster import Cluster
from sweeps.points import OWN, OwnKeys
from trainer_core.config import TrainConfig


def register() -> None:
    """Put the schema and every option of every group into Hydra's store."""
    from hydra.core.config_store import ConfigStore

    store = ConfigStore.instance()
    run_spec = [m for m in _members(RunSpec) if m[0] != "config"]
    own = [m for m in _members(OwnKeys) if m[0] in OWN and m[0] != "cluster"]
    cluster = ("cluster", Any, dataclasses.field(default_factory=lambda: Cluster().to_dict()))
    root = dataclasses.make_dataclass("Keys", [*_members(TrainConfig), *run_spec, *own, cluster])
    store.store(name="keys", node=root)
    for group, options in groups().items():
        for option, node in options.items():
            store.store(group=group, name=option, node=dict(node))


def _members(cls: type) -> list[tuple[str, Any, Any]]:
    """The fields of ``cls`` as OmegaConf takes them: no frozen class, and Any for a Literal, of which it knows none."""
    hints, members = typing.get_type_hints(cls), []
    for f in dataclasses.fields(cls):
        hint = hints[f.name]
        if dataclasses.is_dataclass(hint):
            part = dataclasses.make_dataclass(f.name, _members(typing.cast(type, hint)))
            members.append((f.name, part, dataclasses.field(default_factory=part)))
        else:
            kept = hint if hint in (int, float, bool, str) else Any
            members.append((f.name, kept, dataclasses.field(default=f.default)))
    return members
