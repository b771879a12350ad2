"""Context parallel: a sequence cut over ranks, and causal attention over it. One implementation for CPU and CUDA.

``allgather`` gathers K and V of the whole sequence (one all-gather forward, one reduce-scatter backward).
``ring`` passes K and V from rank to rank (cp - 1 exchanges forward; at most two shards alive); their gradients travel
with them. ``ulysses`` exchanges sequence for heads (two all-to-alls each way) and attends over whole sequences.

With load balancing rank r of cp holds the chunks r and 2 cp - 1 - r of 2 cp, so that every rank has the same share of
the causal triangle. Partial results are merged by log-sum-exp in fp32. Past chunks are attended without a mask and the
diagonal with one: kernels disagree on where a causal mask starts when q and kv differ in length.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed._functional_collectives import (
    AsyncCollectiveTensor,
    all_gather_tensor,
    all_to_all_single_autograd,
    reduce_scatter_tensor,
)
from torch.distributed.device_mesh import DeviceMesh

from trainer_core.config import ParallelConfig
from trainer_core.model import Decoder

_aten = torch.ops.aten


def apply_cp(model: Decoder, mesh: DeviceMesh, p: ParallelConfig) -> None:
    """Replace the attention core of every block; ``mesh`` is [cp]."""
    for block in model.layers.values():
        attention = block.get_submodule("attention")
        attention.core = Ulysses(mesh) if p.cp_method == "ulysses" else GatheredAttention(mesh, p)


def positions(seq_len: int, rank: int, p: ParallelConfig) -> Tensor:
    """The sequence positions [T/CP] that cp rank ``rank`` holds, ascending."""
    if p.cp == 1 or not balanced(p):
        return torch.arange(rank * (seq_len // p.cp), (rank + 1) * (seq_len // p.cp))
    chunks = torch.arange(seq_len).chunk(2 * p.cp)
    return torch.cat([chunks[rank], chunks[2 * p.cp - 1 - rank]])


def balanced(p: ParallelConfig) -> bool:
    """Whether a rank holds two chunks. Ulysses attends over whole sequences, which needs no balancing."""
    return p.cp_balance and p.cp_method != "ulysses"


def balanced_cores(parts: list[nn.Module]) -> bool | None:
    """Whether the attention cores that are there hold two chunks a rank; None without context parallel."""
    cores = [m for part in parts for m in part.modules() if isinstance(m, (GatheredAttention, Ulysses))]
    return all(isinstance(m, GatheredAttention) and m.balance for m in cores) if cores else None


class Piece(NamedTuple):
    """Queries [q0, q1) attend to keys [k0, k1), all of them or, on the diagonal, causally."""

    q0: int
    q1: int
    k0: int
    k1: int
    causal: bool


def ring_pieces(rank: int, source: int, length: int, balance: bool) -> list[Piece]:
    """What local queries attend to in the shard of ``source``, positions relative to the shards of ``length``."""
    if source == rank:
        return [Piece(0, length, 0, length, True)]
    half = length // 2
    if source < rank:
        return [Piece(0, length, 0, half if balance else length, False)]
    return [Piece(half, length, 0, length, False)] if balance else []


def gather_pieces(rank: int, cp: int, length: int, balance: bool) -> list[Piece]:
    """What local queries attend to in the whole sequence, keys in sequence order."""
    if balance:
        half = length // 2
        chunks = [(0, rank * half, half), (half, (2 * cp - 1 - rank) * half, half)]
    else:
        chunks = [(0, rank * length, length)]
    pieces = []
    for q0, start, size in chunks:
        if start:
            pieces.append(Piece(q0, q0 + size, 0, start, False))
        pieces.append(Piece(q0, q0 + size, start, start + size, True))
    return pieces


def flash(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
    """q [B, H, Q, D], k and v [B, KV, K, D] -> out [B, H, Q, D], log-sum-exp [B, H, Q] fp32, random state (CUDA)."""
    if q.device.type == "cpu":
        out, lse = _aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal)
        return out, lse, ()
    out, lse, _, _, _, _, seed, offset, _ = _aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, False)
    return out, lse, (seed, offset)


def flash_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, state: tuple[Tensor, ...], causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k, v for one piece, given the *merged* output and log-sum-exp."""
    if q.device.type == "cpu":
        return _aten._scaled_dot_product_flash_attention_for_cpu_backward(grad, q, k, v, out, lse, 0.0, causal)
    return _aten._scaled_dot_product_flash_attention_backward(
        grad, q, k, v, out, lse, None, None, q.shape[2], k.shape[2], 0.0, causal, *state
    )


