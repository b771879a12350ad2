"""A spec as a reader sees it: flat keys, a short name, and the techniques that it turns on. No torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from bench.spec import RunSpec

Flat = Mapping[str, Any]


@cache
def defaults() -> dict[str, Any]:
    """Every key of a spec with its default, so that a spec of an older version still compares."""
    return _flatten(RunSpec.from_dict({}).to_dict())


def flatten(spec: Mapping[str, Any]) -> dict[str, Any]:
    """``{"parallel": {"tp": 2}}`` as ``{"parallel.tp": 2, ...}``, missing keys at their defaults."""
    return {**defaults(), **_flatten(spec)}


def _flatten(data: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    out: dict[str, Any] = {}
    for key, value in data.items():
        if isinstance(value, Mapping):
            out.update(_flatten(value, f"{prefix}{key}."))
        else:
            out[f"{prefix}{key}"] = value if isinstance(value, (str, int, float, bool, type(None))) else str(value)
    return out


def degree(flat: Flat, axis: str) -> int:
    value = flat[f"parallel.{axis}"]
    return value if isinstance(value, int) else 1


def layout(flat: Flat) -> str:
    """The mesh in words: ``HSDP 2x4 · TP 2``."""
    replicate, shard = degree(flat, "dp_replicate"), degree(flat, "dp_shard")
    parts = []
    if replicate > 1:
        parts.append(f"HSDP {replicate}×{shard}" if shard > 1 else f"DDP {replicate}")
    elif shard > 1:
        parts.append(f"FSDP {shard}")
    method = "" if flat["parallel.cp_method"] == "allgather" else f" {flat['parallel.cp_method']}"
    words = {"tp": "", "cp": method, "pp": ""}
    parts += [f"{a.upper()} {degree(flat, a)}{word}" for a, word in words.items() if degree(flat, a) > 1]
    return " · ".join(parts) or "1 rank"


def recipe(flat: Flat) -> str:
    """What is done besides the mesh, schedule included: ``compile · float8 rowwise · AC full``."""
    parts = [t.text(flat) for t in TECHNIQUES if t.name not in LAYOUTS and t.on(flat)]
    if flat["precision.param"] != "bf16":
        parts.insert(0, str(flat["precision.param"]))
    return " · ".join(parts) or "plain"


def name(flat: Flat) -> str:
    return " · ".join(p for p in (layout(flat), recipe(flat)) if p != "plain")


@dataclass(frozen=True)
class Technique:
    """A group of keys that is turned on and off as one.

    ``keys`` are its own settings; ``follows`` are those that must move with it when the number of GPUs and the global
    batch stay: a larger tp leaves a smaller dp_shard, hence a larger local batch.
    """

    name: str
    keys: tuple[str, ...]
    follows: tuple[str, ...]
    on: Callable[[Flat], bool]
    text: Callable[[Flat], str]


def _axis(axis: str, *keys: str, follows: tuple[str, ...] = ()) -> Technique:
    """``follows``: beyond the sharding and the local batch, what a published row's program did on this axis only."""
    own = (f"parallel.{axis}", *(f"parallel.{k}" for k in keys))
    moved = ("parallel.dp_shard", *(() if axis == "dp_replicate" else ("train.local_batch_size",)), *follows)
    word = "HSDP ×" if axis == "dp_replicate" else f"{axis.upper()} "
    return Technique(axis, own, moved, lambda f: degree(f, axis) > 1, lambda f: word + str(degree(f, axis)))


