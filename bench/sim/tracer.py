"""Records what a rank does under FakeTensorMode: kernels, collectives, streams and the life of every storage.

The tracer is a dispatch mode on *local* tensors: for wrapper subclasses (DTensor, Float8) it returns NotImplemented, so
that they come again as what they are made of. Storages are followed by weak references, FSDP's resized buffers by its
own two functions. Streams come from torch.cpu's stream objects, which FSDP2 uses on a CPU as it does on a GPU.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
import torch.cpu
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from bench.sim import kernels
from bench.sim.events import Category, Collective, CollectiveKind, Event, Op, Phase, Storage, Trace
from trainer_core.evidence import _KINDS as COLLECTIVE_KINDS
from trainer_core.evidence import _group_name as group_name


@dataclass(frozen=True)
class Group:
    """A process group as the cost model sees it."""

    axis: str
    size: int
    stride: int


def _to_one(splits: Any) -> bool:
    """Whether an all-to-all's split sizes send everything to a single rank: a permutation, as torch writes it."""
    return isinstance(splits, (list, tuple)) and len(splits) > 1 and sum(s != 0 for s in splits) == 1


class Tracer(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Everything between ``with tracer:`` goes into ``tracer.trace``.

    ``groups``: process group name -> :class:`Group`. ``layer`` and ``module`` are set by hooks on the model.
    """

    def __init__(self, groups: dict[str, Group] | None = None):
        super().__init__()  # type: ignore[no-untyped-call]
        self.trace = Trace()
        self.groups = groups or {}
        self.started: list[int] = []  # handles of sends and receives that no work stands for yet
        self.paused = 0
        self.layer = -1
        self.modules: list[str] = []
        self.phase_: Phase = "other"
        self.backward_seen = False
        self.compiled = False
        self.overlap: Literal["", "async_tp"] = ""
        self._table: dict[Any, int] = {}
        self._live: dict[int, int] = {}  # address of the C++ storage -> storage number
        self._refs: dict[int, weakref.ref[Any]] = {}
        self._pending: dict[int, int] = {}  # address of a functional collective's output -> handle
        self._stream_numbers: dict[int, int] = {}
        self._kept: list[Op] = []  # ops whose id() is a key of the table
        self.handles = 0
        self._info: dict[Any, tuple[str, str, tuple[int, ...], bool]] = {}
        self.storage_layer: list[int] = []
        self._made_in: list[Phase] = []
        self.after_layers = False
        self._undecided: list[tuple[int, int, int, int]] = []  # rows and storages whose layer the next op tells

    # events

    @property
    def stream(self) -> int:
        return self._stream_numbers.get(id(torch.cpu._current_stream), 0)

    def stream_number(self, name: str) -> int:
        """The number of a stream, new or known by its name."""
        if name not in self.trace.streams:
            self.trace.streams.append(name)
        return self.trace.streams.index(name)

    @property
    def phase(self) -> Phase:
        """Backward and recomputation are known by the autograd engine, the optimizer by what comes after a backward."""
        if torch._C._current_graph_task_id() != -1:
            self.backward_seen = True
            return "recompute" if self.modules else "bwd"
        if self.modules:
            self.backward_seen = False
            return "fwd"
        return "optim" if self.backward_seen else self.phase_

    def add(self, kind: Event, arg: int, stream: int | None = None, layer: int | None = None) -> None:
        self.trace.events.add(
            kind.value, arg, self.stream if stream is None else stream, self.layer if layer is None else layer
        )

    def mark(self, name: str, number: int = 0) -> None:
        self.trace.marks.append((name, number))
        self.add(Event.MARK, len(self.trace.marks) - 1, 0, -1)

    def record(self, stream: int, layer: int | None = None) -> int:
        self.handles += 1
        self.add(Event.RECORD, self.handles, stream, layer)
        return self.handles

    # storages

    def follow(self, t: Tensor, category: Category = "temp", layer: int | None = None, initial: bool = False) -> int:
        """The number of the tensor's storage; a new storage is an allocation of the current stream."""
        storage = t.untyped_storage()
        key = storage._cdata
        number = self._live.get(key)
        if number is None:
            number = self._allocate(key, storage.nbytes(), category, layer, initial)
            self._watch(key, storage)
        return number

    def _watch(self, key: int, storage: torch.UntypedStorage) -> None:
        def released(_: Any) -> None:
            self._refs.pop(key, None)
            self._free(key)

        self._refs[key] = weakref.ref(storage, released)

    def _allocate(self, key: int, size: int, category: Category, layer: int | None, initial: bool = False) -> int:
        number = len(self.trace.storages)
        layer = self.layer if layer is None else layer
        self.trace.storages.append(Storage(size, self.stream, self._category(category)))
        self.storage_layer.append(layer)
        self._made_in.append(self.phase)
        self._live[key] = number
        self.add(Event.ALLOC, number, None, layer)
        if initial:
            self.trace.initial.append(number)
        return number

    def _category(self, given: Category) -> Category:
        """What is known at once; :meth:`_free` and :meth:`close` know the rest by when it dies."""
        if given != "temp":
            return given
        if self.stream != 0:
            return "comm"
        return "logits" if self.layer < 0 and self.after_layers else "temp"

    def _settle(self, number: int, dies_in: Phase | None) -> None:
        """What lives from forward to backward is an activation; what outlives its step is a gradient or a state."""
        storage, made_in = self.trace.storages[number], self._made_in[number]
        if storage.category == "temp" and made_in in ("fwd", "other") and dies_in in ("bwd", "recompute"):
            storage.category = "activations"
        elif made_in in ("bwd", "recompute") and dies_in in ("optim", "fwd", "other", None):
            storage.category = "grads"
        elif storage.category == "temp" and made_in == "optim" and dies_in is None:
            storage.category = "optimizer"

    def close(self) -> None:
        """The trace is complete: what is still alive gets its category."""
        for number in self._live.values():
            self._settle(number, None)

    def _free(self, key: int) -> None:
        number = self._live.pop(key, None)
        if number is not None:
            self._settle(number, self.phase)
            layer = self.layer if self.layer >= 0 else self.storage_layer[number]
            self.add(Event.FREE, number, None, layer)

    def resized(self, t: Tensor, resize: Callable[[Tensor], None], category: Category) -> None:
        """FSDP's alloc_storage and free_storage: the same storage object gets or loses its memory."""
        storage = t.untyped_storage()
        key, before = storage._cdata, storage.nbytes()
        resize(t)
        after = storage.nbytes()
        if after == before and (after == 0 or key in self._live):
            return
        if key in self._live:
            self._free(key)
        if after:
            self._allocate(key, after, category, None)
            if key not in self._refs:
                self._watch(key, storage)

    def number(self, t: Tensor) -> int | None:
        """The number of a storage that is followed, else None."""
        return self._live.get(t.untyped_storage()._cdata)

    def allocate(self, like: Storage) -> int:
        """An allocation that no tensor stands for; :meth:`forget` ends it."""
        number = len(self.trace.storages)
        self.trace.storages.append(Storage(like.bytes, like.stream, like.category, like.sharded))
        self.storage_layer.append(self.layer)
        self._made_in.append(self.phase)
        self.add(Event.ALLOC, number)
        return number

    def forget(self, number: int, stream: int) -> None:
        self._settle(number, self.phase)
        self.add(Event.FREE, number, stream)

    def unseen(self, make: Callable[[], Any]) -> Any:
        """What ``make`` returns, without a trace of it."""
        self.paused += 1
        try:
            return make()
        finally:
            self.paused -= 1

    def is_sharded(self, t: Tensor) -> bool:
        number = self._live.get(t.untyped_storage()._cdata)
        return number is not None and self.trace.storages[number].sharded

    def layer_of(self, t: Tensor) -> int:
        number = self._live.get(t.untyped_storage()._cdata)
        return -1 if number is None else self.storage_layer[number]

    def leave_layers(self) -> None:
        """Outside of blocks again: behind the last one in forward, before the first one's input in backward."""
        self.layer = -1
        self.after_layers = torch._C._current_graph_task_id() == -1

    def enter_layer(self, number: int) -> None:
        self.layer, self.after_layers = number, False

    # dispatch

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let dynamo compile under this mode."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(t not in _PLAIN and not issubclass(t, _FAKE) for t in types):
            return NotImplemented
        if self.paused:
            return func(*args, **kwargs)
        namespace, name, mutates, silent = self._look_up(func)
        if name == "_local_scalar_dense":
            return 1.0 if args[0].is_floating_point() else 1
        out = func(*args, **kwargs)
        if namespace in ("c10d", "_c10d_functional", "_dtensor"):
            self._communicate(namespace, name, args, out)
        elif not silent:
            self._launch(name, args, kwargs, out, mutates)
        elif name.startswith(("empty", "new_empty")):
            self.follow(out, layer=self._label(args))
        return out

    def _look_up(self, func: Any) -> tuple[str, str, tuple[int, ...], bool]:
        info = self._info.get(func)
        if info is None:
            name = kernels.name_of(func)
            mutates = tuple(i for i, a in enumerate(func._schema.arguments) if a.alias_info and a.alias_info.is_write)
            silent = name in kernels.NO_KERNEL or (func.is_view and not mutates)
            info = self._info[func] = (func.namespace, name, mutates, silent)
        return info

    def _label(self, args: Any) -> int:
        """The layer of an event: the block that runs, or outside of blocks the owner of what is worked on."""
        if self.layer >= 0 or self.phase in ("fwd", "bwd", "recompute"):
            return self.layer
        return next((layer for t in kernels.tensors(args) if (layer := self.layer_of(t)) >= 0), -1)

    def _launch(self, name: str, args: Any, kwargs: Any, out: Any, mutates: tuple[int, ...]) -> None:
        if name.startswith(("_foreach", "_fused_adam")) and self.layer < 0:
            self._launch_pieces(name, args, kwargs, out, mutates)
            return
        outputs = list(kernels.tensors(out))
        self._emit(name, args, kwargs, outputs, mutates, self._label(args))

    def _launch_pieces(self, name: str, args: Any, kwargs: Any, out: Any, mutates: tuple[int, ...]) -> None:
        """A call over the tensors of all layers, cut by layer, so that deeper models repeat a piece."""
        outputs = list(out) if isinstance(out, (list, tuple)) else []
        lists = [a for a in args if isinstance(a, (list, tuple)) and a and isinstance(a[0], Tensor)]
        length = len(lists[0])
        labels = [self.layer_of(t) for t in lists[0]]
        start = 0
        for end in range(1, length + 1):
            if end < length and labels[end] == labels[start]:
                continue
            pieces = tuple(_piece(a, start, end, length) for a in args)
            named = {k: _piece(v, start, end, length) for k, v in kwargs.items()}
            self._emit(name, pieces, named, list(outputs[start:end]), mutates, labels[start])
            start = end

    def _emit(
        self, name: str, args: Any, kwargs: Any, outputs: list[Tensor], mutates: tuple[int, ...], layer: int
    ) -> None:
        phase, module = self.phase, self.modules[-1] if self.modules else ""
        inputs = [*kernels.tensors(args), *kernels.tensors(tuple(kwargs.values()))]
        start, first = len(self.trace.events), len(self.trace.storages)
        if inputs:
            self._decide(layer)
        sharded = self._works_on_shards(name, args, inputs)
        for t in outputs:
            number = self.follow(t, layer=layer)
            if sharded and not mutates and t.numel() > 1 and name != "all_gather_copy_in":
                self.trace.storages[number].sharded = True
        key = (
            name, tuple((tuple(t.shape), t.stride(), t.dtype) for t in inputs), len(args), phase, module, sharded,
            kernels.is_causal(name, args, kwargs) if name in kernels.FLASH else None, self.compiled,
        )  # fmt: skip
        index = self._table.get(key)
        if index is None:
            op = kernels.make_op(name, args, kwargs, outputs, phase, module, mutates, sharded)
            index = self._table[key] = self.intern(replace(op, compiled=self.compiled))
        self.add(Event.OP, index, None, layer)
        if not inputs and phase == "optim":
            self._undecided += [(start, len(self.trace.events), first, len(self.trace.storages))]

    def _works_on_shards(self, name: str, args: Any, inputs: list[Tensor]) -> bool:
        """Whether all that is read (scalars aside) are FSDP shards; a copy of shards makes its target one too."""
        read = inputs
        if name == "_foreach_copy_":
            read = list(kernels.tensors(args[1]))
        elif name == "all_gather_copy_in":
            read = list(kernels.tensors(args[0]))
        sharded = any(t.numel() > 1 for t in read) and all(t.numel() <= 1 or self.is_sharded(t) for t in read)
        if sharded and name == "_foreach_copy_" and self.stream != 0:
            for t in kernels.tensors(args[0]):
                self.trace.storages[self.follow(t)].sharded = True
        return sharded

    def _decide(self, layer: int) -> None:
        """A state made from nothing (a step counter) belongs to the parameter whose next state is made after it."""
        for start, end, first, last in self._undecided:
            for row in range(start, end):
                self.trace.events.layer[row] = layer
            self.storage_layer[first:last] = [layer] * (last - first)
        self._undecided = []

    def launch(self, op: Op) -> None:
        """A kernel that compiled code launches; its phase and module are those of now."""
        key = (id(op), self.phase, self.modules[-1] if self.modules else "")
        index = self._table.get(key)
        if index is None:
            index = self._table[key] = self.intern(replace(op, phase=key[1], module=key[2]))
            self._kept.append(op)
        self.add(Event.OP, index)

    def intern(self, entry: Op | Collective) -> int:
        index = self._table.get(entry)
        if index is None:
            index = self._table[entry] = len(self.trace.table)
            self.trace.table.append(entry)
        return index

    # communication

    def _communicate(self, namespace: str, name: str, args: Any, out: Any) -> None:
        if name == "wait_tensor":
            handle = self._pending.pop(args[0].untyped_storage()._cdata, None)
            if handle is not None:
                self.add(Event.WAIT, handle, 0)
            return
        kind: CollectiveKind | None = COLLECTIVE_KINDS.get(name, "all_to_all" if namespace == "_dtensor" else None)  # type: ignore[assignment]
        if kind == "all_to_all" and any(_to_one(a) for a in args):
            kind = "send"
        outputs = list(kernels.tensors(out))
        functional = namespace != "c10d"
        if functional:
            for t in outputs:
                self.follow(t, "comm")
        if kind is None:
            return
        inputs = list(kernels.tensors(args))
        group = self.group(args)
        if group.size > 1:
            sides = [list(kernels.tensors(a)) for a in (*args, out if functional else ())]
            size = max(sum(t.numel() * t.element_size() for t in side) for side in sides)
            dtype = kernels.describe(inputs[0])[1]
            module = self.modules[-1] if self.modules else ""
            index = self.intern(Collective(kind, size, group.axis, group.size, group.stride, dtype, module, self.phase,
                                           self.overlap))  # fmt: skip
            self._start(index, group, functional, kind, outputs)
        if kind == "reduce_scatter" and group.axis in ("fsdp", "dp_shard"):
            for t in inputs[:1]:  # the output comes first
                self.trace.storages[self.follow(t)].sharded = True

    def _start(self, index: int, group: Group, functional: bool, kind: str, outputs: list[Tensor]) -> None:
        """A collective on its group's stream. Calls of the c10d library run in the order of the caller's stream, where
        FSDP has streams of its own; functional ones and point-to-point calls are waited for later."""
        stream, here = self.stream, self.stream
        if functional or kind in ("send", "recv"):
            stream = self.stream_number(f"comm_{group.axis}" + (f"_{kind}" if kind in ("send", "recv") else ""))
            self.add(Event.WAIT, self.record(here), stream)
        self.add(Event.COLLECTIVE, index, stream)
        if stream != here:
            handle = self.record(stream)
            for t in outputs[:1] if functional else []:
                self._pending[t.untyped_storage()._cdata] = handle
            if not functional:
                self.started.append(handle)

    def group(self, args: Any) -> Group:
        name = next((n for n in map(group_name, args) if n), "")
        return self.groups.get(name) or Group("world", *_size_and_stride(name))


def _piece(value: Any, start: int, end: int, length: int) -> Any:
    """The part of a list argument of a foreach call; anything else as it is."""
    return value[start:end] if isinstance(value, (list, tuple)) and len(value) == length else value


def _size_and_stride(name: str) -> tuple[int, int]:
    import torch.distributed as dist

    for pg in dist.distributed_c10d._world.pg_map:
        if pg.group_name == name:
            ranks = dist.get_process_group_ranks(pg)
            return len(ranks), ranks[1] - ranks[0] if len(ranks) > 1 else 1
    return dist.get_world_size(), 1


_FAKE: tuple[type, ...] = (torch._subclasses.FakeTensor,)
_PLAIN = {Tensor, nn.Parameter}
