"""torch.compile under the tracer: the real graphs of dynamo and the AOT partitioner, run as the kernels they would be.

Dynamo, AOTAutograd and the min-cut partitioner do here what they do in training, with Inductor's decompositions: they
decide what is saved for the backward and what is computed again. Only Inductor's code generation is replaced: the nodes
of a graph are run one by one on fake tensors, and :func:`bench.sim.fusion.fuse` says which of them are one kernel. A
value that its kernel keeps to itself is never allocated.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, fx

from bench.sim import kernels
from bench.sim.events import Collective, Event, Op
from bench.sim.fusion import Kernel, Node, fuse
from bench.sim.tracer import Tracer
from trainer_core.config import TrainConfig

_GETITEM = "getitem"
_PASS_ON = ("wait_tensor", "view", "_unsafe_view", "reshape", "cat", "split", "getitem", "permute", "transpose", "t",
            "slice", "unsqueeze", "squeeze", "clone", "split_with_sizes")  # fmt: skip
"""What may stand between a collective and the GEMM that async TP joins it with."""


@contextlib.contextmanager
def as_kernels(tracer: Tracer, config: TrainConfig) -> Iterator[None]:
    """Let torch.compile use the tracer's executor instead of Inductor."""
    if not (config.compile.enable or config.compile.loss):
        yield
        return
    async_tp = config.parallel.async_tp == "on"
    from functorch.compile import min_cut_rematerialization_partition
    from torch._dynamo.backends.common import aot_autograd
    from torch._inductor.decomposition import select_decomp_table

    def compiler(graph: fx.GraphModule, _: Any) -> Callable[..., Any]:
        program = Program(graph, tracer, async_tp)
        tracer.trace.facts["graphs"] = tracer.trace.facts.get("graphs", 0) + 1
        tracer.trace.facts["async_tp_ops"] = tracer.trace.facts.get("async_tp_ops", 0) + len(program.decomposed)

        def run(args: list[Any]) -> Any:
            return program(args)

        run._boxed_call = True  # type: ignore[attr-defined]  # arguments come as a list that we may empty
        return run

    backend = aot_autograd(
        fw_compiler=compiler, bw_compiler=compiler, partition_fn=min_cut_rematerialization_partition,
        decompositions=select_decomp_table(),
    )  # fmt: skip

    def unseen(graph: fx.GraphModule, inputs: list[Any]) -> Any:
        tracer.paused += 1
        try:
            return backend(graph, inputs)
        finally:
            tracer.paused -= 1

    original = torch.compile
    torch._dynamo.reset()
    torch.compile = lambda model, **options: original(model, backend=unseen, **options)
    try:
        yield
    finally:
        torch.compile = original
        torch._dynamo.reset()


