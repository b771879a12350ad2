"""Other training programs: replaces parts of our trainer by what an older program did, while a step is traced.

Each option of :class:`bench.spec.ProgramConfig` that changes kernels or communication is one patch here; what changes
only when a value is kept or when a pipeline waits is read where the schedule is simulated.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
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


@dataclass(frozen=True)
class Ring:
    """What ring attention needs to know; plain values, so that the compiler takes them as constants."""

    group: str
    rank: int
    cp: int
    balance: bool
    gathers: bool
    wide_gradients: bool


def rotated_attention(program: ProgramConfig) -> type[nn.Module]:
    """The attention core of torch's own context parallel, which the compiler sees through."""

    class RotatedAttention(nn.Module):
        def __init__(self, mesh: DeviceMesh, p: ParallelConfig):
            super().__init__()
            self.ring = Ring(mesh.get_group().group_name, mesh.get_local_rank(), p.cp, p.cp_balance,
                             program.cp_rotation == "allgather", program.cp_dkv_fp32)  # fmt: skip

        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            out: Tensor = _Rotated.apply(q, k.contiguous(), v.contiguous(), self.ring)  # type: ignore[no-untyped-call]
            return out

    return RotatedAttention


def merge(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Two partial attentions over different keys as one, in fp32: the weight of the second is a sigmoid of the
    difference of their log-sum-exps."""
    weight = torch.sigmoid(part_lse - lse)[..., None]
    return out - weight * (out - part.float()), lse - F.logsigmoid(lse - part_lse)


def put(total: Tensor, part: Tensor, half: int) -> Tensor:
    """``total`` with one half (0 or 1; -1: all) along the sequence replaced, the whole written anew."""
    if half < 0:
        return part
    first, second = total.chunk(2, dim=2)
    return torch.cat([part, second] if half == 0 else [first, part], dim=2)


def pick(x: Tensor, half: int) -> Tensor:
    return x if half < 0 else x.chunk(2, dim=2)[half]


def pack(k: Tensor, v: Tensor) -> Tensor:
    return torch.cat([k.flatten(), v.flatten()])


def unpack(flat: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
    k, v = flat.chunk(2)
    return k.view(like.shape), v.view(like.shape)


def pieces(ring: Ring, step: int) -> tuple[int, int, bool] | None:
    """(half of the queries, half of the keys, causal) of a ring step, half -1 the whole; None: nothing to attend to."""
    if step == 0:
        return -1, -1, True
    if not ring.balance:
        return (-1, -1, False) if step <= ring.rank else None
    return (-1, 0, False) if step <= ring.rank else (1, -1, False)


def pass_on(flat: Tensor, ring: Ring) -> Tensor:
    """An all-to-all in which every rank sends all it has to the next; not waited for."""
    to, whence = ((ring.rank + step) % ring.cp for step in (1, -1))
    sent, received = ([flat.numel() if rank == peer else 0 for rank in range(ring.cp)] for peer in (to, whence))
    out: Tensor = _c10d.all_to_all_single(flat, received, sent, ring.group)
    return out


def ask(k: Tensor, v: Tensor, ring: Ring) -> Tensor:
    """Start what brings the next step's K and V: one gather of all ranks', or the next rank's."""
    flat = pack(k, v)
    out: Tensor = _c10d.all_gather_into_tensor(flat, ring.cp, ring.group) if ring.gathers else pass_on(flat, ring)
    return out


def receive(coming: Tensor, like: Tensor, ring: Ring, step: int) -> tuple[Tensor, Tensor, Tensor]:
    """(K, V, what is kept for later steps) of ring step ``step``."""
    arrived = _c10d.wait_tensor(coming)
    if not ring.gathers:
        k, v = unpack(arrived, like)
        return k, v, pass_on(arrived, ring) if step < ring.cp - 1 else arrived
    k, v = unpack(arrived.chunk(ring.cp)[(ring.rank - step) % ring.cp], like)
    return k, v, arrived


class _Rotated(torch.autograd.Function):
    """Ring attention, q, k and v [B, H, T/CP, D]: partial outputs merged in fp32, gradients of K and V sent on."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, ring: Ring) -> Tensor:
        coming = ask(k, v, ring)
        part, lse, state = context.flash(q, k, v, True)
        out = part.float()
        for step in range(1, ring.cp):
            keys, values, coming = receive(coming, k, ring, step)
            piece = pieces(ring, step)
            if piece is not None:
                qh, kh, causal = piece
                part, part_lse, state = context.flash(pick(q, qh), pick(keys, kh), pick(values, kh), causal)
                new, new_lse = merge(pick(out, qh), pick(lse, qh), part, part_lse)
                out, lse = put(out, new, qh), put(lse, new_lse, qh)
        result = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, result, lse, *state)
        ctx.ring = ring
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        q, k, v, out, lse, *state = ctx.saved_tensors
        ring: Ring = ctx.ring
        wide = torch.float32 if ring.wide_gradients else q.dtype
        coming = ask(k, v, ring)
        parts = context.flash_backward(grad, q, k, v, out, lse, tuple(state), True)
        dq, dk, dv = (x.to(wide) for x in parts)
        travelling = pass_on(pack(dk, dv), ring)
        for step in range(1, ring.cp):
            keys, values, coming = receive(coming, k, ring, step)
            piece = pieces(ring, step)
            if piece is not None:
                qh, kh, causal = piece
                parts = context.flash_backward(
                    pick(grad, qh), pick(q, qh), pick(keys, kh), pick(values, kh), pick(out, qh),
                    pick(lse, qh).contiguous(), tuple(state), causal,
                )  # fmt: skip
            dk, dv = unpack(_c10d.wait_tensor(travelling), k)
            if piece is not None:
                dk, dv = (put(x, pick(x, kh) + part, kh) for x, part in ((dk, parts[1]), (dv, parts[2])))
                dq = put(dq, pick(dq, qh) + parts[0], qh)
            travelling = pass_on(pack(dk, dv), ring)
        dk, dv = unpack(_c10d.wait_tensor(travelling), k)
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None
