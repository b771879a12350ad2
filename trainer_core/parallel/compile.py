"""torch.compile of each block: equal blocks share one graph, so that the compile time does not grow with depth."""

from __future__ import annotations

import sys

import torch

from trainer_core.config import TrainConfig
from trainer_core.model import Decoder


def apply_compile(model: Decoder, config: TrainConfig) -> None:
    """Compile the blocks in place. Ring and all-gather context parallel break the graph around attention."""
    graph_break = config.parallel.cp > 1 and config.parallel.cp_method != "ulysses"
    if config.parallel.async_tp == "on":
        torch._inductor.config._micro_pipeline_tp = True
    for block in model.layers.values():
        # a checkpointed region with a graph break inside is not compiled at all: there the compiled block goes inside
        inner = getattr(block, "_checkpoint_wrapped_module", block) if graph_break else block
        inner.compile(fullgraph=not graph_break)


def fused_async_tp() -> int:
    """How many matmuls the compiler really fused with a collective of async TP."""
    module = sys.modules.get("torch._dynamo.utils")
    counters = module.counters["inductor"] if module else {}
    return sum(count for name, count in counters.items() if "async_tp" in name or "micro_pipeline" in name)
