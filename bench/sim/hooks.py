"""What the tracer must be told besides dispatch: FSDP's buffers and streams, module paths, layers."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import torch
import torch.cpu
from torch import Tensor, nn
from torch.distributed.fsdp._fully_shard import _fsdp_param, _fsdp_param_group
from torch.distributed.tensor._sharding_prop import ShardingPropagator

from bench.sim.events import Event
from bench.sim.tracer import Tracer

_FSDP_STREAMS = {
    "all_gather_copy_in_stream": "fsdp_copy_in", "all_gather_stream": "fsdp_all_gather",
    "reduce_scatter_stream": "fsdp_reduce_scatter", "all_reduce_stream": "fsdp_all_reduce",
}  # fmt: skip


@contextlib.contextmanager
def hooks(tracer: Tracer) -> Iterator[None]:
    """Everything outside dispatch that the tracer must see, for the time of the block."""
    saved: list[tuple[Any, str, Any]] = []

    def patch(owner: Any, name: str, value: Any) -> None:
        saved.append((owner, name, getattr(owner, name)))
        setattr(owner, name, value)

    allocate, free = _fsdp_param.alloc_storage, _fsdp_param.free_storage
    for module in (_fsdp_param, _fsdp_param_group):
        patch(module, "alloc_storage", lambda t: tracer.resized(t, allocate, "comm"))
    patch(_fsdp_param, "free_storage", lambda t: tracer.resized(t, free, "comm"))

    # sharding propagation runs the op once more with global shapes, on no device
    propagate = ShardingPropagator._propagate_tensor_meta_non_cached

    def propagate_unseen(self: Any, *args: Any, **kwargs: Any) -> Any:
        tracer.paused += 1
        try:
            return propagate(self, *args, **kwargs)
        finally:
            tracer.paused -= 1

    patch(ShardingPropagator, "_propagate_tensor_meta_non_cached", propagate_unseen)

    context = _fsdp_param_group.FSDPCommContext
    lazy_init = context.lazy_init

    def name_streams(self: Any, device: torch.device) -> None:
        lazy_init(self, device)
        for attribute, name in _FSDP_STREAMS.items():
            tracer._stream_numbers[id(getattr(self, attribute))] = tracer.stream_number(name)

    patch(context, "lazy_init", name_streams)
    _patch_streams(tracer, patch)
    try:
        yield
    finally:
        for owner, name, value in reversed(saved):
            setattr(owner, name, value)


def _patch_streams(tracer: Tracer, patch: Callable[[Any, str, Any], None]) -> None:
    """torch.cpu's streams and events do nothing; these write down what they would wait for."""

    def number(stream: Any) -> int:
        return tracer._stream_numbers.get(id(stream), 0)

    def record_event(self: Any, event: Any = None) -> Any:
        event = torch.cpu.Event() if event is None else event
        event.handle = tracer.record(number(self))
        return event

    def record(self: Any, stream: Any = None) -> None:
        self.handle = tracer.record(number(torch.cpu._current_stream if stream is None else stream))

    def wait_event(self: Any, event: Any) -> None:
        handle = getattr(event, "handle", None)
        if handle is not None:
            tracer.add(Event.WAIT, handle, number(self))

    def wait_stream(self: Any, stream: Any) -> None:
        if number(self) != number(stream):
            tracer.add(Event.WAIT, tracer.record(number(stream)), number(self))

    patch(torch.cpu.Stream, "record_event", record_event)
    patch(torch.cpu.Stream, "wait_event", wait_event)
    patch(torch.cpu.Stream, "wait_stream", wait_stream)
    patch(torch.cpu.Event, "record", record)


def follow_modules(tracer: Tracer, model: nn.Module, skip: str = "") -> None:
    """Keep the path of the module that runs its forward. ``skip``: a prefix whose submodules are left alone."""
    for name, module in model.named_modules():
        if skip and name.startswith(skip):
            continue
        path = re.sub(r"\._(checkpoint_wrapped_module|orig_mod)", "", name)
        path = re.sub(r"layers\.\d+", "layers.*", path) or "model"
        module.register_forward_pre_hook(lambda m, a, path=path: tracer.modules.append(path), prepend=True)
        module.register_forward_hook(lambda m, a, out: _pop(tracer.modules), always_call=True)


def _pop(stack: list[str]) -> None:
    stack.pop()


def follow_layers(tracer: Tracer, blocks: list[nn.Module], numbers: list[int]) -> None:
    """Set ``tracer.layer`` to its number while a block's forward and backward run.

    A layer's backward begins when the gradient of its output arrives and ends when that of its input is done. The
    block's class is replaced, since a hook on a compiled block would become part of its graph.
    """
    for block, number in zip(blocks, numbers, strict=True):
        first, last = block is blocks[0], block is blocks[-1]

        def call(run: Callable[..., Any], *args: Any, number: int = number, first: bool = first,
                 last: bool = last) -> Any:  # fmt: skip
            tracer.enter_layer(number)
            tracer.modules.append("layers.*")
            if first:
                _on_gradient(args[0], tracer.leave_layers)
            out = run(*args)
            tracer.modules.pop()
            _on_gradient(out, lambda: tracer.enter_layer(number))
            if last:
                tracer.leave_layers()
            return out

        block.__dict__["follow"] = call
        block.__class__ = _followed(type(block))  # type: ignore[arg-type]


@cache
def _followed(cls: Any) -> Any:
    """A subclass whose calls go through the instance's ``follow``; one for each class, which dynamo compares."""

    def call(self: Any, *args: Any) -> Any:
        return self.follow(super(made[0], self).__call__, *args)

    made: list[Any] = [type(cls.__name__, (cls,), {"__call__": call})]
    return made[0]


def _on_gradient(t: Any, action: Callable[[], None]) -> None:
    if isinstance(t, Tensor) and t.requires_grad:
        t.register_hook(lambda grad: action())  # type: ignore[no-untyped-call]
