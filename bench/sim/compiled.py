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
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import Tensor, fx

from bench.sim import kernels
from bench.sim.events import Collective, Op
from bench.sim.fusion import Kernel, Node, fuse
from bench.sim.recipes import Recipe, Recording, signature
from bench.sim.tracer import Tracer
from trainer_core.config import TrainConfig

_GETITEM = "getitem"
_PASS_ON = ("wait_tensor", "view", "_unsafe_view", "reshape", "cat", "split", "getitem", "permute", "transpose", "t",
            "slice", "unsqueeze", "squeeze", "clone", "split_with_sizes")  # fmt: skip
"""What may stand between a collective and the GEMM that async TP joins it with."""


@dataclass
class Current:
    """The tracer of now. Graphs outlive it: the next pipeline rank runs those that the first one compiled."""

    now: Tracer = field(default_factory=Tracer)


@contextlib.contextmanager
def as_kernels(tracers: Current, config: TrainConfig) -> Iterator[None]:
    """Let torch.compile use the tracer's executor instead of Inductor."""
    if not (config.compile.enable or config.compile.loss):
        yield
        return
    async_tp = config.parallel.async_tp == "on"
    from functorch.compile import min_cut_rematerialization_partition
    from torch._dynamo.backends.common import aot_autograd
    from torch._inductor.decomposition import select_decomp_table

    def compiler(graph: fx.GraphModule, _: Any) -> Callable[..., Any]:
        program = Program(graph, async_tp)

        def run(args: list[Any]) -> Any:
            return program(args, tracers.now)

        run._boxed_call = True  # type: ignore[attr-defined]  # arguments come as a list that we may empty
        return run

    backend = aot_autograd(
        fw_compiler=compiler, bw_compiler=compiler, partition_fn=min_cut_rematerialization_partition,
        decompositions=select_decomp_table(),
    )  # fmt: skip

    def unseen(graph: fx.GraphModule, inputs: list[Any]) -> Any:
        return tracers.now.unseen(lambda: backend(graph, inputs))

    from torch._functorch import partitioners

    original: Any = torch.compile
    torch._dynamo.reset()
    with (
        mock.patch.object(torch, "compile", lambda model, **options: original(model, backend=unseen, **options)),
        # attention counts as random; without dropout there is no state that its recomputation would have to restore
        mock.patch.object(partitioners, "functionalize_rng_ops", lambda joint, fw, bw, symbols: (fw, bw)),
    ):
        try:
            yield
        finally:
            torch._dynamo.reset()


class Program:
    """One compiled graph: for every node whether it runs for all to see, inside a fused kernel, or is a view."""

    def __init__(self, graph: fx.GraphModule, async_tp: bool):
        self.graph = graph
        self.nodes = list(graph.graph.nodes)
        self.values = _number_values(self.nodes)
        self.decomposed = _beside_gemms(self.nodes) if async_tp else set()
        entries, self.position = self._entries()
        self.kept = {v for v in map(self.values.get, _outputs(self.nodes)) if v is not None}
        self.kernels = fuse(entries, self.kept)
        self._plan(entries)
        self.recipes: dict[Any, Recipe] = {}
        self.owner: Tracer | None = None
        inputs = [n for n in self.nodes if n.op == "placeholder"]
        owner = {self.values[n]: i for i, n in reversed(list(enumerate(inputs))) if n in self.values}
        number = {n: i for i, n in enumerate(inputs)}
        self.sources = [(number.get(n, owner.get(self.values.get(n, -1), -1)), n in number)
                        for n in _outputs(self.nodes)]  # fmt: skip

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
        made_by = {v: kernel_of[p] for v, p in maker.items() if p in kernel_of}
        self.stored = {v for v, k in made_by.items() if k in self.extern or v in self.kept or readers[v] - {k}}
        nodes = {p: node for node, p in self.position.items()}
        last = [max(kernel.members) for kernel in self.kernels]
        self.launch: dict[fx.Node, Kernel] = {
            nodes[last[k]]: kernel for k, kernel in enumerate(self.kernels) if k not in self.extern
        }
        self.alone = {nodes[self.kernels[k].members[0]] for k in self.extern}
        self.alone |= {node for node in self.nodes if _name(node) == "wait_tensor"}
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

    def __call__(self, args: list[Any], tracer: Tracer) -> Any:
        """Run the graph, or repeat what a run with the same inputs left. ``args`` is emptied, so that inputs die when
        they were needed last."""
        inputs = list(args)
        args.clear()
        if tracer is not self.owner:  # numbers in recipes are those of one trace
            self.owner, self.tracer, self.recipes = tracer, tracer, {}
            for fact, number in (("graphs", 1), ("async_tp_ops", len(self.decomposed))):
                tracer.trace.facts[fact] = tracer.trace.facts.get(fact, 0) + number
        key = (tuple(signature(x) for x in inputs), tracer.phase, tracer.stream)
        recipe = self.recipes.get(key)
        if recipe is not None:
            return recipe.repeat(inputs, tracer)
        recording = Recording(inputs, tracer)
        out = self._interpret(inputs, recording)
        if (recipe := recording.recipe(out, self.sources)) is not None:
            self.recipes[key] = recipe
        return out

    def _interpret(self, inputs: list[Any], recording: Recording) -> Any:
        env: dict[fx.Node, Any] = dict(zip((n for n in self.nodes if n.op == "placeholder"), inputs, strict=True))
        order = {node: i for i, node in enumerate(env)}
        inputs.clear()
        compiled, self.tracer.compiled = self.tracer.compiled, True
        try:
            for i, node in enumerate(self.nodes):
                if node.op == "output":
                    return fx.node.map_arg(node.args[0], lambda n: env[n])
                if node.op == "get_attr":
                    env[node] = getattr(self.graph, str(node.target))
                elif node.op != "placeholder":
                    self._run(node, env)
                for dead in self.drop.get(i, ()):
                    if dead in order:
                        recording.drops.append((len(self.tracer.trace.events), order[dead]))
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


def _name(node: fx.Node) -> str:
    """``mm`` for aten.mm, ``getitem`` for operator.getitem."""
    target = node.target
    return kernels.name_of(target) if isinstance(target, torch._ops.OpOverload) else getattr(target, "__name__", "")


def _is_kernel(node: fx.Node) -> bool:
    func = node.target
    if not isinstance(func, torch._ops.OpOverload):
        return False
    return not (kernels.name_of(func) in kernels.NO_KERNEL or func.is_view)


def _tensor_args(node: fx.Node) -> list[fx.Node]:
    """Tensor arguments in order, with repetitions, as :func:`kernels.make_op` lists them."""
    out: list[fx.Node] = []
    fx.node.map_arg((node.args, node.kwargs), out.append)
    return [n for n in out if isinstance(n.meta.get("val"), Tensor)]


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
    """What the graph returns, in order; a plain value stands as the output node itself."""
    returned: Any = nodes[-1].args[0]
    return [n if isinstance(n, fx.Node) else nodes[-1] for n in returned]


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
    gathers = {n for n in nodes if _name(n) == "all_gather_into_tensor" and _reaches(n, lambda m: m.users)}
    scatters = {n for n in nodes if _name(n) == "reduce_scatter_tensor" and _reaches(n, lambda m: m.all_input_nodes)}
    return gathers | scatters


def _reaches(start: fx.Node, following: Callable[[fx.Node], Any]) -> bool:
    seen, todo = set(), list(following(start))
    while todo:
        node = todo.pop()
        name = _name(node)
        if name in kernels.GEMMS:
            return True
        if name in _PASS_ON and node not in seen:
            seen.add(node)
            todo += list(following(node))
    return False
