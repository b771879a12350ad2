"""Random plans: what the rules accept runs, what they refuse is refused at once and really fails in torch."""

from __future__ import annotations

import random
import time
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from tests.dist.curves import curve, tiny
from tests.dist.pool import Pool, RankError
from trainer_core.config import ConfigError, Problem, TrainConfig
from trainer_core.rules import check

AXES = ("dp_replicate", "dp_shard", "tp", "cp", "pp")
SCHEDULES = ("GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")


def draw(dice: random.Random) -> dict[str, Any]:
    """One plan: every degree 1-4, any schedule, any switch; batch and model sizes near what divides."""
    degrees = {axis: dice.choice((1, 1, 2, 2, 3, 4) if axis != "dp_replicate" else (1, 1, 2)) for axis in AXES}
    return {
        "model": {"heads": 8, "kv_heads": dice.choice((2, 4, 8)), "layers": dice.choice((2, 4, 8))},
        "parallel": {
            **degrees,
            "schedule": dice.choice(SCHEDULES),
            "microbatches": dice.choice((-1, -1, -1, 3, 4, 8)) if degrees["pp"] > 1 else -1,
            "cp_method": dice.choice(("allgather", "ring", "ulysses")),
            "cp_balance": dice.random() < 0.7,
            "sequence_parallel": dice.random() < 0.7,
            "loss_parallel": dice.random() < 0.7,
        },
        "ac": {"mode": dice.choice(("none", "none", "full", "selective", "every_k"))},
        "data": {"seq_len": dice.choice((48, 64, 96))},
        "train": {"global_batch_size": 48, "local_batch_size": 4, "steps": 2},
    }


def judge(plan: dict[str, Any]) -> tuple[TrainConfig | None, list[Problem]]:
    try:
        config = tiny(**plan)
    except ConfigError as error:
        return None, error.problems
    return config, check(config)


@cache
def plans() -> list[tuple[TrainConfig | None, list[Problem], float]]:
    """200 seeded plans with their problems and the seconds that judging took."""
    dice, out = random.Random(7), []
    for _ in range(200):
        plan, start = draw(dice), time.perf_counter()
        out.append((*judge(plan), time.perf_counter() - start))
    return out


def test_the_draw_is_worth_something() -> None:
    """At least 30 % are valid, and each axis is above 1 in at least 20 valid ones."""
    valid = [config for config, problems, _ in plans() if config is not None and not problems]
    assert len(valid) >= 60, len(valid)
    used = {axis: sum(getattr(c.parallel, axis) > 1 for c in valid) for axis in AXES}
    assert min(used.values()) >= 20, used


def test_judged_in_under_a_second() -> None:
    assert max(seconds for *_, seconds in plans()) < 1
    refused = [problems for _, problems, _ in plans() if problems]
    assert all(p.message and p.key for problems in refused for p in problems)


def small(valid: bool) -> list[tuple[TrainConfig, list[Problem]]]:
    """Plans of 2 to 4 ranks."""
    return [(c, p) for c, p, _ in plans() if c is not None and 1 < c.parallel.world_size <= 4 and bool(p) is not valid]


def test_valid_plans_run(pool: Pool) -> None:
    """12 of them, to their last step (one accumulation pass each)."""
    chosen = small(valid=True)[:12]
    assert len(chosen) == 12
    for plan, _ in chosen:
        one_pass = plan.train.local_batch_size * plan.parallel.dp
        config = replace(plan, train=replace(plan.train, global_batch_size=one_pass))
        ranks = pool.run(curve, config.parallel.world_size, config, config.train.steps)
        assert all(len(rank["norm"]) == config.train.steps for rank in ranks), config.parallel


HARD = ("does not divide model.kv_heads", "at least as many microbatches", "is not a multiple of parallel.microbatches")
"""Rules that stand for an error of torch's; others stand for a silent wrong result, or for a choice of ours."""


def test_refused_plans_fail_in_torch(pool: Pool) -> None:
    """One plan of each hard rule, run all the same."""
    tried = []
    for text in HARD:
        config = next((c for c, problems in small(valid=False) if any(text in p.message for p in problems)), None)
        if config is not None:
            tried.append(text)
            with pytest.raises(RankError):
                pool.run(curve, config.parallel.world_size, config, 1, timeout=60)
    assert len(tried) >= 2, tried
