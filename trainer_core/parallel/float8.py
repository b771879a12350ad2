"""Float8 (torchao) and MXFP8 training: which linear layers compute in eight bits, and by which recipe."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import nn

from trainer_core.config import PrecisionConfig
from trainer_core.model import clean_name, is_block_linear


def apply_float8(model: nn.Module, precision: PrecisionConfig, program: str) -> None:
    """Swap the blocks' linear layers in place, weights shared. Where ``program`` (the device kind) has no kernels
    for it the arithmetic is emulated."""
    if precision.float8 == "mxfp8":
        _swap_mxfp8(model, emulate=program != "cuda")
        return
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    recipe = Float8LinearConfig.from_recipe_name(precision.float8)
    changes: dict[str, Any] = {"emulate": program != "cuda"}
    if precision.float8_all_gather:
        changes["enable_fsdp_float8_all_gather"] = True
    convert_to_float8_training(model, config=dataclasses.replace(recipe, **changes), module_filter_fn=is_block_linear)


def _swap_mxfp8(model: nn.Module, emulate: bool) -> None:
    from torchao.prototype.moe_training.mxfp8_linear import MXFP8Linear
    from torchao.quantization.quantize_.common.kernel_preference import KernelPreference

    preference = KernelPreference.EMULATED if emulate else KernelPreference.AUTO
    for name, module in list(model.named_modules()):
        if is_block_linear(module, name):
            with torch.device("meta"):
                swapped = MXFP8Linear(module.in_features, module.out_features, bias=False, kernel_preference=preference)
            swapped.weight = module.weight
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, swapped)


def converted(model: nn.Module) -> list[str]:
    """Names of the layers that compute in eight bits, by the class that is really there."""
    names = (name for name, module in model.named_modules() if type(module).__name__ in ("Float8Linear", "MXFP8Linear"))
    return [clean_name(name) for name in names]


def precompute_scales(model: nn.Module) -> None:
    """After the optimizer's step: one all-reduce for the scales of all weights, instead of one for each."""
    from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

    precompute_float8_dynamic_scale_for_fsdp(model)
