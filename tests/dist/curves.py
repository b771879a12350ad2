"""What ranks run in the parity tests: a few steps of the trainer, whose losses, norms and gradients come back."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor

from trainer_core.config import TrainConfig, from_dict, resolve
from trainer_core.data import open_corpus
from trainer_core.evidence import CollectiveCounter, init_digest
from trainer_core.model import clean_name
from trainer_core.train import Trainer, setup

TINY = {
    "model": {"dim": 64, "layers": 8, "heads": 8, "kv_heads": 4, "ffn_dim": 128, "vocab_size": 512},
    "precision": {"param": "fp32"},
    "data": {"corpus": "synthetic", "seq_len": 64},
    "train": {"steps": 10, "warmup_steps": 1, "local_batch_size": 8, "global_batch_size": 8},
    "optim": {"lr_warmup_steps": 2},
}


def tiny(**sections: dict[str, Any]) -> TrainConfig:
    """TINY with ``sections`` on top; local_batch_size is the global batch over dp unless given."""
    data = {key: {**TINY.get(key, {}), **sections.get(key, {})} for key in {*TINY, *sections}}
    p = data.get("parallel", {})
    if "local_batch_size" not in sections.get("train", {}):
        dp = p.get("dp_shard", 1) * p.get("dp_replicate", 1)
        data["train"]["local_batch_size"] = data["train"]["global_batch_size"] // dp
    return resolve(from_dict(TrainConfig, data))


def curve(config: TrainConfig, steps: int, grads: bool = True) -> dict[str, Any]:
    """Losses, norms, the first step's whole gradients by name, and the digest of the initial values."""
    trainer = setup(config, torch.device("cpu"))
    corpus = open_corpus(config)
    out: dict[str, Any] = {"loss": [], "norm": [], "grads": {}, "init": init_digest(trainer.parts, trainer.mesh)}
    for step in range(1, steps + 1):
        batch = corpus.batches(step, trainer.mesh.dp_rank, config.parallel.dp)
        result = trainer.train_step(step, batch)
        out["loss"].append(None if result["loss"] is None else result["loss"].item())
        out["norm"].append(float(result["grad_norm"]))
        if step == 1 and grads:
            out["grads"] = whole_gradients(trainer)
    return out


def whole_gradients(trainer: Trainer) -> dict[str, torch.Tensor | None]:
    """Unsharded (clipped) gradients of this rank's stages."""
    grads = {}
    for part in trainer.parts:
        for name, p in part.named_parameters():
            grad = p.grad
            grads[clean_name(name)] = grad.full_tensor() if isinstance(grad, DTensor) else grad
    return grads


def collectives(config: TrainConfig) -> dict[str, Any]:
    """The collectives of the second step, by axis and kind."""
    trainer = setup(config, torch.device("cpu"))
    corpus = open_corpus(config)
    for step in (1, 2):
        counter = CollectiveCounter(trainer.mesh)
        with counter:
            trainer.train_step(step, corpus.batches(step, trainer.mesh.dp_rank, config.parallel.dp))
    return counter.plain()
