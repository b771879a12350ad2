"""FSDP2 and HSDP: parameters sharded over the fsdp axis, gathered block by block."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from trainer_core.config import TrainConfig
from trainer_core.model import Decoder

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def apply_fsdp(model: Decoder, mesh: DeviceMesh, config: TrainConfig) -> None:
    """Shard ``model`` over ``mesh`` ([fsdp], or [dp_replicate, fsdp]) in place.

    Gradients are summed, not averaged: the loss is already divided by the global token count.
    """
    precision, p = config.precision, config.parallel
    policy = MixedPrecisionPolicy(param_dtype=DTYPES[precision.param], reduce_dtype=DTYPES[precision.reduce])
    blocks = list(model.layers.values())
    for i, block in enumerate(blocks):
        # the last block's parameters are needed again at once, by the backward
        reshard = p.reshard and (i < len(blocks) - 1 or p.pp > 1)
        fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
    if not model.project and model.output is not None:
        # the chunked loss calls the projection by itself, several times
        fully_shard(model.output, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    _prefetch([block for block in blocks if isinstance(block, FSDPModule)], p.fsdp_prefetch)


def _prefetch(blocks: list[FSDPModule], on: bool) -> None:
    """On: gather the next block while this one computes, both ways. Off: each block gathers when it is reached."""
    for i, block in enumerate(blocks):
        if on:
            block.set_modules_to_forward_prefetch(blocks[i + 1 : i + 2])
        else:
            # a list that names the block itself replaces the implicit prefetch by nothing
            block.set_modules_to_backward_prefetch([block])


def reduce_dtype(parts: list[nn.Module]) -> str | None:
    """The dtype in which FSDP really reduces gradients; None where there is no FSDP."""
    modules = (module for part in parts for module in part.modules() if isinstance(module, FSDPModule))
    policies = {str(module._get_fsdp_state()._mp_policy.reduce_dtype).removeprefix("torch.") for module in modules}
    return ",".join(sorted(policies)) or None