class _Accumulator:
    """Merges partial attention over pieces: running fp32 output and log-sum-exp."""

    def __init__(self, q: Tensor):
        self.q = q
        self.out = torch.zeros_like(q, dtype=torch.float32)
        self.lse = torch.full(q.shape[:-1], -math.inf, dtype=torch.float32, device=q.device)
        self.state: tuple[Tensor, ...] = ()

    def add(self, k: Tensor, v: Tensor, pieces: list[Piece]) -> None:
        for q0, q1, k0, k1, causal in pieces:
            out, lse, self.state = flash(self.q[:, :, q0:q1], k[:, :, k0:k1], v[:, :, k0:k1], causal)
            old = self.lse[:, :, q0:q1]
            new = torch.logaddexp(old, lse)
            self.out[:, :, q0:q1].mul_((old - new).exp_().unsqueeze(-1)).add_(out * (lse - new).exp_().unsqueeze(-1))
            old.copy_(new)


def _add_gradients(
    grads: tuple[Tensor, Tensor, Tensor], saved: tuple[Any, ...], k: Tensor, v: Tensor, pieces: list[Piece]
) -> None:
    """Add each piece's gradients to ``grads`` (dq, dk, dv in fp32). ``saved``: grad, q, out, lse, random state."""
    grad, q, out, lse, state = saved
    dq, dk, dv = grads
    for q0, q1, k0, k1, causal in pieces:
        queries, keys = slice(q0, q1), slice(k0, k1)
        piece = flash_backward(
            grad[:, :, queries], q[:, :, queries], k[:, :, keys], v[:, :, keys], out[:, :, queries],
            lse[:, :, queries].contiguous(), state, causal,
        )  # fmt: skip
        for total, part, where in zip((dq, dk, dv), piece, (queries, keys, keys), strict=True):
            total[:, :, where].add_(part)


class GatheredAttention(nn.Module):
    """Attention of local queries [B, H, T/CP, D] over the keys of all cp ranks, by all-gather or ring."""

    def __init__(self, mesh: DeviceMesh, p: ParallelConfig):
        super().__init__()
        self.group, self.rank, self.cp, self.balance = mesh.get_group(), mesh.get_local_rank(), p.cp, p.cp_balance
        self.function = _Ring if p.cp_method == "ring" else _AllGather

    # point-to-point calls and the merging loop are opaque to the compiler; around them it sees two small graphs
    @torch.compiler.disable
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.function.apply(q.contiguous(), k, v, self)


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, cp: GatheredAttention) -> Tensor:
        local = torch.stack([k, v])
        gathered = _now(all_gather_tensor(local, 0, cp.group)).unflatten(0, (cp.cp, -1))
        whole = _sequence_order(gathered, cp.balance)
        accumulator = _Accumulator(q)
        accumulator.add(whole[0], whole[1], gather_pieces(cp.rank, cp.cp, q.shape[2], cp.balance))
        out = accumulator.out.to(q.dtype)
        ctx.save_for_backward(q, whole, out, accumulator.lse, *accumulator.state)
        ctx.cp = cp
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        q, whole, out, lse, *state = ctx.saved_tensors
        cp = ctx.cp
        dq = torch.zeros_like(q, dtype=torch.float32)
        dkv = torch.zeros_like(whole, dtype=torch.float32)
        pieces = gather_pieces(cp.rank, cp.cp, q.shape[2], cp.balance)
        _add_gradients((dq, dkv[0], dkv[1]), (grad.contiguous(), q, out, lse, tuple(state)), whole[0], whole[1], pieces)
        ranked = _rank_order(dkv, cp.cp, cp.balance)
        local = _now(reduce_scatter_tensor(ranked.flatten(0, 1), "sum", 0, cp.group))
        dk, dv = local.to(whole.dtype)
        return dq.to(q.dtype), dk, dv, None


def _now(tensor: Tensor) -> Tensor:
    """The result of a functional collective, waited for."""
    return tensor.wait() if isinstance(tensor, AsyncCollectiveTensor) else tensor


def _sequence_order(gathered: Tensor, balance: bool) -> Tensor:
    """Shards [CP, 2, B, KV, T/CP, D] in rank order -> [2, B, KV, T, D] in sequence order."""
    if not balance:
        return torch.cat(gathered.unbind(0), dim=3)
    first, second = gathered.chunk(2, dim=4)
    return torch.cat([*first.unbind(0), *reversed(second.unbind(0))], dim=3)


