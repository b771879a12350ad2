"""The cross-field rules of a plan, as one table. No torch: a plan is checked in milliseconds, before anything starts.

The rules mirror what the installed libraries enforce, or get wrong without a word. They move between releases:
``TORCH`` names the version they were checked against and the tests hold the table against the installed one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from trainer_core.config import (
    AUTO,
    SPLIT_BACKWARD_SCHEDULES,
    OptimConfig,
    Problem,
    TrainConfig,
)

TORCH = "2.13"
ROUND_SCHEDULES = ("Interleaved1F1B", "InterleavedZeroBubble")
"""Schedules that run the microbatches in equal rounds of about one a rank."""
MIN_TEXT_VOCAB = 257
"""256 bytes and the end-of-document token."""


@dataclass(frozen=True)
class Device:
    """What the rules need to know of the hardware: ``kind`` is cpu or cuda, ``capability`` CUDA's (major, minor)."""

    kind: str = "cpu"
    capability: tuple[int, int] | None = None
    gpus_per_node: int = 8


CPU = Device()


def divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


def nearest(value: int, legal: list[int]) -> list[int]:
    """The legal values next to ``value``: at most one below and one above."""
    below = [x for x in legal if x < value]
    above = [x for x in legal if x > value]
    return [*below[-1:], *above[:1]]


