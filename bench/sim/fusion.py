"""Which ops of a compiled graph become one kernel, and what that kernel moves: Inductor's rules, stated. No torch.

The input is a graph as AOTAutograd's partitioner leaves it (forward or backward; dead code and common subexpressions
gone); :func:`fuse` returns its kernels. The rules, in Inductor's terms:

1. *Extern*: GEMMs, attention, collectives and ops on complex numbers are kernels of their own. What they read must lie
   in memory, and so must what they write.
2. *Inlining* (``mark_reuse``): a pointwise result that no extern kernel reads and that does not leave the graph is
   computed again in each reader, unless that takes more than four buffers: then it is realized.
3. *Vertical fusion*: a node joins its producer's kernel if both run over the same iteration space. The space of a
   pointwise op is its output, of a reduction its input; a pointwise op over a reduction's result runs at the end of it.
4. *Horizontal fusion*: so do nodes that read one buffer over the same space.
5. *Lookups*: a gather reads, in the kernel that needs it, only the elements it looks up; scattering a number into a
   constant is a comparison with the index (``scatter_upon_const_tensor``). A compiled cross entropy rests on both.
6. *Barriers*: the result of a reduction to one value (Float8's amax) is complete only when its kernel ends; two
   reductions over different dimensions do not share a kernel; no fusion may make a cycle.

A kernel reads each outside buffer once and writes only what others read or what leaves the graph: what is neither
costs no traffic. Left out: caches that catch a re-read, tilings that do not coalesce (transposed copies), and
Inductor's limits on the size of a fused kernel.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace

from bench.sim.events import DTYPE_BYTES, Collective, Op, Tensor

FUSIBLE = ("pointwise", "reduction", "copy")
INLINE_READS = 4
"""Inductor's realize_reads_threshold."""
LOOKUPS = ("gather",)
COMPLEX_BYTES = {"complex64": 8, "complex128": 16}


@dataclass(frozen=True, slots=True)
class Node:
    """One op of the graph. ``reads`` and ``writes`` number the values behind ``op.inputs`` and ``op.outputs``, one for
    one; a view has the number of what it views. A Collective's tensors are only its value numbers."""

    op: Op | Collective
    reads: tuple[int, ...]
    writes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Kernel:
    """One launch of the compiled graph: ``members`` are positions in the input; inlined ops are in each reader."""

    op: Op | Collective
    members: tuple[int, ...]


@dataclass(slots=True)
class _Group:
    """A kernel in the making. ``outer`` is the size of its reductions' result (None: none), ``late`` the values that
    exist only when a reduction to one value is complete."""

    total: int
    outer: int | None
    members: list[int]
    before: set[int] = field(default_factory=set)
    produced: set[int] = field(default_factory=set)
    read: set[int] = field(default_factory=set)
    late: set[int] = field(default_factory=set)


def nbytes(tensor: Tensor) -> int:
    shape, dtype = tensor
    return math.prod(shape) * (DTYPE_BYTES[dtype] if dtype in DTYPE_BYTES else COMPLEX_BYTES[dtype])


def fuse(nodes: Sequence[Node], keep: Collection[int]) -> list[Kernel]:
    """The kernels of a compiled graph, in an order in which they can run.

    ``keep`` are the values that leave the graph: results, what is saved for backward, and inputs changed in place.
    """
    kept = set(keep)
    nodes = _constant_scatters(nodes)
    reads = _inline(nodes, kept)
    groups = _group(nodes, reads)
    readers: dict[int, set[int]] = defaultdict(set)
    for number, group in enumerate(groups):
        for value in group.read:
            readers[value].add(number)
    full = _full_bytes(nodes)
    kernels = []
    for number in _order(groups):
        group = groups[number]
        members = tuple(sorted(set(group.members)))
        if len(members) == 1 and not _fusible(nodes[members[0]].op):
            kernels.append(Kernel(nodes[members[0]].op, members))
            continue
        written = {v for v in group.produced if v in kept or readers[v] - {number}}
        kernels.append(Kernel(_kernel(nodes, reads, group, members, written, full), members))
    return kernels


def _fusible(op: Op | Collective) -> bool:
    return isinstance(op, Op) and (op.kind in FUSIBLE or op.name in LOOKUPS) and not any(
        dtype in COMPLEX_BYTES for _, dtype in (*op.inputs, *op.outputs))  # fmt: skip


def _constant_scatters(nodes: Sequence[Node]) -> list[Node]:
    """Rule 5: a scatter into a constant becomes a pointwise op over its index."""
    constants = {v for n in nodes if isinstance(n.op, Op) and n.op.name == "full" for v in n.writes}
    out = []
    for node in nodes:
        op = node.op
        if isinstance(op, Op) and op.name == "scatter" and len(node.reads) == 2 and node.reads[0] in constants:
            node = Node(replace(op, kind="pointwise", inputs=op.inputs[1:]), node.reads[1:], node.writes)
        out.append(node)
    return out


