"""Rows of other collections of published figures: a YAML list with source, model, hardware and parallelism of each."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from bench.published import Figure, Published, Source, assume, program
from bench.spec import check
from trainer_core.config import MODELS, ConfigError

GPUS: tuple[tuple[str, str], ...] = (
    (r"GB200", "gb200"), (r"\bB200", "b200"), (r"H200", "h200"), (r"H100.*HBM2e|HBM2e.*H100", "h100_96g_hbm2e"),
    (r"H100", "h100_80g"), (r"A100", "a100_80g"), (r"MI300X", "mi300x"),
)  # fmt: skip
"""What a source calls the device -> its file; the first that matches."""
CHECKPOINTING = (("full", "full"), ("selective", "selective"), ("none", "none"))


class Unreadable(ValueError):
    """A row that says too little, or something that we can not simulate."""


def read(path: Path) -> tuple[list[Published], dict[str, str]]:
    """(rows, id -> reason of those that can not be simulated)."""
    rows, skipped = [], {}
    for number, raw in enumerate(yaml.safe_load(path.read_text())):
        name = str(raw.get("id", f"row {number}")) if isinstance(raw, Mapping) else f"row {number}"
        try:
            row = _row(raw, path)
            errors, _ = check(row.spec())
            if errors:
                raise Unreadable(errors[0].message)
            rows.append(row)
        except (Unreadable, ConfigError) as error:
            skipped[name] = str(error).splitlines()[0]
        except (KeyError, TypeError, AttributeError) as error:
            skipped[name] = f"not in the schema: {type(error).__name__} {error}"
    return rows, skipped


def _row(raw: Mapping[str, Any], path: Path) -> Published:
    origin = raw["source"]
    source = Source(origin["title"], str(origin.get("repo")), str(origin.get("path") or origin.get("url")),
                    str(origin.get("commit")), str(origin.get("table")), raw["id"], _month(origin["date"]))  # fmt: skip
    stated, unstated = _stated(raw)
    figures = {name: _figure(raw[key], unit) for name, key, unit in (
        ("tps_per_gpu", "tps_per_gpu", "tokens/s"), ("peak_reserved_gib", "memory_gib", "GiB"),
    ) if raw.get(key) is not None}  # fmt: skip
    if not figures:
        raise Unreadable("has neither tps_per_gpu nor memory_gib")
    degrees = [axis for axis in ("dp_replicate", "dp_shard", "tp", "cp", "pp") if stated[f"parallel.{axis}"] > 1]
    workload = "_".join([str(stated["model"]), str(stated["hardware"]), *degrees])
    options = program(None, source)["options"]
    return Published(raw["id"], path.stem, source, workload, int(raw["n_gpus"]), stated, figures,
                     assume(list(options), stated), tuple(unstated))  # fmt: skip


def _stated(raw: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Settings of the row, and what it leaves open."""
    stated: dict[str, Any] = {"model": _model(raw["model"]), "hardware": _device(raw["hardware"])}
    unstated = []
    if raw["hardware"].get("power_limit_w"):
        stated["hardware.power_w"] = float(raw["hardware"]["power_limit_w"])
    layout, gpus = raw["parallelism"], raw.get("n_gpus")
    if not gpus:
        raise Unreadable("does not state the number of GPUs")
    degrees = {axis: layout.get(axis) or 1 for axis in ("dp_replicate", "tp", "cp", "pp")}
    rest = degrees["dp_replicate"] * degrees["tp"] * degrees["cp"] * degrees["pp"]
    degrees["dp_shard"] = layout.get("dp_shard") or gpus // rest
    stated.update({f"parallel.{axis}": degree for axis, degree in degrees.items()})
    if degrees["pp"] > 1 and layout.get("schedule"):
        stated["parallel.schedule"] = layout["schedule"]
    if layout.get("async_tp"):
        stated["parallel.async_tp"] = "on"
    for key, setting in (("seq_len", "data.seq_len"), ("local_batch_size", "train.local_batch_size"),
                         ("global_batch_size", "train.global_batch_size"),
                         ("pp_microbatches", "parallel.microbatches")):  # fmt: skip
        if raw.get(key) is not None:
            stated[setting] = raw[key]
        elif key in ("seq_len", "local_batch_size"):
            raise Unreadable(f"does not state {key}")
    stated["compile.enable"] = bool(raw.get("compile"))
    float8 = str(raw.get("float8") or "off")
    if float8 not in ("off", "tensorwise", "rowwise", "mxfp8"):
        raise Unreadable(f"float8 {float8!r} is another library's recipe")
    stated["precision.float8"] = float8
    told = str(raw.get("activation_checkpoint") or "")
    mode = next((mode for start, mode in CHECKPOINTING if told.startswith(start)), None)
    if mode is None:
        unstated.append("activation checkpointing (none assumed)")
    stated["ac.mode"] = mode or "none"
    return stated, unstated


def _model(raw: Mapping[str, Any]) -> str:
    size = re.search(r"llama ?3\S* .*?(\d+)b\b", str(raw["name"]).lower())
    name = f"llama3_{size[1]}b" if size else ""
    if name not in MODELS:
        raise Unreadable(f"model {raw['name']!r} is none of {', '.join(MODELS)}")
    return name


def _device(raw: Mapping[str, Any]) -> str:
    text = " ".join(str(raw.get(key) or "") for key in ("gpu", "memory_as_published"))
    for pattern, device in GPUS:
        if re.search(pattern, text):
            return device
    raise Unreadable(f"device {text.strip()!r} has no file in bench/hardware")


def _month(date: Any) -> str:
    found = re.match(r"\d{4}-\d{2}", str(date))
    return found[0] if found else str(date)


def _figure(value: Any, unit: str) -> Figure:
    """Rounding is the last digit that the source prints."""
    text = str(value)
    digits = len(text.partition(".")[2]) if "." in text and not text.endswith(".0") else 0
    return Figure(float(value), unit, 10.0**-digits)
