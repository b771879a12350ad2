"""Tokens a second of the trainer against a plain single-file loop of the same model, steps taken in turn."""

from __future__ import annotations

import statistics
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.dist.pool import Pool
from trainer_core.config import TrainConfig, from_dict, resolve
from trainer_core.data import open_corpus
from trainer_core.train import setup

LAYOUTS: dict[str, dict[str, int]] = {"one rank": {}, "fsdp": {"dp_shard": 2}, "tp": {"tp": 2}, "pp": {"pp": 2}}
LEAST = 0.95
"""The one-rank trainer's speed over the plain loop's."""


def debug(**parallel: int) -> TrainConfig:
    """The debug model at sequence 256, global batch 8, fp32."""
    data: dict[str, Any] = {"precision": {"param": "fp32"}, "data": {"corpus": "synthetic"}, "parallel": parallel}
    data["train"] = {"local_batch_size": 8 // parallel.get("dp_shard", 1), "steps": 40}
    return resolve(from_dict(TrainConfig, data))


def race(config: TrainConfig, rounds: int) -> float:
    """Median over rounds of plain step time / trainer step time; the plain loop runs on rank 0 alone."""
    from tests.dist.plain import Plain

    rank = dist.get_rank()
    trainer, corpus = setup(config, torch.device("cpu")), open_corpus(config)
    plain = Plain(config.model, config.data.seq_len) if rank == 0 else None
    (tokens, labels), *_ = open_corpus(debug()).batches(1, 0, 1)
    ratios = []
    for step in range(1, rounds + 3):
        dist.barrier()
        start = time.perf_counter()
        if plain is not None:
            plain.step(tokens, labels)
        middle = time.perf_counter()
        dist.barrier()
        begin = time.perf_counter()
        result = trainer.train_step(step, corpus.batches(step, trainer.mesh.dp_rank, config.parallel.dp))
        float(result["grad_norm"])
        ratios.append((middle - start) / (time.perf_counter() - begin))
    return statistics.median(ratios[2:])


@pytest.mark.parametrize("name", LAYOUTS)
def test_speed_against_a_plain_loop(pool: Pool, benchmark: Any, name: str) -> None:
    """One rank: at least LEAST, a third less on a busy machine. Several ranks share the cores and pay for talking,
    which dwarfs so small a model: they are only held to a twentieth, and the ratio is kept."""
    config = debug(**LAYOUTS[name])
    rounds = 12 if name == "one rank" else 4
    ratio = benchmark.pedantic(lambda: pool.run(race, config.parallel.world_size, config, rounds)[0], rounds=1)
    benchmark.extra_info["plain_over_trainer_step_time"] = ratio
    assert ratio > (LEAST * 2 / 3 if name == "one rank" else 0.05)


@pytest.mark.budget
def test_budget_one_rank_speed(pool: Pool, budget: Any) -> None:
    config = debug()
    slowdown = 1 / pool.run(race, 1, config, 30)[0]
    budget("one-rank step time over a plain PyTorch loop's", slowdown, 1 / LEAST, "x")
