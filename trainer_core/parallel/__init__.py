"""Every technique, in the order in which they must be applied. Each is one file beside this page."""

from __future__ import annotations

import torch

from trainer_core.config import TrainConfig
from trainer_core.mesh import Mesh
from trainer_core.model import Decoder
from trainer_core.parallel.activation import apply_ac
from trainer_core.parallel.compile import apply_compile
from trainer_core.parallel.context import apply_cp
from trainer_core.parallel.float8 import apply_float8
from trainer_core.parallel.fsdp import apply_fsdp
from trainer_core.parallel.pipeline import split
from trainer_core.parallel.tensor import apply_tp


def parallelize(config: TrainConfig, mesh: Mesh) -> dict[int, Decoder]:
    """This rank's stages (stage number -> model), on the meta device, with every technique of ``config`` applied."""
    with torch.device("meta"):
        stages = split(config, mesh.rank("pp"))

    for model in stages.values():
        # before TP: it swaps modules, and TP hangs its hooks on the swapped ones
        if config.precision.float8 != "off":
            apply_float8(model, config.precision, mesh.program)

        if (tp := mesh.axis("tp")) is not None:
            apply_tp(model, tp, config, mesh.program)

        if (cp := mesh.axis("cp")) is not None:
            apply_cp(model, cp, config.parallel)

        # around the block, inside the compiled region
        if config.ac.mode != "none":
            apply_ac(model, config.ac)

        if config.compile.enable:
            apply_compile(model, config)

        # last: it shards what is left of each parameter, and its hooks must stay outside the compiled graphs
        if needs_fsdp(config):
            apply_fsdp(model, mesh.fsdp, config)

    return stages


def needs_fsdp(config: TrainConfig) -> bool:
    """A single copy in fp32 needs no FSDP; in bf16 FSDP also keeps the fp32 originals."""
    p = config.parallel
    return p.fsdp * p.dp_replicate > 1 or config.precision.param == "bf16"
