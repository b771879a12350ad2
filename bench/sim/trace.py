"""Trace the trainer's own step at the real world size, on one process without devices.

The fake process group stands in for the world, FakeTensorMode for memory. The model is traced at a reduced depth: its
layers are alike, and :mod:`bench.sim.expand` repeats the middle one, after checking that it repeats.
"""

from __future__ import annotations

import contextlib
import gc
import sys
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Any
from unittest import mock

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
from bench.sim.compiled import Current, as_kernels
from bench.sim.events import Trace
from bench.sim.hooks import follow_layers, follow_modules, hooks
from bench.sim.tracer import Group, Tracer
from bench.spec import RunSpec
from trainer_core import train
from trainer_core.config import TrainConfig
from trainer_core.evidence import group_axes
from trainer_core.mesh import Mesh
from trainer_core.parallel.context import balanced, positions

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
    _clear_sharding_prop_cache()  # type: ignore[no-untyped-call]
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
    out: Tensor = torch.ops.aten._scaled_dot_product_flash_attention(query, key, value, 0.0, causal)[0]
    return out


@contextlib.contextmanager
def as_on_device(kind: str) -> Iterator[None]:
    """On the CPU build, take the kernels that ``kind`` (cpu or cuda) would take."""
    if kind != "cuda":
        yield
        return
    with mock.patch.object(F, "scaled_dot_product_attention", flash):
        yield


def period(config: TrainConfig) -> int:
    """Layers after which the model repeats: checkpointing may take one in k."""
    return config.ac.k if config.ac.mode == "every_k" else 1


def reduced(config: TrainConfig, depth: int) -> TrainConfig:
    """The same plan with at most ``depth`` periods of layers a stage, and what the last period has too few.

    With pipeline stages and a period, which layer is which depends on where a stage begins: nothing is left out.
    """
    k, stages = period(config), config.parallel.stages
    if k > 1 and stages > 1:
        return config
    most = max(map(len, config.stage_layers()))
    layers = min(depth * k + (config.model.layers % k if stages == 1 else 0), most) * stages
    return replace(config, model=replace(config.model, layers=min(layers, config.model.layers)))


def periods(config: TrainConfig) -> list[int]:
    """Periods of layers in every stage."""
    k = period(config) if config.parallel.stages == 1 else 1
    return [-(-len(layers) // k) for layers in config.stage_layers()]


def trace_ranks(
    spec: RunSpec, pp_ranks: tuple[int, ...] = (0,), depth: int = 6, steps: int = STEPS, kind: str = "cuda"
) -> dict[int, Trace]:
    """Trace ``steps`` optimizer steps of the pipeline ranks, with at most ``depth`` periods of layers a stage, as on a
    device of ``kind`` (cpu, cuda).

    All are traced in one fake world, whose rank takes their places in the pipeline in turn: a block is compiled once.
    Without load balancing the last cp rank has the most attention to do: it is the one that is traced.
    """
    config, p = reduced(spec.config, depth), spec.config.parallel
    rank = 0 if balanced(p) else (p.cp - 1) * p.tp
    out: dict[int, Trace] = {}
    with contextlib.ExitStack() as stack:
        tracers = Current()
        for context in (fake_world(rank, p.world_size), as_on_device(kind), without_collector(),
                        as_kernels(tracers, config), program.variant(spec.program)):  # fmt: skip
            stack.enter_context(context)
        mesh, memory = Mesh.build(p, "cpu", kind), FakeTensorMode(allow_non_fake_inputs=True)
        for pp_rank in pp_ranks:
            staged = StagedMesh(**{f.name: getattr(mesh, f.name) for f in fields(mesh)}, pp_rank=pp_rank)
            with mock.patch.object(Mesh, "build", lambda *_, staged=staged: staged):
                trainer = train.setup(config, torch.device("cpu"), init=False, program=kind)
            tracers.now = Tracer(groups_of(mesh))
            with memory:
                _run(tracers.now, trainer, spec, steps, pp_rank)
            out[pp_rank] = tracers.now.trace
    return out


def trace_rank(spec: RunSpec, depth: int = 6, steps: int = STEPS, kind: str = "cuda") -> Trace:
    """The trace of the first pipeline rank."""
    return trace_ranks(spec, (0,), depth, steps, kind)[0]


@dataclass(frozen=True)
class StagedMesh(Mesh):
    """A mesh seen from pipeline rank ``pp_rank``."""

    pp_rank: int = 0

    def rank(self, name: str) -> int:
        return self.pp_rank if name == "pp" else super().rank(name)


def _run(tracer: Tracer, trainer: train.Trainer, spec: RunSpec, steps: int, pp_rank: int) -> None:
    with hooks(tracer), stages.transfers(tracer):
        materialize(tracer, trainer)
        program.adjust(trainer, spec.program)
        if trainer.schedule is not None:
            stages.prepare(tracer, trainer.schedule, trainer.config, spec.program.stage_outputs_kept, pp_rank)
            tracer.trace.facts |= {"actions": stages.action_table(trainer.schedule),
                                   "slots": stages.slot_table(trainer.schedule)}  # fmt: skip
        with tracer:
            for step in range(1, steps + 1):
                tracer.mark("step", step)
                trainer.train_step(step, batch(trainer.config, trainer.device))
            tracer.mark("end")
        tracer.close()


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
    k = period(c) if c.parallel.stages == 1 else 1
    for model in trainer.stages.values():
        model.to_empty(device=trainer.device)
        model.set_positions(here)
        blocks = list(model.layers.values())
        numbers = [sum(tracer.trace.depths) + i // k for i in range(len(blocks))]
        owner = {id(p): number for number, block in zip(numbers, blocks, strict=True) for p in block.parameters()}
        for p in model.parameters():
            number = tracer.follow(local(p), "params", owner.get(id(p), -1), initial=True)
            tracer.trace.storages[number].sharded = isinstance(p, DTensor)
        tracer.follow(model.rope, "buffers", -1, initial=True)
        follow_modules(tracer, model, skip="layers" if c.compile.enable else "")
        follow_layers(tracer, blocks, numbers)
        tracer.trace.depths.append(-(-len(blocks) // k))


def local(t: Tensor) -> Tensor:
    """The plain tensor that a parameter keeps on this rank."""
    t = t.detach()
    t = t.to_local() if isinstance(t, DTensor) else t
    return getattr(t, "_tensor", t)


def batch(config: TrainConfig, device: torch.device) -> train.Batch:
    """Tokens and labels of every accumulation pass."""
    shape = (config.train.local_batch_size, config.data.seq_len)
    one = [torch.zeros(shape, dtype=torch.int64, device=device) for _ in range(2 * config.accumulation)]
    return list(zip(one[::2], one[1::2], strict=True))
