"""Pipeline parallel: stages of consecutive layers, run by torch's schedules."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, PipelineScheduleSingle, get_schedule_class

from trainer_core.config import TrainConfig
from trainer_core.mesh import Mesh
from trainer_core.model import Decoder


def split(config: TrainConfig, pp_rank: int) -> dict[int, Decoder]:
    """This rank's stages, stage number -> model; one stage that is everything without PP."""
    layers, last = config.stage_layers(), config.parallel.stages - 1
    project = config.train.loss_chunks == 1
    return {
        stage: Decoder(config.model, layers[stage], first=stage == 0, last=stage == last, project=project)
        for stage in config.rank_stages(pp_rank)
    }


def build_schedule(
    config: TrainConfig,
    stages: dict[int, Decoder],
    mesh: Mesh,
    device: torch.device,
    loss: Callable[[Tensor, Tensor], Tensor],
) -> PipelineScheduleSingle | PipelineScheduleMulti:
    """torch's schedule over this rank's stages. Gradients are not scaled by the microbatches: the loss is a share of
    the global token mean already."""
    p = config.parallel
    built = [PipelineStage(model, number, p.stages, device, group=mesh.group("pp")) for number, model in stages.items()]
    schedule: Any = get_schedule_class(p.schedule)
    multi = issubclass(schedule, PipelineScheduleMulti)
    return schedule(built if multi else built[0], n_microbatches=p.microbatches, loss_fn=loss, scale_grads=False)


def actions(schedule: Any) -> dict[int, list[str]]:
    """Rank -> torch's action list, as text; empty for the schedules that torch runs without a table."""
    order = getattr(schedule, "pipeline_order", None) or {}
    return {rank: [str(action) for action in row] for rank, row in order.items()}


def actions_digest(schedule: Any) -> str | None:
    """Digest of the whole table, None where there is none."""
    table = actions(schedule)
    return hashlib.sha256(json.dumps(table).encode()).hexdigest()[:16] if table else None