def _rank_order(whole: Tensor, cp: int, balance: bool) -> Tensor:
    """The inverse: [2, B, KV, T, D] -> [CP, 2, B, KV, T/CP, D]."""
    if not balance:
        return torch.stack(whole.chunk(cp, dim=3))
    chunks = whole.chunk(2 * cp, dim=3)
    return torch.stack([torch.cat([chunks[r], chunks[2 * cp - 1 - r]], dim=3) for r in range(cp)])


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, cp: GatheredAttention) -> Tensor:
        local = kv = torch.stack([k, v])
        accumulator = _Accumulator(q)
        for step in range(cp.cp):
            following, works = _pass_on(kv, cp) if step < cp.cp - 1 else (kv, [])
            source = (cp.rank - step) % cp.cp
            accumulator.add(kv[0], kv[1], ring_pieces(cp.rank, source, q.shape[2], cp.balance))
            _wait(works)
            kv = following
        out = accumulator.out.to(q.dtype)
        ctx.save_for_backward(q, local, out, accumulator.lse, *accumulator.state)
        ctx.cp = cp
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        q, kv, out, lse, *state = ctx.saved_tensors
        cp, dtype = ctx.cp, kv.dtype
        saved = (grad.contiguous(), q, out, lse, tuple(state))
        dq = torch.zeros_like(q, dtype=torch.float32)
        dkv = torch.zeros_like(kv, dtype=torch.float32)
        for step in range(cp.cp):
            following, works = _pass_on(kv, cp) if step < cp.cp - 1 else (kv, [])
            source = (cp.rank - step) % cp.cp
            pieces = ring_pieces(cp.rank, source, q.shape[2], cp.balance)
            _add_gradients((dq, dkv[0], dkv[1]), saved, kv[0], kv[1], pieces)
            _wait(works)
            kv = following
            # the gradients follow their shard; after the last step they are one hop from home
            dkv, works = _pass_on(dkv, cp)
            _wait(works)
        dk, dv = dkv.to(dtype)
        return dq.to(q.dtype), dk, dv, None


def _pass_on(tensor: Tensor, cp: GatheredAttention) -> tuple[Tensor, list[dist.Work]]:
    """Start sending ``tensor`` to the next rank and receiving the previous rank's."""
    received = torch.empty_like(tensor)
    following, previous = (cp.rank + 1) % cp.cp, (cp.rank - 1) % cp.cp
    send = dist.P2POp(dist.isend, tensor, group=cp.group, group_peer=following)
    receive = dist.P2POp(dist.irecv, received, group=cp.group, group_peer=previous)
    return received, dist.batch_isend_irecv([send, receive])


def _wait(works: list[dist.Work]) -> None:
    for work in works:
        work.wait()


class Ulysses(nn.Module):
    """Exchange sequence for heads, attend over whole sequences, exchange back."""

    def __init__(self, mesh: DeviceMesh):
        super().__init__()
        self.group, self.cp = mesh.get_group(), mesh.size()

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [B, H, T/CP, D], k and v [B, KV, T/CP, D] -> [B, H, T/CP, D]. Heads are local to the tp rank.

        kv heads that do not divide by cp are repeated first, in groups that keep each query head with its kv head.
        """
        repeat = self.cp // math.gcd(self.cp, k.shape[1])
        if repeat > 1:
            k, v = k.repeat_interleave(repeat, dim=1), v.repeat_interleave(repeat, dim=1)
        parts = [x.unflatten(1, (self.cp, -1)) for x in (q, k, v)]
        sizes = [x.shape[2] for x in parts]
        q, k, v = self._exchange(torch.cat(parts, dim=2)).split(sizes, dim=1)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=sizes[0] != sizes[1])
        # [B, H/CP, CP, T/CP, D] -> every rank's heads of the local positions, [B, H, T/CP, D]
        out = out.unflatten(2, (self.cp, -1)).permute(2, 0, 1, 3, 4)
        return self._all_to_all(out).permute(1, 0, 2, 3, 4).flatten(1, 2)

    def _exchange(self, x: Tensor) -> Tensor:
        """[B, CP, h, T/CP, D] -> [B, h, T, D]."""
        return self._all_to_all(x.transpose(0, 1)).permute(1, 2, 0, 3, 4).flatten(2, 3)

    def _all_to_all(self, x: Tensor) -> Tensor:
        """Slice i of dim 0 goes to rank i; slice j of the result came from rank j."""
        return all_to_all_single_autograd(x.contiguous(), None, None, self.group)
