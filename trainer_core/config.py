"""What a training run is: frozen dataclasses, their reading from plain data, and the resolution of automatic values.

Imports no torch, so that a plan is checked, described and hashed on any laptop. The cross-field rules are in
:mod:`trainer_core.rules`; :func:`resolve` calls them.
"""

from __future__ import annotations

import dataclasses
import difflib
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cache
from typing import Any, Literal

AUTO = -1
"""The value of an integer that :func:`resolve` fills in."""

Schedule = Literal[
    "GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"
]
SPLIT_BACKWARD_SCHEDULES = ("InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")
"""Schedules that run the gradient of the inputs and of the weights apart."""
V_SCHEDULES = ("ZBVZeroBubble", "DualPipeV")
"""Schedules whose first rank holds the first *and* the last stage."""
MULTI_STAGE_SCHEDULES = ("Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", *V_SCHEDULES)
"""Schedules with two stages a rank."""


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong, or worth a warning, in a plan.

    ``key`` and ``value`` name the setting, ``conflicts_with`` the other setting (or None), ``nearest`` the nearest
    legal value or values (or None where only another plan helps).
    """

    key: str
    value: Any
    message: str
    conflicts_with: str | None = None
    nearest: Any = None


class ConfigError(ValueError):
    """A plan that can not run. ``problems`` holds every fault that was found, not only the first."""

    def __init__(self, problems: list[Problem]):
        self.problems = problems
        super().__init__("\n".join(p.message for p in problems))


def invalid(key: str, value: Any, message: str, conflicts_with: str | None = None, nearest: Any = None) -> ConfigError:
    """The error of one fault."""
    return ConfigError([Problem(key, value, message, conflicts_with, nearest)])


@dataclass(frozen=True)
class ModelConfig:
    """A Llama-3 decoder: RMSNorm, rotary positions, grouped-query attention, SwiGLU, untied embeddings."""

    name: str = "debug"
    dim: int = 256
    layers: int = 8
    heads: int = 8
    kv_heads: int = 4
    ffn_dim: int = 768
    vocab_size: int = 2048
    rope_theta: float = 500_000.0
    norm_eps: float = 1e-5

    @property
    def head_dim(self) -> int:
        return self.dim // self.heads


MODELS: dict[str, ModelConfig] = {
    m.name: m
    for m in (
        ModelConfig(),
        ModelConfig("llama3_8b", 4096, 32, 32, 8, 14336, 128256),
        ModelConfig("llama3_10b", 4096, 40, 32, 8, 14336, 128256),
        ModelConfig("llama3_70b", 8192, 80, 64, 8, 28672, 128256),
        ModelConfig("llama3_405b", 16384, 126, 128, 8, 53248, 128256),
    )
}
"""The shipped sizes. 8B, 70B and 405B are Llama 3.1's; 10B is 8B's width at 40 layers (9.78e9 parameters)."""


@dataclass(frozen=True)
class ParallelConfig:
    """Degrees of the mesh axes and the switches of each technique. One degree may be -1: what is left of the world."""

    dp_replicate: int = 1
    dp_shard: int = 1
    tp: int = 1
    cp: int = 1
    pp: int = 1
    world_size: int = AUTO
    schedule: Schedule = "1F1B"
    microbatches: int = AUTO
    cp_method: Literal["allgather", "ring", "ulysses"] = "allgather"
    cp_balance: bool = True
    sequence_parallel: bool = True
    loss_parallel: bool = True
    async_tp: Literal["off", "on", "fallback"] = "off"
    reshard_after_forward: Literal["auto", "always", "never"] = "auto"
    fsdp_prefetch: bool = True

    @property
    def degrees(self) -> dict[str, int]:
        """Axis name to degree, outermost first (the order of the mesh)."""
        return {a: getattr(self, a) for a in ("pp", "dp_replicate", "dp_shard", "cp", "tp")}

    @property
    def dp(self) -> int:
        """Ranks that see different batches."""
        return self.dp_replicate * self.dp_shard

    @property
    def fsdp(self) -> int:
        """Ranks that share one copy of the parameters: FSDP shards over dp_shard x cp."""
        return self.dp_shard * self.cp

    @property
    def stages_per_rank(self) -> int:
        return 2 if self.pp > 1 and self.schedule in MULTI_STAGE_SCHEDULES else 1

    @property
    def stages(self) -> int:
        return self.pp * self.stages_per_rank

    @property
    def reshard(self) -> bool:
        """Resolved policy. With PP every microbatch would gather again, so ``auto`` keeps parameters unsharded."""
        return self.pp == 1 if self.reshard_after_forward == "auto" else self.reshard_after_forward == "always"


@dataclass(frozen=True)
class PrecisionConfig:
    """Dtypes. ``param`` is what FSDP gathers and the model computes in, ``reduce`` what gradients are reduced in."""

    param: Literal["bf16", "fp32"] = "bf16"
    reduce: Literal["fp32", "bf16"] = "fp32"
    float8: Literal["off", "tensorwise", "rowwise", "mxfp8"] = "off"
    float8_all_gather: bool = False
    float8_precompute_scale: bool = False


@dataclass(frozen=True)
class CompileConfig:
    """torch.compile of each block, and of the loss."""

    enable: bool = False
    loss: bool = False


@dataclass(frozen=True)
class ACConfig:
    """Activation checkpointing; ``every_k`` recomputes one block in ``k``."""

    mode: Literal["none", "full", "selective", "every_k"] = "none"
    k: int = 2


@dataclass(frozen=True)
class DataConfig:
    """``corpus``: synthetic, stdlib, c4, jsonl:PATH or parquet:PATH (text in the field ``text``)."""

    corpus: str = "stdlib"
    seq_len: int = 256


@dataclass(frozen=True)
class OptimConfig:
    """AdamW. The learning rate ramps up over ``lr_warmup_steps``, then decays to ``lr * min_lr_ratio``."""

    impl: Literal["for_loop", "foreach", "fused"] = "foreach"
    lr: float = 1e-3
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1
    clip_norm: float = 1.0
    lr_warmup_steps: int = 10
    decay: Literal["cosine", "linear", "none"] = "cosine"
    min_lr_ratio: float = 0.1


@dataclass(frozen=True)
class TrainSection:
    """The loop. Batch sizes count sequences; ``local_batch_size`` is one dp rank's share of one forward/backward.

    ``global_batch_size`` / (``local_batch_size`` x dp) is the number of accumulation steps. ``warmup_steps`` are
    dropped from the measured window (the learning rate's ramp is ``optim.lr_warmup_steps``). ``loss_chunks`` cuts the
    sequence so that only one chunk's logits exist at a time.
    """

    steps: int = 20
    warmup_steps: int = 5
    local_batch_size: int = 8
    global_batch_size: int = AUTO
    seed: int = 0
    deterministic: bool = False
    init_from: str | None = None
    loss_chunks: int = 1


@dataclass(frozen=True)
class CheckpointConfig:
    """``every`` steps a checkpoint is written (0: never); ``resume`` goes on from the newest complete one."""

    every: int = 0
    resume: bool = True


@dataclass(frozen=True)
class TrainConfig:
    """Everything that trains one model on N ranks."""

    model: ModelConfig = field(default_factory=ModelConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    compile: CompileConfig = field(default_factory=CompileConfig)
    ac: ACConfig = field(default_factory=ACConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    train: TrainSection = field(default_factory=TrainSection)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)

    @property
    def accumulation(self) -> int:
        """Forward/backward passes a step (of a resolved config)."""
        return self.train.global_batch_size // (self.train.local_batch_size * self.parallel.dp)

    @property
    def tokens_per_step(self) -> int:
        return self.train.global_batch_size * self.data.seq_len

    def stage_layers(self) -> list[list[int]]:
        """Layer numbers of each pipeline stage, sizes within 1.

        What does not divide goes to the middle stages first, since the first stage also holds the embedding and the
        last the output projection and the loss: 126 layers on 8 stages are 15, 6 x 16, 15.
        """
        stages, layers = self.parallel.stages, self.model.layers
        sizes = [layers // stages] * stages
        for stage in [*range(1, stages - 1), 0][: layers % stages]:
            sizes[stage] += 1
        starts = [sum(sizes[:s]) for s in range(stages)]
        return [list(range(start, start + size)) for start, size in zip(starts, sizes, strict=True)]

    def rank_stages(self, pp_rank: int) -> list[int]:
        """Stage numbers that pipeline rank ``pp_rank`` holds: loop placement, or the V's two legs."""
        p = self.parallel
        if p.stages_per_rank == 1:
            return [pp_rank]
        return [pp_rank, p.stages - 1 - pp_rank] if p.schedule in V_SCHEDULES else [pp_rank, pp_rank + p.pp]


_ALIASES = {
    ("async_tp", True): "on",
    ("async_tp", False): "off",
    ("reshard_after_forward", True): "always",
    ("reshard_after_forward", False): "never",
    ("float8", False): "off",
    ("float8", None): "off",
    ("mode", None): "none",
    ("profile", True): "on",
    ("profile", False): "off",
}
"""YAML reads ``on``, ``off`` and ``none`` as booleans and null; what a person meant by them, per key."""


T = typing.TypeVar("T")


def from_dict(cls: type[T], data: Mapping[str, Any], prefix: str = "") -> T:
    """Build the dataclass ``cls`` from nested plain data, missing keys taking their defaults.

    Raises :class:`ConfigError` that lists every unknown key with the valid ones and every value of a wrong type or
    outside its choices.
    """
    problems: list[Problem] = []
    value = _read(cls, data, prefix, problems)
    if problems:
        raise ConfigError(problems)
    return typing.cast(T, value)


_type_hints = cache(typing.get_type_hints)
"""Evaluating the annotations takes a millisecond a class; a sweep reads thousands of plans."""


def _read(cls: type, data: Mapping[str, Any], prefix: str, problems: list[Problem]) -> Any:
    hints = _type_hints(cls)
    known = [f.name for f in fields(cls)]
    if not isinstance(data, Mapping):
        problems.append(Problem(prefix.rstrip("."), data, f"{prefix.rstrip('.')}={data!r}: a group of keys is needed, "
                                f"valid keys: {', '.join(known)}"))  # fmt: skip
        return None
    values = {}
    for key, raw in data.items():
        if key not in known:
            near = difflib.get_close_matches(str(key), known, 1)
            message = f"unknown key {prefix}{key}; valid keys: {', '.join(prefix + k for k in known)}"
            problems.append(Problem(f"{prefix}{key}", raw, message, nearest=prefix + near[0] if near else None))
        elif dataclasses.is_dataclass(hints[key]):
            values[key] = _read(typing.cast(type, hints[key]), raw, f"{prefix}{key}.", problems)
        else:
            values[key] = _value(hints[key], key, raw, f"{prefix}{key}", problems)
    return None if problems else cls(**values)


def _value(hint: Any, name: str, raw: Any, key: str, problems: list[Problem]) -> Any:
    """``raw`` as the type ``hint``, or a problem that names the valid values."""
    if not isinstance(raw, (list, dict)):
        raw = _ALIASES.get((name, raw), raw) if isinstance(raw, (bool, type(None))) else raw
    if typing.get_origin(hint) is Literal:
        choices = typing.get_args(hint)
        by_lower = {str(c).lower(): c for c in choices}
        if str(raw).lower() in by_lower:
            return by_lower[str(raw).lower()]
        near = difflib.get_close_matches(str(raw), [str(c) for c in choices], 1)
        problems.append(Problem(key, raw, f"{key}={raw!r} is not one of {', '.join(map(str, choices))}",
                                nearest=near[0] if near else None))  # fmt: skip
        return raw
    parts = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    allowed = [typing.get_origin(part) or part for part in parts]
    if type(raw) in allowed:
        return raw
    if float in allowed and type(raw) is int:
        return float(raw)
    if str in allowed and isinstance(raw, (int, float)) and not isinstance(raw, bool):
        return str(raw)
    wanted = " or ".join("null" if t is type(None) else t.__name__ for t in allowed)
    problems.append(Problem(key, raw, f"{key}={raw!r}: a value of type {wanted} is needed"))
    return raw


def resolve(config: TrainConfig) -> TrainConfig:
    """Fill in every automatic value; the result is what the trainer, the simulator and the hash see.

    Raises :class:`ConfigError` where the degrees can not make up the world or the batch can not be cut.
    """
    from trainer_core.rules import batch_problems, degree_problems

    problems = degree_problems(config)
    if problems:
        raise ConfigError(problems)
    p = config.parallel
    known = 1
    for degree in p.degrees.values():
        known *= 1 if degree == AUTO else degree
    world = known if p.world_size == AUTO else p.world_size
    degrees = {axis: world // known if degree == AUTO else degree for axis, degree in p.degrees.items()}
    p = replace(p, **degrees, world_size=world)  # type: ignore[arg-type]
    if p.microbatches == AUTO:
        p = replace(p, microbatches=1 if p.pp == 1 else p.stages if p.schedule in V_SCHEDULES else p.pp)
    t = config.train
    if t.global_batch_size == AUTO and t.local_batch_size > 0:
        t = replace(t, global_batch_size=t.local_batch_size * p.dp)
    config = replace(config, parallel=p, train=t)
    problems = batch_problems(config)
    if problems:
        raise ConfigError(problems)
    return config
