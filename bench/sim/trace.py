"""Trace the trainer's own step at the real world size, on one process without devices.

The fake process group stands in for the world, FakeTensorMode for memory. The model is traced at a reduced depth: its
layers are alike, and :mod:`bench.sim.expand` repeats the middle one, after checking that it repeats.
"""

from __future__ import annotations

import contextlib
import gc
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._redistribute import clear_redistribute_planner_cache
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.testing._internal.distributed.fake_pg import FakeStore

from bench.sim import program, stages
from bench.sim.compiled import as_kernels
from bench.sim.events import Trace
from bench.sim.tracer import Group, Tracer, follow_layers, follow_modules, hooks
from bench.spec import ProgramConfig, RunSpec
from trainer_core import parallel, train
from trainer_core.config import TrainConfig
from trainer_core.evidence import group_axes
from trainer_core.mesh import Mesh
from trainer_core.parallel.context import positions

OURS = ProgramConfig()
STEPS = 2
"""Adam's states appear at the end of the first step; the second is the steady one."""


@contextlib.contextmanager
def fake_world(rank: int, world_size: int) -> Iterator[None]:
    """The default process group as ``rank`` of ``world_size``; nothing is sent."""
    if dist.is_initialized():
        raise RuntimeError("a process group exists in this process: simulate in another one")
    hook = sys.excepthook  # torch puts one in that prefixes tracebacks with the rank
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    sys.excepthook = hook
    try:
        yield
    finally:
        dist.destroy_process_group()
        _forget_meshes()


def _forget_meshes() -> None:
    """DTensor keeps plans by mesh, and takes an equal mesh of a later world for the one whose groups are gone."""
    _clear_sharding_prop_cache()
    clear_redistribute_planner_cache()
    ShardingPropagator._propagate_tensor_meta_cached.cache_clear()


def groups_of(mesh: Mesh) -> dict[str, Group]:
    """Process group name -> axis, size and stride."""
    out = {}
    for name, axis in group_axes(mesh).items():
        ranks = dist.get_process_group_ranks(mesh.submesh(axis).get_group())
        out[name] = Group(axis, len(ranks), ranks[1] - ranks[0] if len(ranks) > 1 else 1)
    return out


def flash(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """What F.scaled_dot_product_attention launches on a GPU: flash attention, forward and backward."""
    causal = kwargs.get("is_causal", args[2] if len(args) > 2 else False)
    return torch.ops.aten._scaled_dot_product_flash_attention(query, key, value, 0.0, causal)[0]


@contextlib.contextmanager
def as_on_device(kind: str) -> Iterator[None]:
    """On the CPU build, take the kernels that ``kind`` (cpu or cuda) would take."""
    if kind != "cuda":
        yield
        return
    attention, float8 = F.scaled_dot_product_attention, parallel.apply_float8
    F.scaled_dot_product_attention = flash
    # real eight-bit GEMMs, not their emulation
    parallel.apply_float8 = lambda model, precision, device_type: float8(model, precision, kind)
    try:
        yield
    finally:
        F.scaled_dot_product_attention, parallel.apply_float8 = attention, float8


def reduced(config: TrainConfig, layers: int) -> TrainConfig:
    """The same plan with at most ``layers`` layers a stage."""
    most = max(map(len, config.stage_layers()))
    layers = min(layers, most) * config.parallel.stages
    return replace(config, model=replace(config.model, layers=min(layers, config.model.layers)))


def trace_rank(spec: RunSpec, rank: int = 0, depth: int = 6, steps: int = STEPS, kind: str = "cuda") -> Trace:
    """Trace ``steps`` optimizer steps of ``rank``, with at most ``depth`` layers a stage, on a device of ``kind``."""
    config, device = reduced(spec.config, depth), torch.device("cpu")
    tracer = Tracer()
    tracer.trace.rank = rank
    with contextlib.ExitStack() as stack:
        for context in (fake_world(rank, config.parallel.world_size), as_on_device(kind), without_collector(),
                        as_kernels(tracer, config), program.variant(spec.program)):  # fmt: skip
            stack.enter_context(context)
        trainer = train.setup(config, device, init=False)
        tracer.groups = groups_of(trainer.mesh)
        for context in (FakeTensorMode(allow_non_fake_inputs=True), hooks(tracer), stages.transfers(tracer)):
            stack.enter_context(context)
        materialize(tracer, trainer)
        program.adjust(trainer, spec.program)
        if trainer.schedule is not None:
            stages.prepare(tracer, trainer.schedule, config, spec.program.stage_outputs_kept)
            tracer.trace.facts |= {"actions": stages.action_table(trainer.schedule),
                                   "slots": stages.slot_table(trainer.schedule)}  # fmt: skip
        stack.enter_context(tracer)
        for step in range(1, steps + 1):
            tracer.mark("step", step)
            trainer.train_step(step, batch(config, device))
        tracer.mark("end")
    return tracer.trace


@contextlib.contextmanager
def without_collector() -> Iterator[None]:
    """No garbage collection in between: what reference cycles keep alive must not depend on when it runs."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


def materialize(tracer: Tracer, trainer: train.Trainer) -> None:
    """Give the parameters (fake) memory, and hang the hooks that tell layer and module."""
    c = trainer.config
    here = positions(c.data.seq_len, trainer.mesh.rank("cp"), c.parallel)
    offset = 0
    for model in trainer.stages.values():
        model.to_empty(device=trainer.device)
        model.set_positions(here)
        blocks = list(model.layers.values())
        owner = {id(p): i for i, block in enumerate(blocks, offset) for p in block.parameters()}
        for p in model.parameters():
            number = tracer.follow(local(p), "params", owner.get(id(p), -1), initial=True)
            tracer.trace.storages[number].sharded = isinstance(p, DTensor)
        tracer.follow(model.rope, "buffers", -1, initial=True)
        follow_modules(tracer, model, skip="layers" if c.compile.enable else "")
        follow_layers(tracer, blocks, offset)
        tracer.trace.depths.append(len(blocks))
        offset += len(blocks)


def local(t: Tensor) -> Tensor:
    """The plain tensor that a parameter keeps on this rank."""
    t = t.detach()
    t = t.to_local() if isinstance(t, DTensor) else t
    return getattr(t, "_tensor", t)


def batch(config: TrainConfig, device: torch.device) -> train.Batch:
    """Tokens and labels of every accumulation pass."""
    shape = (config.train.local_batch_size, config.data.seq_len)
    make = lambda: torch.zeros(shape, dtype=torch.int64, device=device)
    return [(make(), make()) for _ in range(config.accumulation)]
