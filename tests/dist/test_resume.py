"""A run that stops and goes on is the run that did not stop. Reference: the unbroken run in deterministic mode."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.seed import write_seed
from bench.spec import from_overrides
from tests.dist.curves import TINY, tiny
from tests.dist.pool import Pool
from trainer_core.config import TrainConfig
from trainer_core.metrics import RankWriter
from trainer_core.train import run

LAYOUT = {"dp_shard": 2, "pp": 2}


def train(config: TrainConfig, folder: Path, interrupt_at: int = 0) -> list[tuple[int, float | None, float]]:
    """(step, loss, norm) of what this process trained; ``interrupt_at`` sends this rank SIGTERM after that step."""
    torch.use_deterministic_algorithms(True)
    rank = torch.distributed.get_rank()
    writer = RankWriter(folder / "ranks" / f"{rank}.jsonl")
    original = RankWriter.step

    def step(self: RankWriter, record: Any) -> None:
        original(self, record)
        if record.step == interrupt_at and rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)

    RankWriter.step = step  # type: ignore[method-assign]
    try:
        run(config, folder, writer, torch.device("cpu"))
    finally:
        RankWriter.step = original  # type: ignore[method-assign]
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        torch.use_deterministic_algorithms(False)
    rows = [json.loads(line) for line in (folder / "ranks" / f"{rank}.jsonl").read_text().splitlines()]
    return [(row["step"], row["loss"], row["grad_norm"]) for row in rows if row["kind"] == "step"]


@pytest.fixture(scope="module")
def unbroken(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Any]]:
    folder = tmp_path_factory.mktemp("unbroken")
    return folder, pool.run(train, 4, tiny(parallel=LAYOUT, checkpoint={"every": 5}), folder)


def test_resume_is_bitwise(pool: Pool, unbroken: tuple[Path, list[Any]], tmp_path: Path) -> None:
    """From step 5's checkpoint, steps 6-10 are the unbroken run's to the bit. A later, partial one is ignored."""
    folder, whole = unbroken
    shutil.copytree(folder / "checkpoints", tmp_path / "checkpoints")
    (tmp_path / "checkpoints" / "step-00000010" / "complete.json").unlink()
    again = pool.run(train, 4, tiny(parallel=LAYOUT, checkpoint={"every": 5}), tmp_path)
    assert list(again) == [rank[5:] for rank in whole]


def test_interrupted_run_goes_on(pool: Pool, unbroken: tuple[Path, list[Any]], tmp_path: Path) -> None:
    """SIGTERM to one rank after step 3 ends all with a checkpoint; the rest equals the unbroken run."""
    config = tiny(parallel=LAYOUT)
    first = pool.run(train, 4, config, tmp_path, 3)
    done = len(first[0])
    assert 3 <= done < 10
    both = pool.run(train, 4, config, tmp_path)
    assert both == unbroken[1]


@pytest.mark.parametrize("parallel", [{}, {"tp": 2}, {"cp": 2}], ids=str)
def test_resume_in_another_layout(
    pool: Pool, unbroken: tuple[Path, list[Any]], tmp_path: Path, parallel: dict[str, Any]
) -> None:
    """The same checkpoint, another layout: within the parity tolerance of tests/dist/test_parity.py."""
    folder, whole = unbroken
    shutil.copytree(folder / "checkpoints" / "step-00000005", tmp_path / "checkpoints" / "step-00000005")
    config = tiny(parallel=parallel)
    ranks = pool.run(train, config.parallel.world_size, config, tmp_path)
    expected = [row for row in next(rank for rank in whole if rank[0][1] is not None) if row[0] > 5]
    for (_, loss, norm), (_, loss_0, norm_0) in zip(ranks[0], expected, strict=True):
        assert (loss, norm) == (pytest.approx(loss_0, rel=5e-6), pytest.approx(norm_0, rel=1e-5))


def test_seed_starts_every_layout(pool: Pool, tmp_path: Path) -> None:
    """``bench seed`` of another seed than the run's: one rank, FSDP x TP and PP start from its values, and agree."""
    overrides = [f"model.{key}={value}" for key, value in TINY["model"].items()]
    write_seed(from_overrides([*overrides, "train.seed=5"]), tmp_path / "seed")
    plain = pool.run(train, 1, tiny(train={"steps": 2}), tmp_path / "plain")[0]
    curves = []
    for i, parallel in enumerate(({}, {"dp_shard": 2, "tp": 2}, {"pp": 2})):
        config = tiny(parallel=parallel, train={"steps": 2, "init_from": str(tmp_path / "seed")})
        ranks = pool.run(train, config.parallel.world_size, config, tmp_path / str(i))
        curves.append(next(rank for rank in ranks if rank[0][1] is not None))
    for curve in curves:
        assert curve[0][1] != plain[0][1]
        for (_, loss, norm), (_, loss_0, norm_0) in zip(curve, curves[0], strict=True):
            assert (loss, norm) == (pytest.approx(loss_0, rel=5e-6), pytest.approx(norm_0, rel=1e-5))
