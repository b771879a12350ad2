"""Where a run took place: versions, revision, processor, devices, driver, variables that count. No torch, no secret."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shutil
import socket
import subprocess
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

from bench.spec import ROOT
from trainer_core.counts import GIB

PACKAGES = ("torch", "torchao", "triton", "nvidia-nccl-cu12", "nvidia-nccl-cu13", "numpy", "tokenizers", "datasets")
VARIABLES = ("NCCL_", "GLOO_", "OMP_", "MKL_NUM_", "CUDA_VISIBLE_", "CUDA_DEVICE_", "TORCH_NCCL_", "PYTORCH_CUDA_ALLOC",
             "PYTORCH_ALLOC", "TORCHINDUCTOR_", "SLURM_JOB_ID", "SLURM_NNODES", "SLURM_JOB_PARTITION")  # fmt: skip
"""Prefixes of the variables that are kept; everything else may hold a secret."""
GPU_FIELDS = ("name", "driver_version", "memory.total", "power.limit", "clocks.sm", "clocks.max.sm", "compute_cap")


def command_output(*argv: str, timeout_s: float = 5.0) -> str | None:
    """Standard output of a command; None where it is absent, fails or does not answer."""
    if shutil.which(argv[0]) is None:
        return None
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=timeout_s, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


@cache
def gpus() -> tuple[dict[str, str], ...]:
    """One dict a GPU with the fields of GPU_FIELDS, as nvidia-smi names and prints them; empty without one."""
    text = command_output("nvidia-smi", f"--query-gpu={','.join(GPU_FIELDS)}", "--format=csv,noheader,nounits")
    lines = text.splitlines() if text else []
    return tuple(dict(zip(GPU_FIELDS, (v.strip() for v in line.split(",")), strict=False)) for line in lines)


def visible_gpus() -> int:
    """How many GPUs a process started here may use."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    return len(gpus()) if chosen is None else min(len(gpus()), len([i for i in chosen.split(",") if i.strip()]))


def cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith(("model name", "CPU part")))
    return next(named, platform.processor() or platform.machine())


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def revision() -> dict[str, Any]:
    """The git commit of the code and whether the tree differs from it; null outside a repository."""
    commit = command_output("git", "-C", str(ROOT), "rev-parse", "HEAD")
    if commit is None:
        return {"commit": None, "dirty": None}
    return {"commit": commit, "dirty": bool(command_output("git", "-C", str(ROOT), "status", "--porcelain", "-uno"))}


@cache
def machine() -> dict[str, Any]:
    """What the fingerprint is made of: results of two machines that differ here are not the same point."""
    return {
        "cpu": cpu_model(),
        "cores": os.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / GIB),
        "gpus": [g["name"] for g in gpus()],
        "driver": gpus()[0]["driver_version"] if gpus() else None,
    }


@cache
def fingerprint() -> str:
    """12 hex digits over :func:`machine`. No host name: a container gets a new one at every start."""
    return hashlib.sha256(json.dumps(machine(), sort_keys=True).encode()).hexdigest()[:12]


def capture() -> dict[str, Any]:
    return {
        **machine(),
        "fingerprint": fingerprint(),
        "host": socket.gethostname(),
        "os": platform.platform(),
        "versions": versions(),
        "git": revision(),
        "gpu_details": list(gpus()),
        "variables": {k: v for k, v in sorted(os.environ.items()) if k.startswith(VARIABLES)},
    }


def cxx_compiler() -> str | None:
    """The C++ compiler that Inductor would use on CPU: $CXX, else g++."""
    return shutil.which(os.environ.get("CXX") or "g++")


def c_compiler() -> str | None:
    """The C compiler that Triton would use on CUDA: $CC, else clang or gcc."""
    names = [os.environ["CC"]] if os.environ.get("CC") else ["clang", "gcc"]
    return next(filter(None, map(shutil.which, names)), None)
