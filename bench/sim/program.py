"""Other training programs: replaces parts of our trainer by what an older program did, while a step is traced.

Each option of :class:`bench.spec.ProgramConfig` that changes kernels or communication is one patch here; what changes
only when a value is kept or when a pipeline waits is read where the schedule is simulated.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from bench.spec import ProgramConfig
from trainer_core import model, train
from trainer_core.config import ParallelConfig
from trainer_core.parallel import context

_c10d = torch.ops._c10d_functional


@contextlib.contextmanager
def variant(program: ProgramConfig) -> Iterator[None]:
    """The trainer as ``program`` had it; nothing changes for the default program."""
    with contextlib.ExitStack() as stack:
        if program.rope_complex:
            stack.enter_context(mock.patch.object(model, "rotate", rotate_complex))
        if program.kv_expanded:
            stack.enter_context(mock.patch.object(model.Attention, "forward", attend_expanded))
        if program.cp_rotation != "own":
            stack.enter_context(mock.patch.object(context, "GatheredAttention", rotated_attention(program)))
        yield


def adjust(trainer: train.Trainer, program: ProgramConfig) -> None:
    """What is set on a trainer that stands already."""
    for part in trainer.parts:
        if program.root_resharded and isinstance(part, FSDPModule) and trainer.config.parallel.reshard:
            part.set_reshard_after_forward(True, recurse=False)


def rotate_complex(x: Tensor, rope: Tensor) -> Tensor:
    """Rotary embedding of x [B, T, H, D] as a product of complex numbers in fp32, pairs (2i, 2i + 1)."""
    turns = torch.complex(rope[:, 0], rope[:, 1])[:, None]
    pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * turns).flatten(-2).to(x.dtype)


def attend_expanded(self: model.Attention, x: Tensor, rope: Tensor) -> Tensor:
    """:meth:`trainer_core.model.Attention.forward` with K and V repeated to every query head in memory."""
    b, t, _ = x.shape
    q = model.rotate(self.wq(x).view(b, t, -1, self.head_dim), rope)
    k = model.rotate(self.wk(x).view(b, t, -1, self.head_dim), rope)
    v = self.wv(x).view(b, t, -1, self.head_dim)
    times = q.shape[2] // k.shape[2]
    k, v = (y[:, :, :, None].expand(-1, -1, -1, times, -1).reshape(b, t, -1, self.head_dim) for y in (k, v))
    out = self.core(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
    mixed: Tensor = self.wo(out.transpose(1, 2).reshape(b, t, -1))
    return mixed


def rotated_attention(program: ProgramConfig) -> type[nn.Module]:
    """The attention core of torch's own context parallel with the rotation of ``program``."""

    class RotatedAttention(nn.Module):
        def __init__(self, mesh: DeviceMesh, p: ParallelConfig):
            super().__init__()
            self.group, self.rank, self.cp, self.balance = mesh.get_group(), mesh.get_local_rank(), p.cp, p.cp_balance
            self.gathers = program.cp_rotation == "allgather"
            self.gradient_dtype = torch.float32 if program.cp_dkv_fp32 else torch.bfloat16
            self.merge = torch.compile(merge)
            self.add = torch.compile(add_part)

        @torch.compiler.disable  # type: ignore[untyped-decorator]
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            out: Tensor = _Rotated.apply(q, k.contiguous(), v.contiguous(), self)  # type: ignore[no-untyped-call]
            return out

    return RotatedAttention


