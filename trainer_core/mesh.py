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
    """The world mesh with every axis of degree above 1 (and dp_shard always), and this rank's place in it."""

    world: DeviceMesh
    config: ParallelConfig

    @classmethod
    def build(cls, p: ParallelConfig, device_type: str) -> Mesh:
        axes = {axis: degree for axis, degree in p.degrees.items() if degree > 1 or axis == "dp_shard"}
        world = init_device_mesh(device_type, tuple(axes.values()), mesh_dim_names=tuple(axes))
        if p.cp > 1:
            world["dp_shard", "cp"]._flatten("fsdp")
        if p.dp_replicate > 1 or p.cp > 1:
            names = tuple(axis for axis in ("dp_replicate", "dp_shard", "cp") if axis in axes)
            world[names]._flatten("loss")
        return cls(world, p)

    def axis(self, name: str) -> DeviceMesh | None:
        """The submesh of an axis, None where its degree is 1."""
        return self.world[name] if getattr(self.config, name) > 1 else None

    def rank(self, name: str) -> int:
        return self.world.get_local_rank(name) if getattr(self.config, name) > 1 else 0

    @property
    def dp_rank(self) -> int:
        """Which share of the global batch this rank reads."""
        return self.rank("dp_replicate") * self.config.dp_shard + self.rank("dp_shard")

    @property
    def fsdp(self) -> DeviceMesh:
        """What FSDP2 takes: [fsdp], or [dp_replicate, fsdp] for HSDP."""
        shard = "fsdp" if self.config.cp > 1 else "dp_shard"
        return self.world["dp_replicate", shard] if self.config.dp_replicate > 1 else self.world[shard]

    @property
    def loss_group(self) -> dist.ProcessGroup:
        """Ranks over which the loss and the token count are summed: dp x cp."""
        flat = self.config.dp_replicate > 1 or self.config.cp > 1
        return self.world["loss" if flat else "dp_shard"].get_group()

    def group(self, name: str) -> dist.ProcessGroup | None:
        axis = self.axis(name)
        return axis.get_group() if axis is not None else None