def _inline(nodes: Sequence[Node], kept: set[int]) -> dict[int, dict[int, int]]:
    """Rule 2: position of each node that stays -> {value it reads: bytes}, inlined producers seen through."""
    extern = {v for n in nodes if not _fusible(n.op) for v in n.reads}
    counts = Counter(v for n in nodes for v in n.writes)
    inlined: dict[int, dict[int, int]] = {}
    staying: dict[int, dict[int, int]] = {}
    for position, node in enumerate(nodes):
        own: dict[int, int] = {}
        sizes = [nbytes(t) for t in node.op.inputs] if isinstance(node.op, Op) else [0] * len(node.reads)
        looked_up = None
        if isinstance(node.op, Op) and node.op.name in LOOKUPS:
            looked_up = sum(map(nbytes, node.op.outputs))
        for value, size in zip(node.reads, sizes, strict=True):
            for source, amount in inlined.get(value, {value: size}).items():
                amount = amount if looked_up is None else min(amount, looked_up)
                own[source] = max(own.get(source, 0), amount)
        once = isinstance(node.op, Op) and node.op.kind != "reduction" and _fusible(node.op) and len(node.writes) == 1
        needed = set(node.writes) & (kept | extern)
        if once and len(own) <= INLINE_READS and not needed and counts[node.writes[0]] == 1:
            inlined[node.writes[0]] = own
        else:
            staying[position] = own
    return staying


def _space(op: Op) -> tuple[int, int | None]:
    """(size of the iteration space, size of a reduction's result or None)."""
    out = max((math.prod(shape) for shape, _ in op.outputs), default=0)
    if op.kind != "reduction":
        return out, None
    return max((math.prod(shape) for shape, _ in op.inputs), default=0), out


def _group(nodes: Sequence[Node], reads: dict[int, dict[int, int]]) -> list[_Group]:
    """Rules 3 to 5, greedily in program order: a node joins the newest kernel that may take it."""
    groups: list[_Group] = []
    producer: dict[int, int] = {}
    sharing: dict[int, list[int]] = defaultdict(list)
    for position, own in reads.items():
        node = nodes[position]
        makers = {producer[v] for v in own if v in producer}
        target = None
        if _fusible(node.op):
            assert isinstance(node.op, Op)
            candidates = sorted({*makers, *(g for v in own for g in sharing[v])}, reverse=True)
            target = next((g for g in candidates if _fits(node.op, set(own), groups[g], g in makers)
                           and not any(g in groups[m].before for m in makers if m != g)), None)  # fmt: skip
        if target is None:
            total, outer = _space(node.op) if _fusible(node.op) and isinstance(node.op, Op) else (-1, None)
            groups.append(_Group(total, outer, []))
            target = len(groups) - 1
        _join(groups, target, position, node, own, makers)
        for value in node.writes:
            producer[value] = target
        if _fusible(node.op):
            for value in own:
                sharing[value].append(target)
    return groups


def _fits(op: Op, own: set[int], group: _Group, vertical: bool) -> bool:
    if group.total < 0 or own & group.late:
        return False
    total, outer = _space(op)
    if outer is not None:
        return total == group.total and group.outer in (None, outer)
    return total == group.total or (vertical and total == group.outer)


def _join(groups: list[_Group], target: int, position: int, node: Node, own: dict[int, int], makers: set[int]) -> None:
    group = groups[target]
    group.members.append(position)
    group.read |= own.keys() - group.produced
    group.produced |= set(node.writes)
    if isinstance(node.op, Op) and _fusible(node.op):
        outer = _space(node.op)[1]
        group.outer = outer if group.outer is None else group.outer
        if outer == 1 and group.total > 1:
            group.late |= set(node.writes)
    new = {m for m in makers if m != target}
    new |= {b for m in new for b in groups[m].before}
    if new - group.before:
        group.before |= new
        for other in groups:
            if target in other.before:
                other.before |= new


def _order(groups: list[_Group]) -> list[int]:
    """Kernels by their last member, except that one that others wait for comes first."""
    done: list[int] = []
    seen: set[int] = set()

    def visit(number: int) -> None:
        if number not in seen:
            seen.add(number)
            for other in sorted(groups[number].before):
                visit(other)
            done.append(number)

    for number in sorted(range(len(groups)), key=lambda g: max(groups[g].members)):
        visit(number)
    return done


def _full_bytes(nodes: Sequence[Node]) -> dict[int, int]:
    """Bytes of each value that the graph writes: the most that reading it can cost."""
    full: dict[int, int] = {}
    for node in nodes:
        if isinstance(node.op, Op):
            for value, tensor in zip(node.writes, node.op.outputs, strict=True):
                full[value] = max(full.get(value, 0), nbytes(tensor))
    return full


def _kernel(nodes: Sequence[Node], reads: dict[int, dict[int, int]], group: _Group, members: tuple[int, ...],
            written: set[int], full: dict[int, int]) -> Op:  # fmt: skip
    """The fused kernel: it reads each outside value once, and writes what others need."""
    ops = [op for i in members if isinstance(op := nodes[i].op, Op)]
    read: dict[int, int] = {}
    for i in members:
        for value, size in reads[i].items():
            if value not in group.produced:
                read[value] = min(max(read.get(value, 0), size), full.get(value, size))
    outputs = tuple(t for i, op in zip(members, ops, strict=True)
                    for v, t in zip(nodes[i].writes, op.outputs, strict=True) if v in written)  # fmt: skip
    reduction = any(op.kind == "reduction" for op in ops)
    last = ops[-1]
    return replace(
        last,
        name="fused_reduction" if reduction else "fused_pointwise",
        kind="reduction" if reduction else "pointwise",
        inputs=tuple(t for op in ops for t in op.inputs),
        outputs=outputs,
        flops=0.0,
        bytes_read=float(sum(read.values())),
        bytes_written=float(sum(full[v] for v in written)),
        dims=(),
        parts=tuple(op.name for op in ops),
        # A reduction to few values is split in two launches so that it fills the device.
        launches=2 if group.late else 1,
        compiled=True,
    )
