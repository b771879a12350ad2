"""The training loop: set up a layout, run steps, leave a line of JSON a step."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor.parallel import loss_parallel

from trainer_core.checkpoint import load_latest, load_seed, save
from trainer_core.config import TrainConfig
from trainer_core.counts import float8_layers
from trainer_core.data import IGNORE_INDEX, Corpus, open_corpus
from trainer_core.evidence import CollectiveCounter, init_digest, local_parameter_bytes
from trainer_core.loss import Loss
from trainer_core.mesh import Mesh
from trainer_core.metrics import CompileCounter, GpuSampler, MemoryMeter, RankWriter, StepRecord
from trainer_core.model import Decoder, init_weights
from trainer_core.optim import build_optimizer, clip_grad_norm, lr_at, reduce_partial_gradients, set_lr
from trainer_core.parallel import parallelize
from trainer_core.parallel.compile import fused_async_tp
from trainer_core.parallel.context import balanced_cores, positions
from trainer_core.parallel.float8 import converted, precompute_scales
from trainer_core.parallel.fsdp import reduce_dtype
from trainer_core.parallel.pipeline import actions_digest, build_schedule
from trainer_core.profile import Profiler

CHECKPOINTS = "checkpoints"
PROFILED_STEPS = 3
"""How many of the last steps a profile covers."""

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
        """Forward, backward, clip, update. ``step`` counts from 1.

        Returns, without waiting for the device, loss (global mean in nats; None on ranks that do not own it), grad_norm
        (global), tokens (that count, all ranks) and lr.
        """
        lr = lr_at(self.config, step)
        set_lr(self.optimizer, lr)
        self.optimizer.zero_grad()
        loss, tokens = self.forward_backward(batch)
        reduce_partial_gradients(self.parts)
        norm = clip_grad_norm(self.parts, self.config.optim.clip_norm, self.mesh.group("pp"))
        self.optimizer.step()
        if self.config.precision.float8_precompute_scale:
            for part in self.parts:
                precompute_scales(part)
        if self.owns_loss:
            dist.all_reduce(loss, group=self.mesh.loss_group)
        return {"loss": loss if self.owns_loss else None, "grad_norm": norm, "lr": lr, "tokens": tokens}

    def forward_backward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Gradients of the global mean loss into ``.grad``; this rank's share of it and the global token count."""
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

    def evidence(self) -> dict[str, Any]:
        """What is really there on this rank, read off the modules; only the skipped Float8 layers and the resolved
        reshard policy are the plan's."""
        (rope, *_) = (part.rope for part in self.stages.values())
        return {
            "float8_converted": sorted(name for part in self.parts for name in converted(part)),
            "float8_skipped": float8_layers(self.config)["skipped"],
            "async_tp_ops": fused_async_tp(),
            "cp_balanced": balanced_cores(self.parts),
            "reduce_dtype": reduce_dtype(self.parts),
            "reshard_after_forward": self.config.parallel.reshard,
            "pp_actions_digest": actions_digest(self.schedule),
            "layout": {
                "parameter_bytes": local_parameter_bytes(self.parts),
                "attention_sequence": len(rope),
                "layers": [int(i) for part in self.stages.values() for i in part.layers],
            },
        }  # fmt: skip

    @contextlib.contextmanager
    def loss_context(self) -> Iterator[None]:
        """Logits stay cut over tp in the loss and in its backward."""
        p = self.config.parallel
        with loss_parallel() if p.tp > 1 and p.loss_parallel else contextlib.nullcontext():
            yield


def setup(config: TrainConfig, device: torch.device, init: bool = True, program: str | None = None) -> Trainer:
    """Build this rank of a resolved ``config``; the default process group spans the world.

    The simulator passes ``init=False``, which leaves parameters on the meta device, and the device kind whose
    ``program`` is wanted (default: the device's own).
    """
    mesh = Mesh.build(config.parallel, device.type, program)
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


