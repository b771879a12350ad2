"""Activation checkpointing: what of a block's forward is kept for its backward."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from trainer_core.config import ACConfig
from trainer_core.model import Decoder

_aten, _c10d = torch.ops.aten, torch.ops._c10d_functional

SAVED_OPS = {
    # attention costs T^2 to recompute; the CPU has an op name of its own
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_cudnn_attention.default,
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
    # communication is paid once
    _c10d.reduce_scatter_tensor.default,
    # Float8 scales are scalars that cost a pass over the tensor
    _aten.max.default,
}
"""What selective checkpointing keeps, besides every second matmul."""


def apply_ac(model: Decoder, ac: ACConfig) -> None:
    """Wrap blocks in place: all of them (full, selective), or every k-th by its global number."""
    for name, block in list(model.layers.items()):
        if ac.mode == "every_k" and int(name) % ac.k:
            continue
        options: dict[str, Any] = {"context_fn": _selective_contexts} if ac.mode == "selective" else {}
        model.layers[name] = checkpoint_wrapper(block, preserve_rng_state=False, **options)


def _selective_contexts() -> Any:
    matmuls: dict[bool, int] = defaultdict(int)

    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if op == _aten.mm.default:
            # forward and recomputation count apart, so that both see the same matmul at the same number
            matmuls[context.is_recompute] += 1
            keep = matmuls[context.is_recompute] % 2 == 1
        else:
            keep = op in SAVED_OPS
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)
