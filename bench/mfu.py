"""Model and hardware FLOPs utilisation, and why there is none where there is none. No torch."""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass, replace
from typing import Any

from bench.result import METRICS, Value
from bench.sim.hardware import load
from bench.spec import RunSpec, from_overrides
from trainer_core import counts


@dataclass(frozen=True)
class Utilization:
    """Fractions of the device's dense peak; null with a ``reason``. ``flagged``: above 1, so something is wrong."""

    mfu: dict[str, float] | None
    hfu: dict[str, float] | None
    peak_flops: float | None
    reason: str | None = None
    flagged: bool = False


def peak(spec: RunSpec) -> tuple[float | None, str | None]:
    """(dense FLOP/s of the dtype that the GEMMs run in, or why there is none)."""
    device, float8 = load(spec.hardware.device), spec.config.precision.float8
    if device.kind == "cpu":
        return None, "no utilisation on CPU: its peak depends on clocks, cores and libraries"
    if float8 != "off":
        return None, (f"ill-defined with precision.float8={float8}: the projections run in Float8, attention and the "
                      "output projection in bf16, and no one peak fits both")  # fmt: skip
    dtype = spec.config.precision.param
    if dtype not in device.peak:
        return None, f"{device.name} has no known dense {dtype} peak"
    return device.peak[dtype], None


def compute(tps_per_gpu: float, spec: RunSpec) -> Utilization:
    """MFU = tokens/s a GPU x model FLOPs a token / peak; HFU adds the FLOPs that are computed again.

    Both under the two conventions: ``full`` counts the whole attention square, ``causal`` the half that is computed.
    """
    flops, why = peak(spec)
    if flops is None:
        return Utilization(None, None, None, why)
    c = spec.config
    mfu, hfu = {}, {}
    for name, causal in (("full", False), ("causal", True)):
        model = counts.flops_per_token(c.model, c.data.seq_len, causal)
        mfu[name] = tps_per_gpu * model / flops
        hfu[name] = tps_per_gpu * (model + counts.recompute_flops_per_token(c, causal)) / flops
    flagged = max(*mfu.values(), *hfu.values()) > 1
    reason = "above 1: the throughput, the device or its peak is wrong" if flagged else None
    return Utilization(mfu, hfu, flops, reason, flagged)


def utilization(tps_per_gpu: Value, spec: RunSpec) -> dict[str, Value]:
    """The metrics mfu and hfu (full attention) of a measured or predicted throughput, with its interval."""
    flops, why = peak(spec)
    if flops is None or tps_per_gpu.value is None:
        return {name: Value.none(name, why or tps_per_gpu.reason or "no throughput") for name in ("mfu", "hfu")}
    out = {}
    for name in ("mfu", "hfu"):
        span = (tps_per_gpu.value, tps_per_gpu.low, tps_per_gpu.high)
        scaled = [None if x is None else _full(x, spec, name) for x in span]
        reason = compute(tps_per_gpu.value, spec).reason
        out[name] = replace(tps_per_gpu, value=scaled[0], low=scaled[1], high=scaled[2], unit=METRICS[name].unit,
                            reason=reason)  # fmt: skip
    return out


def _full(tps_per_gpu: float, spec: RunSpec, name: str) -> float:
    figures = getattr(compute(tps_per_gpu, spec), name)
    return float(figures["full"])


def add_arguments(p: argparse.ArgumentParser) -> None:
    p.add_argument("--tps-per-gpu", type=float, required=True, metavar="X", help="tokens a second and GPU")
    p.add_argument("--device", metavar="NAME", help="as hardware=NAME")
    p.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    p.add_argument("--json", action="store_true")


def main(args: argparse.Namespace) -> int:
    from bench.cli import UsageError, emit

    if not (args.tps_per_gpu > 0 and math.isfinite(args.tps_per_gpu)):
        raise UsageError(f"--tps-per-gpu {args.tps_per_gpu}: a throughput is a positive number")
    spec = from_overrides([*args.overrides, *([f"hardware={args.device}"] if args.device else [])])
    found = compute(args.tps_per_gpu, spec)
    mfu, hfu = found.mfu or {}, found.hfu or {}
    data: dict[str, Any] = {
        "mfu": mfu.get("full"), "hfu": hfu.get("full"), "peak_flops": found.peak_flops, "reason": found.reason,
        "flagged": found.flagged, "convention": "full", "causal": {"mfu": mfu.get("causal"), "hfu": hfu.get("causal")},
    }  # fmt: skip
    emit(data, args.json, _text(found))
    return 0


def _text(found: Utilization) -> str:
    if found.mfu is None or found.hfu is None:
        return f"no MFU: {found.reason}"
    lines = [f"{name:7} attention  MFU {found.mfu[name]:.1%}  HFU {found.hfu[name]:.1%}" for name in found.mfu]
    return "\n".join([*lines, *([found.reason] if found.reason else [])])
