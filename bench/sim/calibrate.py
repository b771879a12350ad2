"""``bench calibrate``: measure the device at hand and write its hardware file.

Each constant is the ratio of the time that the cost model would predict at full datasheet rate to the measured one, so
what is fitted is what is used. On a CPU, which has no datasheet here, the rates themselves are measured first: one
thread, as a rank has.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.multiprocessing.spawn import spawn

from bench.sim.cost import CONSTANTS, Constants, Cost
from bench.sim.events import Op
from bench.sim.hardware import Hardware, Links, reported
from bench.sim.kernels import attention_flops
from trainer_core.config import ConfigError, Problem

ONES = Constants(**dict.fromkeys(CONSTANTS, 1.0))
GEMMS = {"cuda": ((16384, 14336, 4096), (16384, 4096, 14336), (8192, 8192, 8192)),
         "cpu": ((2048, 768, 256), (2048, 256, 768), (1024, 1024, 1024))}  # fmt: skip
"""(m, n, k) of the measured GEMMs: a Llama block's own shapes."""
ATTENTION = {"cuda": (1, 32, 32, 8192, 8192, 128), "cpu": (4, 8, 8, 256, 256, 32)}
COPY_BYTES = {"cuda": 2**30, "cpu": 2**26}
MESSAGE = {"cuda": 2**28, "cpu": 2**23}
RANKS_ON_CPU = 2


def seconds(run: Callable[[], Any], device: str) -> float:
    """Time of one call.

    On a GPU: the mean of a second of calls back to back, after a second of them, so that the clock is the one that
    the power limit allows in training. On a CPU: the best of several, in CPU time, since other processes only slow it.
    """
    if device == "cpu":
        times = []
        for _ in range(10):
            start = time.process_time()
            run()
            times.append(time.process_time() - start)
        return min(times[1:])
    _, once = _sustained(run, 1.0)
    calls, total = _sustained(run, 1.0)
    return total / calls if calls else once


def _sustained(run: Callable[[], Any], at_least: float) -> tuple[int, float]:
    """(calls, seconds that they took), in batches so that the queue never runs dry."""
    calls, start = 0, time.perf_counter()
    torch.cuda.synchronize()
    while time.perf_counter() - start < at_least:
        for _ in range(10):
            run()
        torch.cuda.synchronize()
        calls += 10
    return calls, time.perf_counter() - start


def gemm_op(m: int, n: int, k: int, dtype: str) -> Op:
    size = {"fp32": 4, "bf16": 2, "fp8": 1}[dtype]
    return Op("mm", "gemm", (((m, k), dtype), ((k, n), dtype)), (((m, n), dtype),), 2.0 * m * n * k,
              (m + n) * k * size, m * n * 2, (1, m, n, k))  # fmt: skip


def time_gemm(m: int, n: int, k: int, dtype: str, device: str) -> float:
    """Seconds of one (m, k) @ (k, n)."""
    if dtype == "fp8":
        a = torch.randn(m, k, device=device).to(torch.float8_e4m3fn)
        b = torch.randn(n, k, device=device).to(torch.float8_e4m3fn).t()
        one = torch.ones((), device=device)
        multiply = functools.partial(torch._scaled_mm, scale_a=one, scale_b=one, out_dtype=torch.bfloat16)
        return seconds(lambda: multiply(a, b, use_fast_accum=True), device)
    kind = {"bf16": torch.bfloat16, "fp32": torch.float32}[dtype]
    a, b = torch.randn(m, k, device=device, dtype=kind), torch.randn(k, n, device=device, dtype=kind)
    return seconds(lambda: a @ b, device)


def attention_ops(shape: tuple[int, ...], dtype: str) -> list[Op]:
    """The forward and backward of a causal attention (batch, heads, kv heads, q, kv, head dim)."""
    b, h, _, t, _, d = shape
    ops = []
    for backward in (0, 1):
        dims = (*shape, 1, backward)
        ops.append(Op("flash", "attention", (((b, h, t, d), dtype),), (), attention_flops(dims), 0, 0, dims))
    return ops


def time_attention(shape: tuple[int, ...], device: str) -> float:
    """Seconds of a causal forward and backward."""
    b, h, kv, t, _, d = shape
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    q, k, v = (torch.randn(b, n, t, d, device=device, dtype=dtype, requires_grad=True) for n in (h, kv, kv))
    gradient = torch.randn_like(q)

    def run() -> None:
        torch.autograd.backward(F.scaled_dot_product_attention(q, k, v, is_causal=True), gradient)

    return seconds(run, device)


def time_copy(device: str) -> float:
    """Bytes a second of a copy, read and written."""
    source = torch.empty(COPY_BYTES[device], dtype=torch.int8, device=device).fill_(1)
    target = torch.empty_like(source)
    return 2 * COPY_BYTES[device] / seconds(lambda: target.copy_(source), device)


