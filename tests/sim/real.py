"""What a real rank does in two steps, for comparison with the trace: live tensor bytes and collectives."""

from __future__ import annotations

from typing import Any

import torch

from bench.sim.events import Event
from bench.sim.hooks import hooks
from bench.sim.memory import Lifetimes, live_peak
from bench.sim.trace import batch, without_collector
from bench.sim.tracer import Tracer
from trainer_core import train
from trainer_core.config import TrainConfig
from trainer_core.evidence import CollectiveCounter


def two_steps(config: TrainConfig) -> tuple[int, dict[str, dict[str, list[int]]]]:
    """(peak of live tensor bytes over both steps, collectives of the second) of this gloo rank, real tensors."""
    torch.manual_seed(0)
    trainer = train.setup(config, torch.device("cpu"))
    tracer = Tracer()
    with without_collector(), hooks(tracer):
        for part in trainer.parts:
            for p in [*part.parameters(), *part.buffers()]:
                tracer.follow(getattr(p, "_local_tensor", p).detach(), "params", -1)
        with tracer:
            trainer.train_step(1, batch(config, trainer.device))
        with CollectiveCounter(trainer.mesh) as counter, tracer:
            trainer.train_step(2, batch(config, trainer.device))
    return live_bytes(tracer)[0], counter.plain()


def live_bytes(tracer: Tracer) -> tuple[int, Any]:
    trace, order = tracer.trace, []
    for kind, arg in zip(trace.events.kind, trace.events.arg, strict=True):
        if kind in (Event.ALLOC, Event.FREE):
            order.append(arg if kind == Event.ALLOC else ~arg)
    sizes = [s.bytes for s in trace.storages]
    return live_peak(Lifetimes(order, sizes, [0] * len(sizes), [s.category for s in trace.storages]))
