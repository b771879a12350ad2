"""Degrees to a DeviceMesh, and what each axis is for.

Outermost to innermost: ``pp`` (stages; least traffic), ``dp_replicate`` (copies), ``dp_shard`` (shards), ``cp``
(sequence), ``tp`` (matrices; most traffic, inside a node). FSDP shards over ``fsdp`` = dp_shard x cp, since ranks that
share a sequence hold the same parameters.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from trainer_core.config import ParallelConfig


@dataclass(frozen=True)
class Mesh:
    """The world mesh with every axis of degree above 1 (and dp_shard always), and this rank's place in it.

    ``flat`` holds the axes that are several in one: ``fsdp`` = dp_shard x cp, ``loss`` = dp_replicate x dp_shard x cp.
    ``program`` is the device kind whose code path runs: the simulator runs CUDA's on a machine that has none.
    """

    world: DeviceMesh
    config: ParallelConfig
    flat: dict[str, DeviceMesh]
    program: str

    @classmethod
    def build(cls, p: ParallelConfig, device_type: str, program: str | None = None) -> Mesh:
        axes = {axis: degree for axis, degree in p.degrees.items() if degree > 1 or axis == "dp_shard"}
        world = init_device_mesh(device_type, tuple(axes.values()), mesh_dim_names=tuple(axes))

        def flatten(name: str, *over: str) -> DeviceMesh:
            present = tuple(axis for axis in over if axis in axes)
            return world[present]._flatten(name) if len(present) > 1 else world[present]

        flat = {
            "fsdp": flatten("fsdp", "dp_shard", "cp"),
            "loss": flatten("loss", "dp_replicate", "dp_shard", "cp"),
        }
        return cls(world, p, flat, program or device_type)

    def axis(self, name: str) -> DeviceMesh | None:
        """The submesh of an axis, None where its degree is 1."""
        return self.world[name] if getattr(self.config, name) > 1 else None

    def submesh(self, name: str) -> DeviceMesh:
        """An axis of the world mesh or a flat one."""
        return self.flat[name] if name in self.flat else self.world[name]

    def rank(self, name: str) -> int:
        return self.world.get_local_rank(name) if getattr(self.config, name) > 1 else 0

    @property
    def dp_rank(self) -> int:
        """Which share of the global batch this rank reads."""
        return self.rank("dp_replicate") * self.config.dp_shard + self.rank("dp_shard")

    @property
    def fsdp(self) -> DeviceMesh:
        """What FSDP2 takes: [fsdp], or [dp_replicate, fsdp] for HSDP."""
        shards = self.flat["fsdp"]
        return DeviceMesh._concatenate([self.world["dp_replicate"], shards]) if self.axis("dp_replicate") else shards

    @property
    def loss_group(self) -> dist.ProcessGroup:
        """Ranks over which the loss and the token count are summed: dp x cp."""
        return self.flat["loss"].get_group()

    def group(self, name: str) -> dist.ProcessGroup | None:
        axis = self.axis(name)
        return axis.get_group() if axis is not None else None