def time_launch(device: str) -> float:
    """Seconds from one tiny kernel to the next: in a CUDA graph, without the host; on a CPU with the dispatch."""
    x, count = torch.zeros(64, device=device), 200

    def chain() -> None:
        for _ in range(count):
            x.add_(1.0)

    if device == "cpu":
        return seconds(chain, device) / count
    chain()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        chain()
    return seconds(graph.replay, device) / count


def _rank(rank: int, world: int, device: str, folder: str) -> None:
    """One rank of the collective measurement; rank 0 writes "bandwidth latency" (bytes/s of the ring, s a hop)."""
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    if device == "cuda":
        torch.cuda.set_device(rank)
    dist.init_process_group("nccl" if device == "cuda" else "gloo", init_method=f"file://{folder}/store",
                            rank=rank, world_size=world)  # fmt: skip
    size = MESSAGE[device]
    shard = torch.ones(size // world, dtype=torch.uint8, device=device)
    whole, tiny = torch.empty(shard.numel() * world, dtype=torch.uint8, device=device), torch.ones(1, device=device)
    # torch 2.13 renamed it; 2.11 knows only the old name.
    gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
    large = _together(lambda: gather(whole, shard), device)
    small = _together(lambda: dist.all_reduce(tiny), device)
    if rank == 0:
        ring = shard.numel() * (world - 1) / max(large - small, 1e-9)
        Path(folder, "links").write_text(f"{ring} {small / (2 * (world - 1))}")
    dist.barrier()
    dist.destroy_process_group()


def _together(run: Callable[[], Any], device: str, repeats: int = 20) -> float:
    """Best time of a collective; every rank makes the same number of calls."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return min(times[1:])


def time_links(device: str) -> tuple[int, float, float] | None:
    """(ranks, ring bytes a second, seconds a hop) between the devices of this host; None where there is only one."""
    world = torch.cuda.device_count() if device == "cuda" else RANKS_ON_CPU
    if world < 2:
        return None
    with tempfile.TemporaryDirectory() as folder:
        spawn(_rank, args=(world, device, folder), nprocs=world)  # type: ignore[no-untyped-call]
        bandwidth, latency = map(float, Path(folder, "links").read_text().split())
    return world, bandwidth, latency


def power_limit() -> float | None:
    """The limit that is set on the first GPU, W; None where the driver's tool does not say."""
    command = ["nvidia-smi", "--query-gpu=power.limit", "--format=csv,noheader,nounits", "--id=0"]
    try:
        return float(subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout)
    except (OSError, subprocess.SubprocessError, ValueError):
        return None


def fractions(hardware: Hardware, device: str, say: Callable[[str], None]) -> dict[str, float]:
    """Constant -> ideal time / measured time on this device."""
    ideal = Cost(replace(hardware, launch=0.0), ONES)
    out: dict[str, float] = {}
    dtypes = {"gemm_bf16": "bf16" if device == "cuda" else "fp32"}
    if device == "cuda" and "fp8" in hardware.peak:
        dtypes["gemm_fp8"] = "fp8"
    for name, dtype in dtypes.items():
        ratios = []
        for shape in GEMMS[device]:
            measured = time_gemm(*shape, dtype, device)
            ratios.append(ideal.op(gemm_op(*shape, dtype))[0] / measured)
            rate = 2e-12 * math.prod(shape) / measured
            say(f"{dtype} GEMM {'x'.join(map(str, shape))}: {rate:.3g} TFLOPS")
        out[name] = statistics.median(ratios)
    ops = attention_ops(ATTENTION[device], "bf16" if device == "cuda" else "fp32")
    measured = time_attention(ATTENTION[device], device)
    out["attention"] = sum(ideal.op(op)[0] for op in ops) / measured
    say(f"attention, forward and backward: {1e-12 * sum(op.flops for op in ops) / measured:.3g} TFLOPS")
    out["hbm"] = time_copy(device) / hardware.memory_bandwidth
    say(f"copy: {out['hbm'] * hardware.memory_bandwidth * 1e-9:.4g} GB/s")
    return out


def describe_cpu(say: Callable[[str], None]) -> Hardware:
    """A CPU's rates stand for its datasheet: the best GEMM of one thread, the copy bandwidth."""
    peaks = {}
    for dtype in ("fp32", "bf16"):
        peaks[dtype] = max(2.0 * m * n * k / time_gemm(m, n, k, dtype, "cpu") for m, n, k in GEMMS["cpu"]) / 0.95
        say(f"{dtype}: {peaks[dtype] * 1e-12:.3g} TFLOPS a thread")
    pages = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return Hardware("cpu", "cpu", None, 64, peaks, float(pages), time_copy("cpu") / 0.95, 0.3 * 2**30, 1, 1e9,
                    launch=time_launch("cpu"), domain=64)  # fmt: skip


def calibrate(say: Callable[[str], None]) -> str:
    """The text of the hardware file of this machine.

    Raises ConfigError for a GPU without a datasheet in bench/hardware.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    threads = torch.get_num_threads()
    torch.set_num_threads(1 if device == "cpu" else threads)
    try:
        if device == "cpu":
            hardware = describe_cpu(say)
        else:
            name = torch.cuda.get_device_name(0)
            known = reported(name)
            if known is None:
                raise ConfigError([Problem("hardware", name, f"{name!r} has no datasheet in bench/hardware: add a file "
                                           "that names it under reported_as")])  # fmt: skip
            limit = power_limit() or known.power[0]
            hardware = replace(known, power=(limit, known.power[1]), launch=time_launch("cuda"))
        constants = fractions(hardware, device, say)
        links = time_links(device)
    finally:
        torch.set_num_threads(threads)
    if links is not None:
        ranks, bandwidth, latency = links
        say(f"all-gather over {ranks} ranks: {bandwidth * 1e-9:.4g} GB/s, {latency * 1e6:.3g} us a hop")
        if device == "cpu":
            both = Links(bandwidth / 0.95, latency)
            hardware = replace(hardware, scale_up=both, scale_out=both)
            constants["scale_up"] = constants["scale_out"] = 0.95
        else:
            constants["scale_up"] = bandwidth / hardware.scale_up.bandwidth
    return to_yaml(hardware, {k: min(v, 0.999) for k, v in constants.items()})


def to_yaml(h: Hardware, constants: dict[str, float]) -> str:
    """A hardware file that :func:`bench.sim.hardware.read` accepts."""
    day = datetime.datetime.now(tz=datetime.UTC).date().isoformat()
    how = f"bench calibrate, {day}, torch {torch.__version__}"
    sheet = how if h.kind == "cpu" else f"bench/hardware/{h.name}.yaml"

    def q(value: float, unit: str, source: str = sheet) -> str:
        return f'{{value: {value:.6g}, unit: {unit}, source: "{source}"}}'

    count = "ranks" if h.kind == "cpu" else "GPUs"
    lines = [f"# Written by bench calibrate on {day}", f"name: {h.name}_here", f"kind: {h.kind}"]
    if h.capability:
        lines.append(f"capability: [{h.capability[0]}, {h.capability[1]}]")
    if h.reported_as:
        lines.append(f"reported_as: [{', '.join(h.reported_as)}]")
    lines += [f"gpus_per_node: {q(h.gpus_per_node, count)}", "peak: # dense"]
    lines += [f"  {dtype}: {q(peak * 1e-12, 'TFLOPS')}" for dtype, peak in h.peak.items()]
    lines += ["memory:", f"  size: {q(h.memory_bytes / 2**30, 'GiB')}",
              f"  bandwidth: {q(h.memory_bandwidth * 1e-9, 'GB/s')}",
              f"  outside_allocator: {q(h.outside_allocator / 2**30, 'GiB')}",
              "compute:", f"  units: {q(h.units, 'cores' if h.kind == 'cpu' else 'SMs')}",
              f"  clock: {q(h.clock * 1e-6, 'MHz')}"]  # fmt: skip
    if h.kind != "cpu":
        lines += ["power:", f"  limit: {q(h.power[0], 'W', how)}", f"  design: {q(h.power[1], 'W')}"]
    lines += [f"launch: {q(h.launch * 1e6, 'us', how)}", "links:"]
    for name, links, unit, scale in (("scale_up", h.scale_up, "GB/s", 1e-9), ("scale_out", h.scale_out, "Gb/s", 8e-9)):
        lines += [f"  {name}:", f"    bandwidth: {q(links.bandwidth * scale, unit)}",
                  f"    latency: {q(links.latency * 1e6, 'us')}"]  # fmt: skip
        lines.append(f"    domain: {q(h.domain, count)}" if name == "scale_up"
                     else f"    oversubscription: {q(h.oversubscription, 'ratio')}")  # fmt: skip
    lines.append("calibrated: # fractions of the values above")
    lines += [f'  {name}: {{value: {value:.4g}, unit: fraction, source: "{how}", fitted_on: ["{how}"]}}'
              for name, value in constants.items()]  # fmt: skip
    return "\n".join([*lines, "  like: h100_96g_hbm2e"]) + "\n"


def add_arguments(p: argparse.ArgumentParser) -> None:
    p.add_argument("-o", "--output", type=Path, required=True, metavar="FILE", help="the hardware file to write")


def main(args: argparse.Namespace) -> int:
    text = calibrate(lambda line: print(line, file=sys.stderr))
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(text)
    print(f"{args.output}: use it with hardware.device={args.output}")
    return 0