def merge(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Two partial attentions over different keys as one, in fp32: the weight of the second is a sigmoid of the
    difference of their log-sum-exps."""
    weight = torch.sigmoid(part_lse - lse)[..., None]
    return out - weight * (out - part.float()), lse - F.logsigmoid(lse - part_lse)


def add_part(total: Tensor, part: Tensor, half: int) -> Tensor:
    """``part`` added to one half (0 or 1; -1: to all) of ``total`` along the sequence, the whole written anew."""
    if half < 0:
        return total + part
    halves = list(total.chunk(2, dim=2))
    halves[half] = halves[half] + part
    return torch.cat(halves, dim=2)


class _Rotation:
    """K and V of every ring step: gathered once a pass, or passed on in each step."""

    def __init__(self, core: Any, k: Tensor, v: Tensor):
        self.core, self.shape = core, k.shape
        self.flat = torch.cat([k.flatten(), v.flatten()])
        self.arriving: Tensor | None = None
        self.gathered: Tensor | None = None

    def start(self) -> None:
        name = self.core.group.group_name
        if not self.core.gathers:
            self.arriving = all_to_next(self.flat, self.core)
        elif self.gathered is None and self.arriving is None:
            self.arriving = _c10d.all_gather_into_tensor(self.flat, self.core.cp, name)

    def take(self, step: int) -> tuple[Tensor, Tensor]:
        if self.arriving is not None:
            arrived, self.arriving = _c10d.wait_tensor(self.arriving), None
            if self.core.gathers:
                self.gathered = arrived
            else:
                self.flat = arrived
        if self.gathered is not None:
            self.flat = self.gathered.chunk(self.core.cp)[(self.core.rank - step) % self.core.cp]
        k, v = self.flat.chunk(2)
        return k.view(self.shape), v.view(self.shape)


def all_to_next(x: Tensor, core: Any) -> Tensor:
    """An all-to-all that sends everything to the next rank; not waited for."""
    splits = [x.numel() // core.cp] * core.cp
    out: Tensor = _c10d.all_to_all_single(x, splits, splits, core.group.group_name)
    return out


def _parts(core: Any, step: int) -> tuple[int, int, bool]:
    """(half of the queries, half of the keys, causal) of a ring step; half -1 is the whole."""
    if step == 0:
        return -1, -1, True
    if not core.balance:
        return -1, -1, False
    return (-1, 0, False) if step <= core.rank else (1, -1, False)


def _half(x: Tensor, half: int) -> Tensor:
    return x if half < 0 else x.chunk(2, dim=2)[half]


class _Rotated(torch.autograd.Function):
    """Ring attention, q, k and v [B, H, T/CP, D]: partial outputs merged in fp32, gradients of K and V sent on."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, core: Any) -> Tensor:
        rotation = _Rotation(core, k, v)
        out = lse = None
        state: tuple[Tensor, ...] = ()
        for step in range(core.cp):
            keys, values = rotation.take(step)
            if step < core.cp - 1:
                rotation.start()
            if step > core.rank and not core.balance:
                continue
            qh, kh, causal = _parts(core, step)
            part, part_lse, state = context.flash(_half(q, qh), _half(keys, kh), _half(values, kh), causal)
            if out is None or lse is None:
                out, lse = part.float(), part_lse
            elif qh < 0:
                out, lse = core.merge(out, lse, part, part_lse)
            else:
                new, new_lse = core.merge(_half(out, qh), _half(lse, qh), part, part_lse)
                out = torch.cat([_half(out, 1 - qh), new] if qh else [new, _half(out, 1)], dim=2)
                lse = torch.cat([_half(lse, 1 - qh), new_lse] if qh else [new_lse, _half(lse, 1)], dim=2)
        assert out is not None and lse is not None
        result = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, result, lse, *state)
        ctx.core = core
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        q, k, v, out, lse, *state = ctx.saved_tensors
        core = ctx.core
        rotation = _Rotation(core, k, v)
        dtype = core.gradient_dtype
        dq = torch.zeros_like(q, dtype=dtype)
        dk, dv = torch.zeros_like(k, dtype=dtype), torch.zeros_like(v, dtype=dtype)
        travelling: Tensor | None = None
        for step in range(core.cp):
            keys, values = rotation.take(step)
            if step < core.cp - 1:
                rotation.start()
            qh, kh, causal = _parts(core, step)
            if step <= core.rank or core.balance:
                parts = context.flash_backward(
                    _half(grad, qh), _half(q, qh), _half(keys, kh), _half(values, kh), _half(out, qh),
                    _half(lse, qh).contiguous(), tuple(state), causal,
                )  # fmt: skip
            else:
                parts = (torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v))
            if travelling is not None:
                dk, dv = (x.view(k.shape) for x in _c10d.wait_tensor(travelling).chunk(2))
            dk, dv = core.add(dk, parts[1], kh), core.add(dv, parts[2], kh)
            travelling = all_to_next(torch.cat([dk.flatten(), dv.flatten()]), core)
            dq = core.add(dq, parts[0], qh)
        assert travelling is not None
        dk, dv = (x.view(k.shape) for x in _c10d.wait_tensor(travelling).chunk(2))
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None