def run(config: TrainConfig, folder: Path, rank_log: RankWriter, device: torch.device, profile: bool = False) -> bool:
    """Train a resolved ``config`` from its newest checkpoint, or from its start, to its last step.

    Every step is a line of ``rank_log``. Returns False where a signal ended the run early, after a checkpoint.
    """
    interrupted = _listen()
    rank_log.write("phase", name="data")
    corpus = open_corpus(config)
    rank_log.write("phase", name="setup")
    trainer = setup(config, device)
    done, digest = _restore(trainer, corpus, folder, rank_log)
    first = done + 1
    warm_until, evidence_at = done + config.train.warmup_steps, min(done + 2, config.train.steps)
    end = config.train.steps + 1
    profiler = Profiler(folder, dist.get_rank(), range(max(first, end - PROFILED_STEPS), end if profile else 0), device)
    memory, compiles, counter = MemoryMeter(device), CompileCounter(), CollectiveCounter(trainer.mesh)

    def checkpoint(step: int) -> None:
        save(folder / CHECKPOINTS, step, trainer.parts, trainer.optimizer, {"data_digest": corpus.digest})

    with GpuSampler(device) as gpu:
        for step in range(first, end):
            # also lines the ranks up, so that a step's time is not another's delay
            if _agree(interrupted.is_set(), device):
                checkpoint(step - 1)
                rank_log.write("interrupted", step=step - 1)
                return False
            watch = counter if step == evidence_at else contextlib.nullcontext()
            with profiler.step(step) as profiled, watch:
                start = time.perf_counter()
                result = trainer.train_step(step, corpus.batches(step, trainer.mesh.dp_rank, config.parallel.dp))
                loss = None if result["loss"] is None else result["loss"].item()
                norm = float(result["grad_norm"])
                elapsed = time.perf_counter() - start
            new_graphs, again = compiles.take()
            excluded = (
                "profile" if profiled
                else "warmup" if step <= warm_until
                else "recompile" if new_graphs or again
                else "evidence" if step == evidence_at
                else None
            )  # fmt: skip
            rank_log.step(
                StepRecord(step, loss, norm, result["lr"], int(result["tokens"]), elapsed, **memory.read(),
                           recompiles=again, excluded=excluded)
            )  # fmt: skip
            if config.checkpoint.every and step % config.checkpoint.every == 0:
                rank_log.write("phase", name="checkpoint")
                checkpoint(step)
    evidence = trainer.evidence() | compiles.evidence() | {
        "data_digest": corpus.digest, "init_digest": digest, "collectives": counter.plain(), "gpu": gpu.summary(),
        "unigram_entropy": corpus.unigram_entropy,
    }  # fmt: skip
    rank_log.write("evidence", evidence=evidence)
    rank_log.write("phase", name="teardown")
    return True


def _restore(trainer: Trainer, corpus: Corpus, folder: Path, rank_log: RankWriter) -> tuple[int, str]:
    """The step to go on from (0: the start) and the digest of the initial values."""
    config = trainer.config
    if config.train.init_from:
        load_seed(Path(config.train.init_from), trainer.parts)
    digest = init_digest(trainer.parts, trainer.mesh)
    if not config.checkpoint.resume:
        return 0, digest
    step = load_latest(folder / CHECKPOINTS, trainer.parts, trainer.optimizer, {"data_digest": corpus.digest})
    if step:
        rank_log.write("resume", step=step)
    return step or 0, digest


def _listen() -> threading.Event:
    """An event that SIGTERM or SIGUSR2 sets: time or place on this machine is about to end."""
    event = threading.Event()
    for number in (signal.SIGTERM, signal.SIGUSR2):
        signal.signal(number, lambda *_: event.set())
    return event


def _agree(flag: bool, device: torch.device) -> bool:
    """Whether any rank's flag is up."""
    value = torch.tensor(int(flag), device=device)
    dist.all_reduce(value, op=dist.ReduceOp.MAX)
    return bool(value.item())