class Program:
    """One compiled graph: for every node whether it runs for all to see, inside a fused kernel, or is a view."""

    def __init__(self, graph: fx.GraphModule, tracer: Tracer, async_tp: bool):
        self.graph, self.tracer = graph, tracer
        self.nodes = list(graph.graph.nodes)
        self.values = _number_values(self.nodes)
        self.decomposed = _beside_gemms(self.nodes) if async_tp else set()
        entries, self.position = self._entries()
        self.kept = {v for v in map(self.values.get, _outputs(self.nodes)) if v is not None}
        self.kernels = fuse(entries, self.kept)
        self._plan(entries)

    def _entries(self) -> tuple[list[Node], dict[fx.Node, int]]:
        """The kernels' nodes for :func:`fuse`; views and getitem only pass their value on."""
        entries: list[Node] = []
        position: dict[fx.Node, int] = {}
        for node in self.nodes:
            if node.op != "call_function" or not _is_kernel(node):
                continue
            reads = _tensor_args(node)
            position[node] = len(entries)
            op = _op(node, reads)
            entries.append(Node(op, tuple(self.values[n] for n in reads), self._writes(node, op)))
        return entries, position

    def _writes(self, node: fx.Node, op: Op | Collective) -> tuple[int, ...]:
        """One value for each tensor that the node returns; those of a tuple that nobody takes get a new number."""
        if node in self.values:
            return (self.values[node],)
        taken = {u.args[1]: self.values[u] for u in _items(node) if u in self.values}
        outs = node.meta.get("val") or ()
        return tuple(taken.get(i, -1 - i - 100 * len(self.nodes) - 100 * self.nodes.index(node))
                     for i, out in enumerate(outs) if isinstance(out, Tensor))  # fmt: skip

    def _plan(self, entries: list[Node]) -> None:
        """Which values lie in memory, when each kernel is launched, and when each value is needed last."""
        kernel_of = {m: k for k, kernel in enumerate(self.kernels) for m in kernel.members}
        self.extern = {k for k, kernel in enumerate(self.kernels)
                       if len(kernel.members) == 1 and kernel.op is entries[kernel.members[0]].op}  # fmt: skip
        maker = {v: p for p, entry in enumerate(entries) for v in entry.writes}
        sources: dict[int, set[int]] = {}
        for value, p in maker.items():  # an inlined value stands for what it is made of
            if p not in kernel_of:
                sources[value] = set().union(*(sources.get(r, {r}) for r in entries[p].reads), set())
        readers: dict[int, set[int]] = defaultdict(set)
        for p, k in kernel_of.items():
            for value in set().union(*(sources.get(r, {r}) for r in entries[p].reads), set()):
                readers[value].add(k)
        made_by = lambda v: kernel_of.get(maker[v]) if v in maker else None
        self.stored = {v for v in maker if made_by(v) is not None
                       and (made_by(v) in self.extern or v in self.kept or readers[v] - {made_by(v)})}  # fmt: skip
        nodes = {p: node for node, p in self.position.items()}
        last = [max(kernel.members) for kernel in self.kernels]
        self.launch: dict[fx.Node, Kernel] = {
            nodes[last[k]]: kernel for k, kernel in enumerate(self.kernels) if k not in self.extern
        }
        self.alone = {nodes[self.kernels[k].members[0]] for k in self.extern}
        self._plan_frees(readers, [nodes[p] for p in last])

    def _plan_frees(self, readers: dict[int, set[int]], launched_at: list[fx.Node]) -> None:
        index = {node: i for i, node in enumerate(self.nodes)}
        until: dict[int, int] = {}
        for node in self.nodes:
            for n in node.all_input_nodes:
                if n in self.values:
                    until[self.values[n]] = max(until.get(self.values[n], 0), index[node])
        for value, ks in readers.items():
            until[value] = max([until.get(value, 0), *(index[launched_at[k]] for k in ks)])
        self.drop: dict[int, list[fx.Node]] = defaultdict(list)
        for node in self.nodes:
            if node in self.values:
                self.drop[max(until.get(self.values[node], 0), index[node])].append(node)

    def __call__(self, args: list[Any]) -> Any:
        """Run the graph. ``args`` is emptied, so that inputs die when they were needed last."""
        env: dict[fx.Node, Any] = {}
        inputs = iter(list(args))
        args.clear()
        compiled, self.tracer.compiled = self.tracer.compiled, True
        try:
            for i, node in enumerate(self.nodes):
                if node.op == "placeholder":
                    env[node] = next(inputs)
                elif node.op == "output":
                    return fx.node.map_arg(node.args[0], lambda n: env[n])
                elif node.op == "get_attr":
                    env[node] = getattr(self.graph, str(node.target))
                else:
                    self._run(node, env)
                for dead in self.drop.get(i, ()):
                    env.pop(dead, None)
        finally:
            self.tracer.compiled = compiled
        raise AssertionError("a graph without output")

    def _run(self, node: fx.Node, env: dict[fx.Node, Any]) -> None:
        args = fx.node.map_arg(node.args, lambda n: env[n])
        kwargs = fx.node.map_arg(node.kwargs, lambda n: env[n])
        tracer = self.tracer
        if node in self.alone:
            tracer.overlap = "async_tp" if node in self.decomposed else ""
            env[node] = node.target(*args, **kwargs)  # type: ignore[operator]
            tracer.overlap = ""
            return
        tracer.paused += 1
        try:
            env[node] = out = node.target(*args, **kwargs)  # type: ignore[operator]
        finally:
            tracer.paused -= 1
        if node in self.position and self.values.get(node) in self.stored:
            for t in kernels.tensors(out):
                tracer.follow(t)
        if node in self.launch:
            op = self.launch[node].op
            assert isinstance(op, Op)
            tracer.launch(op)


