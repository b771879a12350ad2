"""Pipeline stages under the tracer: torch's own schedule runs, its point-to-point calls go nowhere.

Every action (F, B, I, W of a microbatch, REDUCE) leaves a mark, so that the scheduler can cut a rank's events into
actions and lay them out on all ranks by torch's action lists.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.pipelining import schedules
from torch.distributed.pipelining._utils import InferenceMode, extract_tensor_metas

from bench.sim.events import Event
from bench.sim.pipeline import parse
from bench.sim.tracer import Tracer
from trainer_core.config import TrainConfig
from trainer_core.parallel.fsdp import DTYPES


class _Work:
    """Stands for started transfers: waiting holds the current stream until they are done."""

    def __init__(self, tracer: Tracer, handles: list[int]):
        self.tracer, self.handles = tracer, handles

    def wait(self) -> bool:
        for handle in self.handles:
            self.tracer.add(Event.WAIT, handle)
        self.handles = []
        return True


@contextlib.contextmanager
def transfers(tracer: Tracer) -> Iterator[None]:
    """Sends and receives return a work that the tracer sees waited for."""

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        def start(*args: Any, **kwargs: Any) -> list[_Work]:
            original(*args, **kwargs)
            handles, tracer.started = tracer.started, []
            return [_Work(tracer, handles)] if handles else []

        return start

    with (
        mock.patch.object(schedules, "_batch_p2p", wrap(schedules._batch_p2p)),
        mock.patch.object(dist, "batch_isend_irecv", wrap(dist.batch_isend_irecv)),
        # one process stands for all pipeline ranks in turn, so that a neighbour may have its own number
        mock.patch.object(dist.distributed_c10d, "_check_not_self_rank", lambda *args: None),
    ):
        yield


def prepare(tracer: Tracer, schedule: Any, config: TrainConfig, keep_outputs: bool, pp_rank: int) -> None:
    """Tell the stages their shapes, which they would learn from each other, and mark their actions.

    ``keep_outputs``: every stage keeps the outputs of all microbatches until the step ends, as torch did before
    pull request 153383.
    """
    stages = getattr(schedule, "_stages", None) or [schedule._stage]
    schedule._warmup_p2p = lambda *args, **kwargs: None
    schedule.rank = pp_rank
    step = schedule.step

    def finish(*args: Any, **kwargs: Any) -> Any:
        out = step(*args, **kwargs)
        tracer.mark("finish")
        tracer.backward_seen = True
        return out

    schedule.step = finish
    for slot, stage in enumerate(stages):
        stage._inference_mode, stage.group_rank = InferenceMode.STATIC, pp_rank
        hidden = _hidden(config)
        stage._user_meta.inputs = extract_tensor_metas((_tokens(config) if stage.is_first else hidden,))
        stage._user_meta.outputs = extract_tensor_metas((_logits(config) if stage.is_last else hidden,))
        _mark(tracer, stage, "forward_one_chunk", "F", slot, keep_outputs)
        _mark(tracer, stage, "backward_one_chunk", "B", slot)
        _mark(tracer, stage, "backward_weight_one_chunk", "W", slot)
        _mark(tracer, stage, "perform_reduce_grad", "REDUCE", slot)


def _mark(tracer: Tracer, stage: Any, method: str, name: str, slot: int, keep_outputs: bool = False) -> None:
    original = getattr(stage, method)

    def call(number: int, *args: Any, **kwargs: Any) -> Any:
        kind = "I" if name == "B" and not kwargs.get("full_backward", True) else name
        tracer.mark(f"{kind}:{slot}", 0 if name == "REDUCE" else number)
        out = original(number, *args, **kwargs)
        tracer.backward_seen = False  # what follows is another action, not yet the optimizer
        if keep_outputs:
            stage.output_chunks.append(out)
        return out

    setattr(stage, method, call)


def _rows(config: TrainConfig) -> tuple[int, int]:
    p = config.parallel
    return config.train.local_batch_size // p.microbatches, config.data.seq_len // p.cp


def _tokens(config: TrainConfig) -> torch.Tensor:
    return torch.empty(_rows(config), dtype=torch.int64, device="meta")


def _hidden(config: TrainConfig) -> torch.Tensor:
    """What a stage sends: [microbatch, T/CP, dim], the sequence cut over tp with sequence parallel."""
    batch, length = _rows(config)
    p = config.parallel
    length //= p.tp if p.sequence_parallel else 1
    dtype = DTYPES[config.precision.param]
    return torch.empty(batch, length, config.model.dim, dtype=dtype, device="meta", requires_grad=True)


def _logits(config: TrainConfig) -> torch.Tensor:
    """Only the shape's place is needed: the last stage sends nothing forward."""
    return torch.empty(*_rows(config), 1, dtype=DTYPES[config.precision.param], device="meta", requires_grad=True)


def action_table(schedule: Any) -> dict[int, list[str]]:
    """pp rank -> its compute actions as text (``3F0``, ``0B1``), from torch's own tables."""
    return {rank: [text for text in row if text] for rank, row in slot_table(schedule).items()}


def slot_table(schedule: Any) -> dict[int, list[str]]:
    """As :func:`action_table`, with empty text for the slots in which a rank waits."""
    order = getattr(schedule, "pipeline_order", None) or schedule._get_pipeline_order()
    rows: dict[int, list[str]] = {}
    for rank, row in order.items():
        slots: list[Any] = [a for action in row for a in (getattr(action, "sub_actions", None) or (action,))]
        rows[rank] = ["" if a is None else str(a) for a in slots if a is None or a.is_compute_op]
    if isinstance(schedule, schedules.Schedule1F1B):
        rows = {rank: _renumber(row) for rank, row in rows.items()}
    return rows


def _renumber(row: list[str]) -> list[str]:
    """1F1B takes microbatches in order; torch's table for it (which it does not run) counts the last rank's from 1."""
    counts: dict[str, int] = {}
    out: list[str] = []
    for text in row:
        if not text:
            out.append(text)
            continue
        stage, kind, _ = parse(text)
        out.append(f"{stage}{kind}{counts.get(kind, 0)}")
        counts[kind] = counts.get(kind, 0) + 1
    return out
