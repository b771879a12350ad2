"""AdamW, the learning rate's course, and the gradient norm over parameters on different meshes."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

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
def clip_grad_norm(parts: list[nn.Module], max_norm: float, pp_group: dist.ProcessGroup | None = None) -> Tensor:
    """Scale the gradients of all parts so that their global 2-norm is at most ``max_norm``; the norm before, fp32 [].

    Every logical parameter counts once: DTensor sums over the mesh of its shards, plain tensors are whole on each
    rank, and pipeline stages add up over ``pp_group``. ``max_norm`` <= 0 only measures. Collective: all ranks call it.
    """
    groups = by_mesh(p for part in parts for p in part.parameters() if p.grad is not None)
    total = torch.zeros((), device=next((p.device for part in parts for p in part.parameters()), None))
    for params in groups.values():
        norm = get_total_norm([p.grad for p in params if p.grad is not None])
        total += (norm.full_tensor() if isinstance(norm, DTensor) else norm).float() ** 2
    if pp_group is not None:
        dist.all_reduce(total, group=pp_group)
    total = total.sqrt()
    if max_norm > 0:
        for params in groups.values():
            clip_grads_with_norm_(params, max_norm, total)
    return total
