"""``bench doctor``: is this machine fit to measure? Each check is ok, warn or fail, with the way out. No torch."""

from __future__ import annotations

import argparse
import os
import resource
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import psutil

from bench import environment
from bench.cli import FAILED, OK, emit
from bench.environment import command_output
from bench.measure import cache_dir
from trainer_core.counts import GIB
from trainer_core.rules import TORCH


@dataclass(frozen=True)
class Check:
    """``advice`` is the way out of a warning or a failure."""

    name: str
    status: Literal["ok", "warn", "fail"]
    value: str
    advice: str = ""


def grade(name: str, value: str, fail: str = "", warn: str = "") -> Check:
    """A check that fails, or warns, where there is advice for it."""
    return Check(name, "fail" if fail else "warn" if warn else "ok", value, fail or warn)


def software() -> Iterator[Check]:
    found = environment.versions()
    old = "install Python 3.11 or newer" if sys.version_info < (3, 11) else ""
    yield grade("python", found["python"], old)
    torch = found.get("torch")
    if torch is None:
        yield grade("torch", "absent", "pip install torch (only reports, plans and the checks of a plan work without)")
    else:
        other = "" if torch.startswith(TORCH + ".") else f"the plan rules were checked against torch {TORCH}"
        blind = "+cpu" in torch and environment.gpus()
        yield grade("torch", torch, "install a CUDA build: this one can not use the GPUs" if blind else "", other)
    for name, use in (("torchao", "Float8 and MXFP8 need it"), ("tokenizers", "every text corpus needs it")):
        yield grade(name, found.get(name, "absent"), warn="" if name in found else f"{use}: pip install {name}")
    compiler = environment.cxx_compiler() or (environment.c_compiler() if environment.gpus() else None)
    yield grade("compiler", compiler or "none", warn="" if compiler else "compiled points are unsupported: install g++ "
                "(apt-get install g++) or set CXX")  # fmt: skip


def storage() -> Iterator[Check]:
    for name, path in (("disk", Path.cwd()), ("temporary", Path(tempfile.gettempdir())), ("cache", cache_dir())):
        existing = next(p for p in (path, *path.parents) if p.exists())
        free = shutil.disk_usage(existing).free / GIB
        locked = "" if os.access(existing, os.W_OK) else f"{path} can not be written"
        full = f"under 1 GiB free on {path}: results, traces and compiled graphs need room" if free < 1 else ""
        low = f"{free:.1f} GiB: checkpoints and traces of large models need more" if free < 10 else ""
        yield grade(name, f"{free:,.1f} GiB free, {path}", locked or full, low)
    shm = Path("/dev/shm")
    if shm.exists():
        size = shutil.disk_usage(shm).total / GIB
        small = size < (1 if environment.gpus() else 0.05)
        yield grade("shm", f"{size:,.2f} GiB", warn="NCCL uses it; in a container raise --shm-size" if small else "")


def limits() -> Iterator[Check]:
    for name, what, least in (("open files", resource.RLIMIT_NOFILE, 4096), ("processes", resource.RLIMIT_NPROC, 4096)):
        soft, hard = resource.getrlimit(what)
        low = soft != resource.RLIM_INFINITY and soft < least
        flag = "n" if what == resource.RLIMIT_NOFILE else "u"
        yield grade(name, _limit(soft), warn=f"ulimit -{flag} {least} (hard limit {_limit(hard)})" if low else "")
    if environment.gpus():
        soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
        locked = "RDMA pins memory: ulimit -l unlimited" if soft != resource.RLIM_INFINITY else ""
        yield grade("locked memory", _limit(soft), warn=locked)


def _limit(value: int) -> str:
    return "unlimited" if value == resource.RLIM_INFINITY else str(value)


def processor() -> Iterator[Check]:
    cores, load = os.cpu_count() or 1, os.getloadavg()[0]
    busy = "other work disturbs timings: wait, or use a quiet machine" if load > 0.5 * cores else ""
    yield grade("cpu", f"{environment.cpu_model()}, {cores} cores, load {load:.1f}", warn=busy)
    governor = Path("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor")
    if governor.exists():
        name = governor.read_text().strip()
        slow = "clocks follow the load: cpupower frequency-set -g performance" if name == "powersave" else ""
        yield grade("cpu governor", name, warn=slow)
    memory = psutil.virtual_memory()
    low = "under 2 GiB: a rank takes about 0.3 GiB before its model" if memory.available < 2 * GIB else ""
    yield grade("memory", f"{memory.available / GIB:,.1f} of {memory.total / GIB:,.1f} GiB free", warn=low)


def devices() -> Iterator[Check]:
    found = environment.gpus()
    if not found:
        driver = Path("/dev/nvidiactl").exists()
        yield grade("gpus", "none: CPU ranks and simulation only", "the driver is there but nvidia-smi does not answer"
                    if driver else "")  # fmt: skip
        return
    names = sorted({g["name"] for g in found})
    yield grade("gpus", f"{len(found)} x {', '.join(names)}", warn="unlike GPUs in one run wait for the slowest"
                if len(names) > 1 else "")  # fmt: skip
    yield grade("driver", found[0]["driver_version"])
    nccl = next((v for k, v in environment.versions().items() if k.startswith("nvidia-nccl")), None)
    yield grade("nccl", nccl or "unknown", warn="" if nccl else "a CPU build of torch has none")
    fields = "power.limit,power.default_limit,clocks.max.sm,clocks_throttle_reasons.active,persistence_mode"
    text = command_output("nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits") or ""
    for i, line in enumerate(text.splitlines()):
        limit, default, clock, throttle, persistence = (v.strip() for v in line.split(","))
        capped = f"below the default of {default} W: nvidia-smi -i {i} -pl {default}" if _below(limit, default) else ""
        yield grade(f"gpu {i} power", f"{limit} W", warn=capped)
        # 1 is "idle"; anything else holds the clocks down now
        held = throttle not in ("0x0000000000000000", "0x0000000000000001", "[N/A]")
        yield grade(f"gpu {i} clocks", f"up to {clock} MHz", warn=f"held down now: reason {throttle}" if held else "")
        off = "the driver unloads between runs: nvidia-smi -pm 1" if persistence == "Disabled" else ""
        yield grade(f"gpu {i} persistence", persistence, warn=off)


def _below(limit: str, default: str) -> bool:
    try:
        return float(limit) < float(default)
    except ValueError:
        return False


def slurm() -> Iterator[Check]:
    if shutil.which("sinfo") is None:
        yield grade("slurm", "not installed: local runs only")
        return
    answer = command_output("scontrol", "ping") or "no answer"
    down = "" if "UP" in answer else "slurmctld does not answer: is SLURM_CONF right?"
    yield grade("slurm", answer.splitlines()[0], warn=down)


CHECKS: tuple[Callable[[], Iterator[Check]], ...] = (software, storage, limits, processor, devices, slurm)


def add_arguments(p: argparse.ArgumentParser) -> None:
    p.add_argument("--json", action="store_true")


def main(args: argparse.Namespace) -> int:
    """Exit code 1 where a check fails."""
    checks = [check for part in CHECKS for check in part()]
    good = all(c.status != "fail" for c in checks)
    width = max(len(c.name) for c in checks)
    lines = [f"{c.status:4}  {c.name:{width}}  {c.value}" + (f"\n      {'':{width}}  -> {c.advice}" if c.advice else "")
             for c in checks]  # fmt: skip
    emit({"ok": good, "checks": [asdict(c) for c in checks]}, args.json, "\n".join(lines))
    return OK if good else FAILED
