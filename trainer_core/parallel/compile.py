"""torch.compile of each block: equal blocks share one graph, so that the compile time does not grow with depth."""

from __future__ import annotations

import torch

from trainer_core.config import TrainConfig
from trainer_core.model import Decoder


def apply_compile(model: Decoder, config: TrainConfig) -> None:
    """Compile the blocks in place. Ring and all-gather context parallel break the graph around attention."""
    graph_break = config.parallel.cp > 1
    if config.parallel.async_tp == "on":
        torch._inductor.config._micro_pipeline_tp = True
    for block in model.layers.values():
        block.compile(fullgraph=not graph_break)
