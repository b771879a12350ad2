"""Checkpoints with torch.distributed.checkpoint: resume in any layout, and a seed that every layout starts from.

Tensors are stored under global names (``model.layers.3.ffn.w1.weight``, ``optim.<parameter>.exp_avg``), so ranks save
the union of their model parts and each layout picks what it needs. A checkpoint exists once ``complete.json`` does,
which is written last, by rename. The folder must be one that all ranks share.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint import filesystem, state_dict_loader, state_dict_saver

from trainer_core.config import invalid
from trainer_core.model import clean_name

MARKER = "complete.json"
KEEP = 2
log = logging.getLogger(__name__)


def save(
    folder: Path, step: int, parts: list[nn.Module], optimizer: torch.optim.Optimizer, extra: dict[str, Any]
) -> Path:
    """Write ``folder/step-N``: parameters, optimizer state, each rank's random state; keep the newest KEEP.

    ``extra`` is plain data that a resumed run must agree with (the data's digest). Collective.
    """
    path = folder / f"step-{step:08d}"
    _write(path, {**_model_state(parts), **_optimizer_state(parts, optimizer), **_rng_state()}, step, extra)
    if dist.get_rank() == 0:
        complete = [p for p in _steps(folder) if problem(p) is None]
        for old in _steps(folder):
            if old < path and old not in complete[-KEEP:]:
                shutil.rmtree(old)
    return path


def load_latest(
    folder: Path, parts: list[nn.Module], optimizer: torch.optim.Optimizer, extra: dict[str, Any] | None = None
) -> int | None:
    """Restore the newest complete checkpoint in place and return its step; None if there is none. Collective.

    Adam's step counter comes back; the random state too, if the world size is the same. Raises ConfigError where the
    checkpoint is of another model, or disagrees with ``extra``.
    """
    path = _newest(folder)
    if path is None:
        return None
    marker = json.loads((path / MARKER).read_text())
    for key, value in (extra or {}).items():
        if key in marker["extra"] and marker["extra"][key] != value:
            message = f"checkpoint {path} was written with {key} {marker['extra'][key]}, this run has {value}"
            raise invalid("checkpoint.resume", True, f"{message}; checkpoint.resume=false starts anew", key, False)
    _make_state(optimizer)
    rng = _rng_state() if marker["world_size"] == dist.get_world_size() else {}
    _read(path, {**_model_state(parts), **_optimizer_state(parts, optimizer), **rng}, "checkpoint.resume")
    _set_rng_state(rng)
    return int(marker["step"])


def save_seed(folder: Path, parts: list[nn.Module]) -> None:
    """Write the parameters alone: the start that runs of every layout share (``train.init_from``). Collective."""
    _write(folder, _model_state(parts), 0, {})


def load_seed(folder: Path, parts: list[nn.Module]) -> None:
    """Start from the parameters of a seed, or of any checkpoint. Collective.

    Raises ConfigError where ``folder`` is no complete checkpoint or one of another model.
    """
    reason = problem(folder)
    if reason is not None:
        raise invalid("train.init_from", str(folder), f"train.init_from={folder} is no checkpoint: {reason}")
    _read(folder, _model_state(parts), "train.init_from")


def problem(path: Path) -> str | None:
    """Why ``path`` is not a complete checkpoint, None if it is one."""
    if not path.is_dir():
        return "there is no such folder"
    if not (path / MARKER).exists():
        return f"it was not written to its end (no {MARKER})"
    for name, size in json.loads((path / MARKER).read_text())["files"].items():
        file = path / name
        if not file.exists() or file.stat().st_size != size:
            return f"{name} is missing or cut"
    return None


def _steps(folder: Path) -> list[Path]:
    return sorted(folder.glob("step-*"))


def _newest(folder: Path) -> Path | None:
    """The newest complete checkpoint, as rank 0 sees it."""
    chosen: list[Path | None] = [None]
    if dist.get_rank() == 0:
        for path in reversed(_steps(folder)):
            reason = problem(path)
            if reason is None:
                chosen = [path]
                break
            log.warning("checkpoint %s is ignored: %s", path, reason)
    dist.broadcast_object_list(chosen)
    return chosen[0]


def _write(path: Path, state: dict[str, Tensor], step: int, extra: dict[str, Any]) -> None:
    if dist.get_rank() == 0:
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir(parents=True)
    dist.barrier()
    state_dict_saver.save(state, checkpoint_id=path)
    dist.barrier()
    if dist.get_rank() == 0:
        files = {p.name: p.stat().st_size for p in path.iterdir()}
        data = {"step": step, "world_size": dist.get_world_size(), "files": files, "extra": extra}
        temporary = path / f".{MARKER}"
        temporary.write_text(json.dumps(data))
        os.replace(temporary, path / MARKER)
    dist.barrier()


def _read(path: Path, state: dict[str, Tensor], key: str) -> None:
    """Fill the tensors of ``state`` in place."""
    stored = filesystem.FileSystemReader(path).read_metadata().state_dict_metadata
    wrong = []
    for name, tensor in state.items():
        size = getattr(stored.get(name), "size", None)
        if size != tensor.shape:
            found = "absent" if size is None else list(size)
            wrong.append(f"{name} is {found}, needed is {list(tensor.shape)}")
    if wrong:
        more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        raise invalid(key, str(path), f"{path} holds another model: {'; '.join(wrong[:3])}{more}", "model")
    state_dict_loader.load(state, checkpoint_id=path)


def _model_state(parts: list[nn.Module]) -> dict[str, Tensor]:
    """Parameters of all parts by global name, sharing storage with the model."""
    return {f"model.{clean_name(k)}": v for part in parts for k, v in part.state_dict().items()}


def _optimizer_state(parts: list[nn.Module], optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Moments and step counters by the name of their parameter, flat, so that groups may differ between layouts.

    The options of the groups are not stored: they are the config's.
    """
    return {
        f"optim.{clean_name(name)}.{key}": value
        for part in parts
        for name, parameter in part.named_parameters()
        for key, value in optimizer.state[parameter].items()
    }


def _make_state(optimizer: torch.optim.Optimizer) -> None:
    """Have a fresh optimizer allocate its state, by a step of size 0 with gradients of 0."""
    if optimizer.state:
        return
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate


def _rng_state() -> dict[str, Tensor]:
    state = {f"rng.{dist.get_rank()}.cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        state[f"rng.{dist.get_rank()}.cuda"] = torch.cuda.get_rng_state()
    return state


def _set_rng_state(state: dict[str, Tensor]) -> None:
    for name, value in state.items():
        (torch.cuda if name.endswith("cuda") else torch).set_rng_state(value)
