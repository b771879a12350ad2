"""The training loop: set up a layout, run steps, leave a line of JSON a step."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor.parallel import loss_parallel

from trainer_core.config import TrainConfig
from trainer_core.data import IGNORE_INDEX, Corpus
from trainer_core.loss import Loss
from trainer_core.mesh import Mesh
from trainer_core.model import Decoder, init_weights
from trainer_core.optim import build_optimizer, clip_grad_norm, lr_at, set_lr
from trainer_core.parallel import parallelize
from trainer_core.parallel.context import positions
from trainer_core.parallel.float8 import precompute_scales
from trainer_core.parallel.pipeline import build_schedule

Batch = list[tuple[Tensor, Tensor]]
"""(tokens, labels), each int64 [LBS, T], of every accumulation pass."""


@dataclass
class Trainer:
    """One rank of a run. ``stages``: stage number -> model; ``schedule`` is None without PP."""

    config: TrainConfig
    mesh: Mesh
    device: torch.device
    stages: dict[int, Decoder]
    loss: Loss
    optimizer: torch.optim.Optimizer
    schedule: Any = None

    @property
    def parts(self) -> list[nn.Module]:
        return list(self.stages.values())

    @property
    def owns_loss(self) -> bool:
        return self.config.parallel.stages - 1 in self.stages

    def train_step(self, step: int, batch: Batch) -> dict[str, Any]:
        """Forward, backward, clip, update. ``step`` counts from 1. Returns, without waiting for the device, loss (global
        mean in nats; None on ranks that do not own it), grad_norm (global), tokens (that count, all ranks) and lr."""
        lr = lr_at(self.config, step)
        set_lr(self.optimizer, lr)
        self.optimizer.zero_grad()
        loss, tokens = self.forward_backward(batch)
        norm = clip_grad_norm(self.parts, self.config.optim.clip_norm, self.mesh.group("pp"))
        self.optimizer.step()
        if self.config.precision.float8_precompute_scale:
            for part in self.parts:
                precompute_scales(part)
        if self.owns_loss:
            dist.all_reduce(loss, group=self.mesh.loss_group)
        return {"loss": loss if self.owns_loss else None, "grad_norm": norm, "lr": lr, "tokens": tokens}

    def forward_backward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Gradients of the global mean loss into ``.grad``; returns this rank's share of it and the global token count."""
        shards = [self.shard(*pair) for pair in batch]
        tokens = torch.stack([(labels != IGNORE_INDEX).sum() for _, labels in shards]).sum()
        dist.all_reduce(tokens, group=self.mesh.loss_group)
        self.loss.tokens = tokens.clamp(min=1)
        total = torch.zeros((), device=self.device)
        for i, (inputs, labels) in enumerate(shards):
            with self.loss_context():
                total += self._pass(inputs, labels, last=i == len(shards) - 1)
        return total, tokens

    def _pass(self, inputs: Tensor, labels: Tensor, last: bool) -> Tensor:
        """One accumulation pass over [LBS, T/CP]; returns the detached loss share (0 where it is not known)."""
        if self.schedule is None:
            (model,) = self.parts
            if isinstance(model, FSDPModule):
                model.set_requires_gradient_sync(last)
                model.set_is_last_backward(last)
            loss = self.loss(model(inputs), labels)
            loss.backward()
            return loss.detach()
        losses: list[Tensor] = []
        args = (inputs,) if 0 in self.stages else ()
        self.schedule.step(*args, target=labels if self.owns_loss else None, losses=losses, return_outputs=False)
        return torch.stack(losses).sum().detach() if self.owns_loss else torch.zeros((), device=self.device)

    def shard(self, tokens: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """This cp rank's positions of [LBS, T], on the device."""
        if self.config.parallel.cp > 1:
            here = positions(self.config.data.seq_len, self.mesh.rank("cp"), self.config.parallel)
            tokens, labels = tokens[:, here], labels[:, here]
        return tokens.to(self.device), labels.to(self.device)

    @contextlib.contextmanager
    def loss_context(self) -> Iterator[None]:
        """Logits stay cut over tp in the loss and in its backward."""
        p = self.config.parallel
        with loss_parallel() if p.tp > 1 and p.loss_parallel else contextlib.nullcontext():
            yield


def setup(config: TrainConfig, device: torch.device, init: bool = True) -> Trainer:
    """Build this rank of a resolved ``config``; the default process group spans the world.

    ``init=False`` leaves parameters on the meta device: the simulator materialises them in its own way.
    """
    mesh = Mesh.build(config.parallel, device.type)
    stages = parallelize(config, mesh)
    if init:
        materialize(config, mesh, stages, device)
    loss = Loss(config, stages)
    schedule = build_schedule(config, stages, mesh, device, loss) if config.parallel.pp > 1 else None
    optimizer = build_optimizer(config.optim, list(stages.values()))
    return Trainer(config, mesh, device, stages, loss, optimizer, schedule)


def materialize(config: TrainConfig, mesh: Mesh, stages: dict[int, Decoder], device: torch.device) -> None:
    """Allocate this rank's parameters, fill them with the seed's initial values, and set the rotary table."""
    here = positions(config.data.seq_len, mesh.rank("cp"), config.parallel).to(device)
    for model in stages.values():
        model.to_empty(device=device)
        init_weights(model, config.model, config.train.seed)
        model.set_positions(here)