TECHNIQUES: tuple[Technique, ...] = (
    _axis("dp_replicate"),
    _axis("tp", "sequence_parallel", "loss_parallel"),
    _axis("cp", "cp_method", "cp_balance", follows=("program.cp_rotation", "program.cp_dkv_fp32")),
    _axis("pp", "schedule", "microbatches", "reshard_after_forward",
          follows=("program.stage_outputs_kept", "program.pp_lockstep")),
    Technique("schedule", ("parallel.schedule",), ("program.pp_lockstep",),
              lambda f: degree(f, "pp") > 1 and f["parallel.schedule"] != "1F1B",
              lambda f: str(f["parallel.schedule"])),
    Technique("ac", ("ac.mode", "ac.k"), (), lambda f: f["ac.mode"] != "none",
              lambda f: f"AC {f['ac.mode']}" + (f" {f['ac.k']}" if f["ac.mode"] == "every_k" else "")),
    Technique("compile", ("compile.enable", "compile.loss"), (), lambda f: bool(f["compile.enable"]),
              lambda f: "compile" + (" + loss" if f["compile.loss"] else "")),
    Technique("float8", ("precision.float8", "precision.float8_all_gather", "precision.float8_precompute_scale"), (),
              lambda f: f["precision.float8"] != "off", lambda f: _float8(f)),
    Technique("async_tp", ("parallel.async_tp",), (), lambda f: f["parallel.async_tp"] != "off",
              lambda f: "async TP" + (" (fallback)" if f["parallel.async_tp"] == "fallback" else "")),
)  # fmt: skip
"""In the order in which a ladder climbs them."""

LAYOUTS = ("dp_replicate", "tp", "cp", "pp")


def _float8(flat: Flat) -> str:
    recipe = str(flat["precision.float8"])
    text = recipe if recipe == "mxfp8" else f"float8 {recipe}"
    return text + (" + all-gather" if flat["precision.float8_all_gather"] else "")


UNLIKE = ("run.", "checkpoint.", "train.steps", "train.warmup_steps", "train.seed", "train.init_from", "published")
"""Keys (or their beginnings) that change how a run is supervised and named, not how fast a step is."""


def matters(key: str) -> bool:
    return not key.startswith(UNLIKE)


AXIS_TITLES = {
    "layout": "mesh layout", "recipe": "recipe", "parallel.dp_replicate": "replicas (DP)", "parallel.dp_shard": "FSDP",
    "parallel.tp": "TP", "parallel.cp": "CP", "parallel.pp": "PP", "parallel.schedule": "pipeline schedule",
    "parallel.microbatches": "microbatches", "parallel.async_tp": "async TP", "precision.float8": "Float8",
    "precision.param": "compute dtype", "compile.enable": "compile", "ac.mode": "checkpointing",
    "train.local_batch_size": "local batch", "train.global_batch_size": "global batch", "data.seq_len": "sequence",
    "parallel.world_size": "GPUs", "model.name": "model", "hardware.device": "device",
}  # fmt: skip


def title(key: str) -> str:
    return AXIS_TITLES.get(key, key)


def varying(flats: Iterable[Flat]) -> list[str]:
    """Keys that take more than one value, in the spec's order."""
    rows = list(flats)
    return [k for k in dict.fromkeys(k for row in rows for k in row) if len({row.get(k) for row in rows}) > 1]


def names(flats: Sequence[Flat]) -> list[str]:
    """One name a spec; where two share one, what tells them apart is added (at most three keys, speed's own first)."""
    out = [name(f) for f in flats]
    for telling in (True, False):
        groups: dict[str, list[int]] = {}
        for i, text in enumerate(out):
            groups.setdefault(text, []).append(i)
        for same in groups.values():
            keys = [k for k in varying([flats[i] for i in same])
                    if matters(k) == telling and k not in ("engine", "parallel.dp_shard")]  # fmt: skip
            keys.sort(key=lambda k: k.startswith(("run.", "checkpoint.")))
            if "train.local_batch_size" in keys and "train.global_batch_size" in keys:
                keys.remove("train.global_batch_size")
            for i in same:
                out[i] = " · ".join([out[i], *(f"{title(k)} {flats[i].get(k)}" for k in keys[:3])])
    return out


def shorten(text: str, limit: int = 60) -> str:
    return text if len(text) <= limit else text[: limit - 1] + "…"


def without_common(texts: Sequence[str]) -> tuple[str, list[str]]:
    """(the parts that all names share, each name's other parts); one name alone shares nothing."""
    parts = [text.split(" · ") for text in texts]
    common = [p for p in parts[0] if all(p in other for other in parts)] if len(parts) > 1 else []
    rest = [" · ".join(p for p in own if p not in common) for own in parts]
    return " · ".join(common), [r or "nothing more" for r in rest]
