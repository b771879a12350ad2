"""AdamW, the learning rate's course, and the gradient norm over parameters on different meshes."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from trainer_core.config import OptimConfig, TrainConfig


def by_mesh(parameters: Iterable[nn.Parameter]) -> dict[DeviceMesh | None, list[nn.Parameter]]:
    """Parameters by the mesh they lie on, None for plain tensors. One foreach call can not take two meshes."""
    groups: dict[DeviceMesh | None, list[nn.Parameter]] = {}
    for p in parameters:
        groups.setdefault(p.device_mesh if isinstance(p, DTensor) else None, []).append(p)
    return groups


def build_optimizer(config: OptimConfig, parts: list[nn.Module]) -> torch.optim.AdamW:
    """AdamW over the parameters of all model parts of a rank, one group a mesh.

    Weight decay applies to every parameter, norms and embedding too, as in torchtitan.
    """
    groups = by_mesh(p for part in parts for p in part.parameters() if p.requires_grad)
    return torch.optim.AdamW(
        [{"params": params} for params in groups.values()] or [{"params": []}],
        lr=config.lr,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        weight_decay=config.weight_decay,
        foreach=config.impl == "foreach",
        fused=config.impl == "fused",
    )


def lr_at(config: TrainConfig, step: int) -> float:
    """Learning rate of ``step`` (from 1): a linear ramp to lr, then a decay to lr min_lr_ratio at the end."""
    o, steps = config.optim, config.train.steps
    if step <= o.lr_warmup_steps:
        return o.lr * step / o.lr_warmup_steps
    progress = (step - o.lr_warmup_steps) / (steps - o.lr_warmup_steps) if steps > o.lr_warmup_steps else 1.0
    left = {"cosine": 0.5 * (1 + math.cos(math.pi * min(progress, 1.0))), "linear": 1 - min(progress, 1.0), "none": 1.0}
    return o.lr * (o.min_lr_ratio + (1 - o.min_lr_ratio) * left[o.decay])


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr


@torch.no_grad()
def reduce_partial_gradients(parts: list[nn.Module]) -> None:
    """Finish gradients that are still partial sums: those of the norms, whose inputs sequence parallel cuts.

    DTensor leaves them partial until they are used and would then reduce each by itself; this is one flat all-reduce
    for each mesh axis. Under FSDP there is nothing to do: it reduces them before its own reduce-scatter. Collective.
    """
    partial: dict[dist.ProcessGroup, list[tuple[DTensor, nn.Parameter]]] = {}
    for part in parts:
        for p in part.parameters():
            if isinstance(p.grad, DTensor) and isinstance(p.data, DTensor):
                for dim, where in enumerate(p.grad.placements):
                    if where.is_partial():
                        partial.setdefault(p.grad.device_mesh.get_group(dim), []).append((p.data, p))
    for group, pairs in partial.items():
        shards = [p.grad.to_local() for _, p in pairs]  # type: ignore[union-attr]
        flat = torch.cat([shard.flatten() for shard in shards])
        dist.all_reduce(flat, group=group)
        pieces = torch.split(flat, [shard.numel() for shard in shards])
        for (data, p), shard, piece in zip(pairs, shards, pieces, strict=True):
            p.grad = DTensor.from_local(piece.view_as(shard), data.device_mesh, data.placements, run_check=False)


@torch.no_grad()
def clip_grad_norm(parts: list[nn.Module], max_norm: float, pp_group: dist.ProcessGroup | None = None) -> Tensor:
    """Scale the gradients of all parts so that their global 2-norm is at most ``max_norm``; the norm before, fp32 [].

    Every logical parameter counts once: a shard's sum of squares is summed over the axes that cut it and no others, and
    pipeline stages add up over ``pp_group``. That is one all-reduce for each set of cut axes, where torch's
    ``clip_grad_norm_`` takes one for each parameter. ``max_norm`` <= 0 only measures. Collective: all ranks call it.
    """
    cuts: dict[Any, list[Tensor]] = {}
    for grad in (p.grad for part in parts for p in part.parameters() if p.grad is not None):
        if isinstance(grad, DTensor):
            dims = tuple(i for i, where in enumerate(grad.placements) if not where.is_replicate())
            cuts.setdefault((grad.device_mesh, dims), []).append(grad.to_local())
        else:
            cuts.setdefault((None, ()), []).append(grad)
    # the CPU kernel sums fp32 one after the other, so that its error grows with the shard: 6e-5 at 500,000 elements
    accumulate = torch.float64 if all(p.device.type == "cpu" for part in parts for p in part.parameters()) else None
    total = torch.zeros((), device=next((p.device for part in parts for p in part.parameters()), None))
    for (mesh, dims), grads in cuts.items():
        squares = torch.stack(torch._foreach_norm(grads, dtype=accumulate)).float().square().sum()
        for dim in dims:
            dist.all_reduce(squares, group=mesh.get_group(dim))
        total += squares
    if pp_group is not None:
        dist.all_reduce(total, group=pp_group)
    total = total.sqrt()
    if max_norm > 0:
        # 1e-6 as in torch.nn.utils.clip_grad_norm_
        scale = (max_norm / (total + 1e-6)).clamp(max=1.0)
        for grads in cuts.values():
            torch._foreach_mul_(grads, scale)
    return total