def _is_kernel(node: fx.Node) -> bool:
    func = node.target
    if not isinstance(func, torch._ops.OpOverload):
        return False
    return not (kernels.name_of(func) in kernels.NO_KERNEL or func.is_view)


def _tensor_args(node: fx.Node) -> list[fx.Node]:
    """Tensor arguments in order, with repetitions, as :func:`kernels.make_op` lists them."""
    out: list[fx.Node] = []
    fx.node.map_arg((node.args, node.kwargs), lambda n: out.append(n) if isinstance(n.meta.get("val"), Tensor) else None)
    return out


def _items(node: fx.Node) -> list[fx.Node]:
    return [u for u in node.users if getattr(u.target, "__name__", "") == _GETITEM]


def _number_values(nodes: list[fx.Node]) -> dict[fx.Node, int]:
    """A number for the memory behind every tensor node; a view has that of its base."""
    numbers: dict[fx.Node, int] = {}
    for node in nodes:
        val = node.meta.get("val")
        if not isinstance(val, Tensor) and node.op != "placeholder":
            continue
        base = None
        if node.op == "call_function" and not _is_kernel(node):
            source = node.args[0] if node.args else None
            if isinstance(source, fx.Node):
                base = numbers.get(source)
        numbers[node] = len(numbers) if base is None else base
    return numbers


def _outputs(nodes: list[fx.Node]) -> list[fx.Node]:
    out: list[fx.Node] = []
    fx.node.map_arg(nodes[-1].args, out.append)
    return out


def _op(node: fx.Node, reads: list[fx.Node]) -> Op | Collective:
    func: Any = node.target
    name = kernels.name_of(func)
    if func.namespace in ("_c10d_functional", "c10d", "_dtensor"):
        return Collective("all_reduce", 0.0, "", 1, 1)
    values = fx.node.map_arg((node.args, node.kwargs), lambda n: n.meta.get("val"))
    outs = list(kernels.tensors(node.meta.get("val")))
    mutates = tuple(i for i, a in enumerate(func._schema.arguments) if a.alias_info and a.alias_info.is_write)
    return kernels.make_op(name, values[0], values[1], outs, "fwd", "", mutates)


def _beside_gemms(nodes: list[fx.Node]) -> set[fx.Node]:
    """All-gathers whose result feeds a GEMM and reduce-scatters of a GEMM's result: what async TP decomposes."""
    out = set()
    for node in nodes:
        name = kernels.name_of(node.target) if isinstance(node.target, torch._ops.OpOverload) else ""
        if name == "all_gather_into_tensor" and _reaches(node, lambda n: n.users):
            out.add(node)
        elif name == "reduce_scatter_tensor" and _reaches(node, lambda n: n.all_input_nodes):
            out.add(node)
    return out


def _reaches(start: fx.Node, following: Callable[[fx.Node], Any]) -> bool:
    seen, todo = set(), list(following(start))
    while todo:
        node = todo.pop()
        target = node.target
        name = kernels.name_of(target) if isinstance(target, torch._ops.OpOverload) else getattr(target, "__name__", "")
        if name in kernels.GEMMS:
            return True
        if name in _PASS_ON and node not in seen:
            seen.add(node)
            todo += list(following(node))
    return False