def multiples(value: int, of: int) -> list[int]:
    """The positive multiples of ``of`` on both sides of ``value``."""
    return [m for m in (value // of * of, (value // of + 1) * of) if m > 0]


def degree_problems(config: TrainConfig) -> list[Problem]:
    """Degrees are positive (one may be -1) and their product is the world size."""
    p, problems = config.parallel, []
    auto = [axis for axis, degree in p.degrees.items() if degree == AUTO]
    for axis, degree in p.degrees.items():
        if degree < 1 and degree != AUTO:
            problems.append(Problem(f"parallel.{axis}", degree, f"parallel.{axis}={degree}: a degree is at least 1, "
                                    "or -1 for what is left of the world", nearest=1))  # fmt: skip
    if p.world_size < 1 and p.world_size != AUTO:
        message = f"parallel.world_size={p.world_size}: at least one rank is needed"
        problems.append(Problem("parallel.world_size", p.world_size, message, nearest=1))
    if problems:
        return problems
    known = 1
    for degree in p.degrees.values():
        known *= max(degree, 1)
    if len(auto) > 1:
        message = f"only one degree can be -1, here {' and '.join(auto)} are"
        problems.append(Problem(f"parallel.{auto[1]}", AUTO, message, f"parallel.{auto[0]}", 1))
    elif auto and p.world_size == AUTO:
        message = f"parallel.{auto[0]}=-1 takes what is left of the world, so parallel.world_size must be given"
        problems.append(Problem(f"parallel.{auto[0]}", AUTO, message, "parallel.world_size", 1))
    elif auto and p.world_size % known:
        message = f"parallel.world_size={p.world_size} is not a multiple of the other degrees' product {known}"
        near = multiples(p.world_size, known)
        problems.append(Problem("parallel.world_size", p.world_size, message, f"parallel.{auto[0]}", near))
    elif not auto and p.world_size not in (AUTO, known):
        text = " x ".join(f"{axis} {degree}" for axis, degree in p.degrees.items() if degree > 1) or "all degrees 1"
        message = f"parallel.world_size={p.world_size}, but the degrees ({text}) make {known} ranks"
        problems.append(Problem("parallel.world_size", p.world_size, message, "parallel.dp_shard", known))
    return problems


def batch_problems(config: TrainConfig) -> list[Problem]:
    """Every count is positive, and the global batch is a whole number of local batches."""
    c, t, p = config, config.train, config.parallel
    positive = {
        "model.dim": c.model.dim, "model.layers": c.model.layers, "model.heads": c.model.heads,
        "model.kv_heads": c.model.kv_heads, "model.ffn_dim": c.model.ffn_dim, "model.vocab_size": c.model.vocab_size,
        "data.seq_len": c.data.seq_len, "train.steps": t.steps, "train.local_batch_size": t.local_batch_size,
        "train.loss_chunks": t.loss_chunks, "parallel.microbatches": p.microbatches, "ac.k": c.ac.k,
        "train.global_batch_size": t.global_batch_size,
    }  # fmt: skip
    problems = [Problem(key, v, f"{key}={v}: at least 1 is needed", nearest=1) for key, v in positive.items() if v < 1]
    if problems:
        return problems
    unit = t.local_batch_size * p.dp
    if t.global_batch_size % unit:
        problems.append(Problem("train.global_batch_size", t.global_batch_size, f"train.global_batch_size="
                                f"{t.global_batch_size} is not a multiple of local_batch_size {t.local_batch_size} x "
                                f"dp {p.dp} = {unit}", "train.local_batch_size",
                                multiples(t.global_batch_size, unit)))  # fmt: skip
    return problems


def _loop(c: TrainConfig, device: Device) -> Iterator[Problem]:
    t = c.train
    if not 0 <= t.warmup_steps < t.steps:
        yield Problem("train.warmup_steps", t.warmup_steps, f"train.warmup_steps={t.warmup_steps} leaves nothing to "
                      f"measure of train.steps={t.steps}", "train.steps", max(0, t.steps - 1))  # fmt: skip
    held = c.data.seq_len // c.parallel.cp // (c.parallel.tp if c.parallel.sequence_parallel else 1)
    if held % t.loss_chunks:
        message = f"train.loss_chunks={t.loss_chunks} does not divide the {held} positions that a rank holds"
        near = nearest(t.loss_chunks, divisors(held))
        yield Problem("train.loss_chunks", t.loss_chunks, message, "data.seq_len", near)


def _corpus(c: TrainConfig, device: Device) -> Iterator[Problem]:
    kind, _, path = c.data.corpus.partition(":")
    if kind not in ("synthetic", "stdlib", "c4", "jsonl", "parquet") or (kind in ("jsonl", "parquet")) != bool(path):
        message = f"data.corpus={c.data.corpus!r} is not one of synthetic, stdlib, c4, jsonl:PATH, parquet:PATH"
        yield Problem("data.corpus", c.data.corpus, message, nearest="stdlib")
    elif kind != "synthetic" and c.model.vocab_size < MIN_TEXT_VOCAB:
        message = f"model.vocab_size={c.model.vocab_size}: text in bytes needs at least {MIN_TEXT_VOCAB} tokens"
        yield Problem("model.vocab_size", c.model.vocab_size, message, "data.corpus", MIN_TEXT_VOCAB)


def _heads(c: TrainConfig, device: Device) -> Iterator[Problem]:
    m, p = c.model, c.parallel
    if m.dim % m.heads or (m.dim // m.heads) % 2:
        yield Problem("model.heads", m.heads, f"model.dim={m.dim} over model.heads={m.heads} gives no even head size",
                      "model.dim", nearest(m.heads, [h for h in divisors(m.dim) if m.dim // h % 2 == 0]))  # fmt: skip
    if m.heads % m.kv_heads:
        yield Problem("model.kv_heads", m.kv_heads, f"model.heads={m.heads} is not a multiple of model.kv_heads="
                      f"{m.kv_heads}", "model.heads", nearest(m.kv_heads, divisors(m.heads)))  # fmt: skip
    legal = divisors(math.gcd(m.heads, m.kv_heads, m.ffn_dim))
    for name, value in (("heads", m.heads), ("kv_heads", m.kv_heads), ("ffn_dim", m.ffn_dim)):
        if value % p.tp:
            message = f"parallel.tp={p.tp} does not divide model.{name}={value}"
            yield Problem("parallel.tp", p.tp, message, f"model.{name}", nearest(p.tp, legal))


def _sequence(c: TrainConfig, device: Device) -> Iterator[Problem]:
    s, p, m = c.data.seq_len, c.parallel, c.model
    if s % p.cp:
        yield Problem("parallel.cp", p.cp, f"parallel.cp={p.cp} does not divide data.seq_len={s}", "data.seq_len",
                      nearest(p.cp, divisors(s)))  # fmt: skip
    elif p.cp > 1 and p.cp_balance and p.cp_method != "ulysses" and s % (2 * p.cp):
        yield Problem("data.seq_len", s, f"data.seq_len={s} is not a multiple of 2 x cp = {2 * p.cp}, which load "
                      "balancing needs (parallel.cp_balance=false turns it off)", "parallel.cp_balance",
                      multiples(s, 2 * p.cp))  # fmt: skip
    if p.tp > 1 and p.sequence_parallel and s // p.cp % p.tp:
        yield Problem("data.seq_len", s, f"the local sequence {s // p.cp} (data.seq_len={s} / cp {p.cp}) is not a "
                      f"multiple of parallel.tp={p.tp}, which sequence parallel needs", "parallel.tp",
                      multiples(s, p.cp * p.tp))  # fmt: skip
    heads, kv_heads = max(m.heads // p.tp, 1), max(m.kv_heads // p.tp, 1)
    # each rank takes a whole number of kv heads, or several ranks take copies of one
    legal = [d for d in divisors(heads) if max(kv_heads, d) % min(kv_heads, d) == 0]
    if p.cp > 1 and p.cp_method == "ulysses" and p.cp not in legal:
        message = (f"ulysses spreads the {heads} local query and {kv_heads} local kv heads over parallel.cp={p.cp}, "
                   "which does not divide them")  # fmt: skip
        yield Problem("parallel.cp", p.cp, message, "parallel.cp_method", nearest(p.cp, legal))


def _pipeline(c: TrainConfig, device: Device) -> Iterator[Problem]:
    p, t = c.parallel, c.train
    if p.pp == 1:
        if p.microbatches > 1:
            yield Problem("parallel.microbatches", p.microbatches, f"parallel.microbatches={p.microbatches} needs a "
                          "pipeline (parallel.pp=1); raise train.global_batch_size to accumulate instead",
                          "parallel.pp", 1)  # fmt: skip
        return
    mb = p.microbatches
    if c.model.layers < p.stages:
        yield Problem("parallel.pp", p.pp, f"model.layers={c.model.layers} is fewer than the {p.stages} stages of "
                      f"parallel.pp={p.pp} with {p.schedule}", "model.layers",
                      c.model.layers // p.stages_per_rank or None)  # fmt: skip
    least = {"1F1B": p.pp, "DualPipeV": p.stages}.get(p.schedule, 1)
    rounds = (lambda m: max(1, m // p.pp)) if p.schedule in ROUND_SCHEDULES else (lambda m: 1)
    legal = [m for m in divisors(t.local_batch_size) if m >= least and m % rounds(m) == 0]
    for ok, conflict, message in (
        (t.local_batch_size % mb == 0, "train.local_batch_size",
         f"train.local_batch_size={t.local_batch_size} is not a multiple of parallel.microbatches={mb}"),
        (mb >= least, "parallel.schedule",
         f"{p.schedule} needs at least as many microbatches as stages ({least}), parallel.microbatches={mb}"),
        (mb % rounds(mb) == 0, "parallel.pp",
         f"{p.schedule} runs {rounds(mb)} rounds (microbatches // pp), which do not divide parallel.microbatches={mb}"),
    ):  # fmt: skip
        if not ok:
            yield Problem("parallel.microbatches", mb, message, conflict, nearest(mb, legal) or None)
    if p.schedule in SPLIT_BACKWARD_SCHEDULES:
        for key, on, why in (
            ("compile.enable", c.compile.enable, "compiled blocks give wrong gradients (pytorch issue 161904)"),
            ("ac.mode", c.ac.mode == "selective", "selective checkpointing raises 'backward an extra time'"),
        ):
            if on:
                yield Problem("parallel.schedule", p.schedule, f"{p.schedule} runs the backward in two parts; in torch "
                              f"{TORCH} {why}", key, ["1F1B", "Interleaved1F1B"])  # fmt: skip


def linear_shapes(c: TrainConfig) -> dict[str, tuple[int, int]]:
    """Local (in, out) features of each linear kind of a block, after TP."""
    m, tp = c.model, c.parallel.tp
    q, kv, ffn = m.heads * m.head_dim // tp, m.kv_heads * m.head_dim // tp, m.ffn_dim // tp
    return {"wq": (m.dim, q), "wk": (m.dim, kv), "wv": (m.dim, kv), "wo": (q, m.dim),
            "w1": (m.dim, ffn), "w3": (m.dim, ffn), "w2": (ffn, m.dim)}  # fmt: skip


def _float8(c: TrainConfig, device: Device) -> Iterator[Problem]:
    pr, p = c.precision, c.parallel
    if pr.float8 == "off":
        for key in ("float8_all_gather", "float8_precompute_scale"):
            if getattr(pr, key):
                yield Problem(f"precision.{key}", True, f"precision.{key} needs precision.float8=tensorwise",
                              "precision.float8", False)  # fmt: skip
        return
    unit = 32 if pr.float8 == "mxfp8" else 16
    bad = {f"{name} {i}x{o}" for name, (i, o) in linear_shapes(c).items() if i % unit or o % unit}
    if bad:
        yield Problem("precision.float8", pr.float8, f"{pr.float8} needs local features in multiples of {unit}; after "
                      f"tp {p.tp} these are not: {', '.join(sorted(bad))}", "parallel.tp", "off")  # fmt: skip
    batch = c.train.local_batch_size // p.microbatches
    tokens = batch * c.data.seq_len // p.cp
    if tokens % unit:
        message = (f"{pr.float8} needs local tokens in multiples of {unit}; microbatch {batch} x sequence "
                   f"{c.data.seq_len} / cp {p.cp} is {tokens}")  # fmt: skip
        near = multiples(c.data.seq_len, unit * p.cp)
        yield Problem("data.seq_len", c.data.seq_len, message, "precision.float8", near)
    if pr.float8 != "tensorwise":
        for key in ("float8_all_gather", "float8_precompute_scale"):
            if getattr(pr, key):
                message = f"precision.{key} exists only for the tensorwise recipe, not for {pr.float8}"
                yield Problem(f"precision.{key}", True, message, "precision.float8", False)
    if pr.float8_precompute_scale and not pr.float8_all_gather:
        message = "precision.float8_precompute_scale computes the scales of the Float8 all-gather, which is off"
        yield Problem("precision.float8_precompute_scale", True, message, "precision.float8_all_gather", False)
    capability = device.capability
    if device.kind == "cuda" and capability is not None:
        if pr.float8 == "mxfp8" and capability[0] != 10:
            message = f"torchao's MXFP8 GEMMs need compute capability 10.x, this device has {_text(capability)}"
            other = "rowwise" if capability >= (8, 9) else "off"
            yield Problem("precision.float8", "mxfp8", message, "hardware", other)
        elif capability < (8, 9):
            message = f"Float8 GEMMs need compute capability 8.9 or newer, this device has {_text(capability)}"
            yield Problem("precision.float8", pr.float8, message, "hardware", "off")


def _text(capability: tuple[int, int]) -> str:
    return f"{capability[0]}.{capability[1]}"


def _async_tp(c: TrainConfig, device: Device) -> Iterator[Problem]:
    p = c.parallel
    if p.async_tp != "on":
        return
    for ok, key, need in (
        (p.tp > 1, "parallel.tp", "a tensor-parallel degree above 1"),
        (c.compile.enable, "compile.enable", "torch.compile, which finds the patterns to fuse"),
        (device.kind == "cuda", "hardware", "CUDA's symmetric memory"),
        (p.sequence_parallel, "parallel.sequence_parallel", "sequence parallel, whose gathers it fuses"),
    ):
        if not ok:
            message = f"async TP needs {need} (parallel.async_tp=fallback runs plain TP and says so)"
            yield Problem("parallel.async_tp", "on", message, key, "fallback")


def _ranges(c: TrainConfig, device: Device) -> Iterator[Problem]:
    """Numbers that mean something only within bounds; ``nearest`` is the bound or the default."""
    o, default = c.optim, OptimConfig()
    for key, value, ok, bounds, near in (
        ("optim.lr", o.lr, o.lr > 0, "above 0", default.lr),
        ("optim.beta1", o.beta1, 0 <= o.beta1 < 1, "in [0, 1)", default.beta1),
        ("optim.beta2", o.beta2, 0 <= o.beta2 < 1, "in [0, 1)", default.beta2),
        ("optim.eps", o.eps, o.eps > 0, "above 0", default.eps),
        ("optim.weight_decay", o.weight_decay, o.weight_decay >= 0, "at least 0", 0.0),
        ("optim.lr_warmup_steps", o.lr_warmup_steps, o.lr_warmup_steps >= 0, "at least 0", 0),
        ("optim.min_lr_ratio", o.min_lr_ratio, 0 <= o.min_lr_ratio <= 1, "in [0, 1]", default.min_lr_ratio),
        ("train.seed", c.train.seed, c.train.seed >= 0, "at least 0", 0),
        ("checkpoint.every", c.checkpoint.every, c.checkpoint.every >= 0, "at least 0 (0: never)", 0),
    ):
        if not ok:
            yield Problem(key, value, f"{key}={value}: it must be {bounds}", nearest=near)


RULES: tuple[Callable[[TrainConfig, Device], Iterator[Problem]], ...] = (
    _ranges, _loop, _corpus, _heads, _sequence, _pipeline, _float8, _async_tp,
)  # fmt: skip
"""Every cross-field rule; each yields the problems of a *resolved* config on a device."""


def check(config: TrainConfig, device: Device = CPU) -> list[Problem]:
    """All problems of a resolved ``config``; empty if it can run."""
    return [problem for rule in RULES for problem in rule(config, device)]


def warn(config: TrainConfig, device: Device = CPU) -> list[Problem]:
    """What runs, but not as one might think."""
    c, p, warnings = config, config.parallel, []
    if c.model.vocab_size % p.tp:
        message = f"model.vocab_size={c.model.vocab_size} is not a multiple of tp {p.tp}: the last shard is smaller"
        near = multiples(c.model.vocab_size, p.tp)
        warnings.append(Problem("model.vocab_size", c.model.vocab_size, message, "parallel.tp", near))
    if p.cp > 1 and not p.cp_balance and p.cp_method != "ulysses":
        warnings.append(Problem("parallel.cp_balance", False, "context parallel runs without load balancing: the last "
                                f"rank does {2 * p.cp - 1} times the first one's attention", nearest=True))  # fmt: skip
    if p.async_tp == "fallback" and (device.kind != "cuda" or not c.compile.enable or p.tp == 1):
        warnings.append(Problem("parallel.async_tp", "fallback", "async TP can not run here: plain TP runs instead",
                                nearest="off"))  # fmt: skip
    if p.tp > device.gpus_per_node:
        warnings.append(Problem("parallel.tp", p.tp, f"tp {p.tp} crosses nodes of {device.gpus_per_node} GPUs",
                                nearest=device.gpus_per_node))  # fmt: skip
    return warnings
