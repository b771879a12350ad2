"""What ranks run in the distributed tests: a few steps of the trainer, whose losses, norms and gradients come back."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from trainer_core import train
from trainer_core.config import TrainConfig, from_dict, resolve
from trainer_core.data import open_corpus
from trainer_core.evidence import CollectiveCounter, init_digest
from trainer_core.model import clean_name
from trainer_core.parallel import context
from trainer_core.train import Trainer, setup

TINY: dict[str, dict[str, Any]] = {
    "model": {"dim": 64, "layers": 4, "heads": 8, "kv_heads": 4, "ffn_dim": 128, "vocab_size": 512},
    "precision": {"param": "fp32"},
    "data": {"corpus": "synthetic", "seq_len": 64},
    "train": {"steps": 10, "warmup_steps": 1, "global_batch_size": 8},
    "optim": {"lr_warmup_steps": 2},
}


def tiny(**sections: dict[str, Any]) -> TrainConfig:
    """TINY with ``sections`` on top; one accumulation pass unless local_batch_size is given."""
    data = {key: {**TINY.get(key, {}), **sections.get(key, {})} for key in {*TINY, *sections}}
    p = data.get("parallel", {})
    share = data["train"]["global_batch_size"] // (p.get("dp_shard", 1) * p.get("dp_replicate", 1))
    data["train"].setdefault("local_batch_size", share)
    return resolve(from_dict(TrainConfig, data))


def curve(config: TrainConfig, steps: int, fault: str | None = None, uneven: bool = False) -> dict[str, Any]:
    """Losses, norms, the first step's whole gradients by name, and the digest of the initial values."""
    undo = FAULTS[fault]() if fault else lambda: None
    try:
        trainer = setup(config, torch.device("cpu"))
        if fault == "detached embedding":
            detach_embedding(trainer)
        corpus = replace(open_corpus(config), uneven=uneven)
        out: dict[str, Any] = {"loss": [], "norm": [], "grads": {}, "init": init_digest(trainer.parts, trainer.mesh)}
        for step in range(1, steps + 1):
            result = trainer.train_step(step, corpus.batches(step, trainer.mesh.dp_rank, config.parallel.dp))
            out["loss"].append(None if result["loss"] is None else result["loss"].item())
            out["norm"].append(float(result["grad_norm"]))
            if step == 1:
                out["grads"] = whole_gradients(trainer)
        return out
    finally:
        undo()


def whole_gradients(trainer: Trainer) -> dict[str, torch.Tensor]:
    """Unsharded (clipped) gradients of this rank's stages; a parameter without one is missing."""
    grads = {}
    for part in trainer.parts:
        for name, p in part.named_parameters():
            if p.grad is not None:
                grads[clean_name(name)] = p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad.clone()
    return grads


def collectives(config: TrainConfig) -> dict[str, Any]:
    """The evidence of a rank, its collectives those of the second step."""
    trainer = setup(config, torch.device("cpu"))
    corpus = open_corpus(config)
    for step in (1, 2):
        counter = CollectiveCounter(trainer.mesh)
        with counter:
            trainer.train_step(step, corpus.batches(step, trainer.mesh.dp_rank, config.parallel.dp))
    return trainer.evidence() | {"collectives": counter.plain()}


def detach_embedding(trainer: Trainer) -> None:
    """Fault: the embedding gets no gradient, as from an AsyncCollectiveTensor that was waited for by hand."""
    for part in trainer.parts:
        if part.embed is not None:
            part.embed.register_forward_hook(lambda module, inputs, output: output.detach().requires_grad_())


def merge_nothing() -> Any:
    """Fault: context parallel keeps the last piece of attention instead of merging by log-sum-exp."""
    original = context._Accumulator.add

    def add(self: Any, k: torch.Tensor, v: torch.Tensor, pieces: list[context.Piece]) -> None:
        for q0, q1, k0, k1, causal in pieces:
            out, lse, self.state = context.flash(self.q[:, :, q0:q1], k[:, :, k0:k1], v[:, :, k0:k1], causal)
            self.out[:, :, q0:q1], self.lse[:, :, q0:q1] = out, lse

    context._Accumulator.add = add
    return lambda: setattr(context._Accumulator, "add", original)


def reduce_nothing() -> Any:
    """Fault: each tp rank takes its own part of the norms' gradients for the whole."""
    original = train.reduce_partial_gradients

    def relabel(parts: Any) -> None:
        for p in (p for part in parts for p in part.parameters()):
            if isinstance(p.grad, DTensor) and any(where.is_partial() for where in p.grad.placements):
                p.grad = DTensor.from_local(p.grad.to_local(), p.device_mesh, p.placements, run_check=False)

    train.reduce_partial_gradients = relabel
    return lambda: setattr(train, "reduce_partial_gradients", original)


def keep_donated_buffers() -> Any:
    """Fault: torch's guard against compiled blocks under a split backward is off, the gradients are wrong."""
    import torch._functorch.config as functorch

    functorch.donated_buffer = False
    return lambda: setattr(functorch, "donated_buffer", True)


FAULTS: dict[str, Any] = {
    "detached embedding": lambda: lambda: None,
    "unmerged attention": merge_nothing,
    "unreduced norms": reduce_nothing,
    "compiled zero bubble": keep_donated_buffers,
}
