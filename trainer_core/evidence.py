"""Proof that a layout was real: what each rank holds, and which collectives a step really ran."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from torch.utils._python_dispatch import TorchDispatchMode

from trainer_core.mesh import Mesh
from trainer_core.model import clean_name

_KINDS = {
    "allgather_into_tensor_coalesced_": "all_gather", "_allgather_base_": "all_gather", "allgather_": "all_gather",
    "all_gather_into_tensor": "all_gather", "all_gather_into_tensor_out": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter", "reduce_scatter_tensor": "reduce_scatter",
    "allreduce_": "all_reduce", "all_reduce": "all_reduce", "all_reduce_": "all_reduce",
    "alltoall_base_": "all_to_all", "all_to_all_single": "all_to_all",
    "broadcast_": "broadcast", "broadcast": "broadcast", "send": "send", "recv_": "recv",
}  # fmt: skip
"""Name of the operator in the c10d and _c10d_functional libraries -> kind."""


class CollectiveCounter(TorchDispatchMode):
    """Counts the collectives of the code under it: axis -> kind -> [count, bytes].

    Bytes are those of the larger side on this rank: the gathered output, the unreduced input. Compiled graphs run
    compiled under it, and the collectives that they call are seen.
    """

    def __init__(self, mesh: Mesh):
        super().__init__()
        self.counts: dict[str, dict[str, list[int]]] = defaultdict(lambda: defaultdict(lambda: [0, 0]))
        self.axes = group_axes(mesh)

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        # without this Dynamo runs everything eagerly under the mode
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # wrapper subclasses come again as the local tensors and functional collectives they are made of
        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented
        out = func(*args, **(kwargs or {}))
        namespace, _, name = func._schema.name.partition("::")
        if namespace in ("c10d", "_c10d_functional") and name in _KINDS:
            self._count(_KINDS[name], args, out)
        return out

    def _count(self, kind: str, args: Any, out: Any) -> None:
        group = next((name for name in map(_group_name, args) if name), "")
        size = max(*map(_bytes, args), _bytes(out))
        entry = self.counts[self.axes.get(group, "other")][kind]
        entry[0] += 1
        entry[1] += size

    def plain(self) -> dict[str, dict[str, list[int]]]:
        return {
            axis: {kind: list(v) for kind, v in sorted(kinds.items())} for axis, kinds in sorted(self.counts.items())
        }


def group_axes(mesh: Mesh) -> dict[str, str]:
    """Process group name -> mesh axis, the finer name where two axes share a group."""
    names = ["loss", "fsdp", *(mesh.world.mesh_dim_names or ())]
    return {mesh.submesh(name).get_group().group_name: name for name in names}


def _group_name(arg: Any) -> str | None:
    if isinstance(arg, str) and arg and arg not in ("sum", "avg", "max", "min"):
        return arg
    if isinstance(arg, torch.ScriptObject):
        try:
            return dist.ProcessGroup.unbox(arg).group_name
        except (RuntimeError, TypeError):
            return None
    return getattr(arg, "group_name", None)


def _bytes(value: Any) -> int:
    if isinstance(value, Tensor):
        return value.numel() * value.element_size()
    if isinstance(value, (list, tuple)):
        return sum(_bytes(v) for v in value)
    return 0


def local_parameter_bytes(parts: list[nn.Module]) -> int:
    """Bytes of parameters that this rank stores."""
    return sum(_bytes(p.to_local() if isinstance(p, DTensor) else p) for part in parts for p in part.parameters())


@torch.no_grad()
def init_digest(parts: list[nn.Module], mesh: Mesh) -> str:
    """Digest of all parameter values that is the same at every layout: bits summed as integers, shard by shard."""
    groups: dict[Any, list[tuple[str, Tensor]]] = defaultdict(list)
    for part in parts:
        for name, p in part.named_parameters():
            key = (p.device_mesh, p.placements) if isinstance(p, DTensor) else None
            local = p.to_local() if isinstance(p, DTensor) else p
            groups[key].append((clean_name(name), local.float().contiguous().view(torch.int32).sum(dtype=torch.int64)))
    total = 0
    for key, entries in groups.items():
        sums = torch.stack([value for _, value in entries])
        if key is not None:
            for dim, placement in enumerate(key[1]):
                if isinstance(placement, (Shard, _StridedShard)):
                    dist.all_reduce(sums, group=key[0].get_group(dim))
        for (name, _), value in zip(entries, sums.tolist(), strict=True):
            total += int(hashlib.sha256(f"{name}:{value}".encode()).hexdigest()[:12], 16)
    combined = torch.tensor([total])
    if (pp := mesh.group("pp")) is not None:
        combined = combined.to(mesh.world.device_type)
        dist.all_reduce(combined, group=pp)
    return f"{combined.item():016x}"
