"""The plan rules: held against the installed torch and torchao, and every "nearest" value really mends its fault."""

import random
import subprocess
import sys
import time
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.distributed.pipelining._utils import generate_stage_to_rank_mapping
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, get_schedule_class
from torch.distributed.pipelining.stage import _PipelineStageBase

from trainer_core import rules
from trainer_core.config import (
    MODELS,
    MULTI_STAGE_SCHEDULES,
    V_SCHEDULES,
    ConfigError,
    Problem,
    TrainConfig,
    from_dict,
    resolve,
)

SCHEDULES = ("GPipe", "1F1B", *MULTI_STAGE_SCHEDULES)


def plan(**keys: Any) -> TrainConfig:
    """``tp=2, seq_len=64``...: keys by their last name, in whichever section has them; resolved."""
    return resolve(from_dict(TrainConfig, nested(keys)))


def nested(keys: dict[str, Any]) -> dict[str, Any]:
    data: dict[str, Any] = {}
    for key, value in keys.items():
        section = next(s for s in TrainConfig.__dataclass_fields__ if hasattr(getattr(TrainConfig(), s), key))
        data.setdefault(section, {})[key] = value
    return data


def faults(device: rules.Device = rules.CPU, **keys: Any) -> list[Problem]:
    try:
        return rules.check(plan(**keys), device)
    except ConfigError as error:
        return error.problems


class Stage(_PipelineStageBase):
    """What torch's schedules read of a stage before the first step, without a process group."""

    def __init__(self, index: int, stages: int, ranks: int):
        self.stage_index, self.num_stages, self.group_size, self.group_rank = index, stages, ranks, 0
        self.group, self.submod, self.device = None, torch.nn.Identity(), torch.device("cpu")
        self.stage_index_to_group_rank = {i: i % ranks for i in range(stages)}

    def _unused(self, *args: Any) -> Any:
        raise AssertionError("a schedule was run")

    _create_grad_recv_info = _prepare_backward_infra = _prepare_forward_infra = _unused


def torch_accepts(schedule: str, pp: int, microbatches: int) -> bool:
    """Whether the installed torch builds ``schedule``."""
    kind = get_schedule_class(schedule)
    multi = issubclass(kind, PipelineScheduleMulti)
    local = plan(pp=pp, schedule=schedule, local_batch_size=64).rank_stages(0)
    built = [Stage(i, pp * len(local), pp) for i in local]
    try:
        kind(built if multi else built[0], n_microbatches=microbatches, loss_fn=lambda a, b: a)
    except ValueError:
        return False
    return True


def test_the_table_is_for_the_installed_torch():
    assert torch.__version__.startswith(rules.TORCH + ".")


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_schedule_rules_are_torchs(schedule):
    """For 2 to 4 ranks and 1 to 17 microbatches our table refuses just what torch's constructor refuses."""
    for pp in (2, 3, 4):
        for microbatches in range(1, 18):
            keys = {"microbatches": microbatches, "local_batch_size": microbatches, "layers": 16}
            found = faults(pp=pp, schedule=schedule, **keys)
            assert (not found) == torch_accepts(schedule, pp, microbatches), (pp, microbatches, found)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_stages_lie_where_torch_puts_them(schedule):
    for pp in (2, 4):
        config = plan(pp=pp, schedule=schedule, layers=16)
        style = "v" if schedule in V_SCHEDULES else "loop"
        mapping = generate_stage_to_rank_mapping(pp, config.parallel.stages, style=style)
        for rank in range(pp):
            assert config.rank_stages(rank) == [s for s, r in mapping.items() if r == rank]


def test_every_layer_is_placed_once_and_evenly():
    for layers in range(8, 40):
        for pp, schedule in ((1, "1F1B"), (3, "1F1B"), (4, "Interleaved1F1B"), (2, "ZBVZeroBubble"), (8, "GPipe")):
            stages = plan(layers=layers, pp=pp, schedule=schedule).stage_layers()
            sizes = [len(s) for s in stages]
            assert [i for s in stages for i in s] == list(range(layers))
            assert max(sizes) - min(sizes) <= 1 and sizes[0] <= max(sizes) and sizes[-1] == min(sizes)
    large = replace(plan(pp=8), model=MODELS["llama3_405b"])
    assert [len(s) for s in large.stage_layers()] == [15, 16, 16, 16, 16, 16, 16, 15]


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_float8_recipe_conflicts_are_torchaos(recipe):
    from torchao.float8 import Float8LinearConfig

    base = Float8LinearConfig.from_recipe_name(recipe)
    try:
        replace(base, enable_fsdp_float8_all_gather=True)
        allowed = True
    except (AssertionError, ValueError):
        allowed = False
    assert (not faults(float8=recipe, float8_all_gather=True)) == allowed == (recipe == "tensorwise")


@pytest.mark.parametrize(("features", "tokens"), [(32, 32), (48, 32), (32, 48), (64, 96)])
def test_mxfp8_shapes_are_torchaos(features, tokens):
    """Local features and tokens in multiples of 32, as the installed MXFP8 layer (emulated) accepts them."""
    from torchao.prototype.moe_training.mxfp8_linear import MXFP8Linear
    from torchao.quantization.quantize_.common.kernel_preference import KernelPreference

    layer = MXFP8Linear(features, 64, bias=False, kernel_preference=KernelPreference.EMULATED)
    try:
        layer(torch.ones(1, tokens, features)).sum().backward()
        allowed = True
    except (AssertionError, RuntimeError, ValueError):
        allowed = False
    found = faults(float8="mxfp8", dim=features, heads=1, kv_heads=1, ffn_dim=64, seq_len=tokens, local_batch_size=1)
    assert (not found) == allowed


H100, B200, A100 = (rules.Device("cuda", c, 8) for c in ((9, 0), (10, 0), (8, 0)))

CASES = [
    # keys, device, key at fault, words of the message
    ({"dp_shard": 0}, rules.CPU, "parallel.dp_shard", "=0: a degree is at least 1"),
    ({"tp": -2}, rules.CPU, "parallel.tp", "=-2"),
    ({"world_size": 0}, rules.CPU, "parallel.world_size", "at least one rank"),
    ({"dp_shard": -1, "tp": -1, "world_size": 8}, rules.CPU, "parallel.tp", "only one degree"),
    ({"dp_shard": -1}, rules.CPU, "parallel.dp_shard", "world_size must be given"),
    ({"dp_shard": -1, "tp": 3, "world_size": 8}, rules.CPU, "parallel.world_size", "product 3"),
    ({"dp_shard": 2, "tp": 2, "world_size": 8}, rules.CPU, "parallel.world_size", "make 4 ranks"),
    ({"seq_len": 0}, rules.CPU, "data.seq_len", "at least 1"),
    ({"global_batch_size": 12, "local_batch_size": 8}, rules.CPU, "train.global_batch_size", "= 8"),
    ({"steps": 5, "warmup_steps": 5}, rules.CPU, "train.warmup_steps", "steps=5"),
    ({"loss_chunks": 3}, rules.CPU, "train.loss_chunks", "the 256 positions"),
    ({"loss_chunks": 256, "tp": 2}, rules.CPU, "train.loss_chunks", "the 128 positions"),
    ({"corpus": "wiki"}, rules.CPU, "data.corpus", "jsonl:PATH"),
    ({"corpus": "jsonl:"}, rules.CPU, "data.corpus", "jsonl:PATH"),
    ({"vocab_size": 256}, rules.CPU, "model.vocab_size", "at least 257"),
    ({"heads": 7, "kv_heads": 7}, rules.CPU, "model.heads", "dim=256"),
    ({"kv_heads": 3}, rules.CPU, "model.kv_heads", "heads=8"),
    ({"tp": 8}, rules.CPU, "parallel.tp", "kv_heads=4"),
    ({"tp": 3}, rules.CPU, "parallel.tp", "model.kv_heads=4"),
    ({"cp": 3}, rules.CPU, "parallel.cp", "seq_len=256"),
    ({"cp": 2, "seq_len": 6}, rules.CPU, "data.seq_len", "2 x cp = 4"),
    ({"tp": 4, "seq_len": 30}, rules.CPU, "data.seq_len", "tp=4"),
    ({"cp": 16, "cp_method": "ulysses"}, rules.CPU, "parallel.cp", "8 local query and 4 local kv"),
    ({"pp": 4, "layers": 6, "schedule": "Interleaved1F1B"}, rules.CPU, "parallel.pp", "8 stages"),
    ({"pp": 2, "microbatches": 3}, rules.CPU, "parallel.microbatches", "local_batch_size=8"),
    ({"pp": 4, "microbatches": 2}, rules.CPU, "parallel.microbatches", "(4)"),
    ({"microbatches": 2}, rules.CPU, "parallel.microbatches", "pp=1"),
    ({"pp": 2, "schedule": "ZBVZeroBubble", "enable": True}, rules.CPU, "parallel.schedule", "wrong gradients"),
    ({"pp": 2, "schedule": "DualPipeV", "mode": "selective"}, rules.CPU, "parallel.schedule", "an extra time"),
    ({"float8": "rowwise", "ffn_dim": 760}, rules.CPU, "precision.float8", "w1 256x760"),
    ({"float8": "mxfp8", "ffn_dim": 768, "tp": 4, "kv_heads": 4}, rules.CPU, "precision.float8", None),
    ({"float8": "mxfp8", "seq_len": 20, "local_batch_size": 1}, rules.CPU, "data.seq_len", "is 20"),
    ({"float8_all_gather": True}, rules.CPU, "precision.float8_all_gather", "needs precision.float8"),
    ({"float8": "rowwise", "float8_precompute_scale": True, "float8_all_gather": True}, rules.CPU,
     "precision.float8_precompute_scale", "only for the tensorwise"),
    ({"float8": "tensorwise", "float8_precompute_scale": True}, rules.CPU, "precision.float8_precompute_scale", "off"),
    ({"float8": "mxfp8"}, H100, "precision.float8", "9.0"),
    ({"float8": "mxfp8"}, B200, "precision.float8", None),
    ({"float8": "rowwise"}, A100, "precision.float8", "8.0"),
    ({"async_tp": "on", "tp": 2}, H100, "parallel.async_tp", "torch.compile"),
    ({"async_tp": "on", "tp": 2, "enable": True}, rules.CPU, "parallel.async_tp", "symmetric memory"),
    ({"async_tp": "on", "tp": 2, "enable": True}, H100, "parallel.async_tp", None),
    ({"async_tp": "fallback", "tp": 2}, rules.CPU, "parallel.async_tp", None),
    ({"lr": 0.0}, rules.CPU, "optim.lr", "above 0"),
    ({"beta2": 1.0}, rules.CPU, "optim.beta2", "[0, 1)"),
    ({"seed": -1}, rules.CPU, "train.seed", "at least 0"),
]  # fmt: skip


@pytest.mark.parametrize(("keys", "device", "key", "words"), CASES)
def test_a_fault_is_named(keys, device, key, words):
    """Both numbers are in the message; words=None: this plan has no such fault."""
    found = {p.key: p.message for p in faults(device, **keys)}
    if words is None:
        assert key not in found
    else:
        assert words in found.get(key, ""), found


def random_keys(rng: random.Random) -> dict[str, Any]:
    degree = lambda: rng.choice((1, 1, 1, 2, 3, 4, 8))
    return {
        "dp_replicate": degree(), "dp_shard": degree(), "tp": degree(), "cp": degree(), "pp": degree(),
        "schedule": rng.choice(SCHEDULES), "microbatches": rng.choice((-1, 1, 2, 4, 5, 6)),
        "local_batch_size": rng.choice((1, 2, 4, 6, 8)), "seq_len": rng.choice((20, 32, 48, 64, 128)),
        "global_batch_size": rng.choice((-1, -1, 16, 24, 96)), "layers": rng.choice((2, 4, 8, 16)),
        "heads": rng.choice((2, 4, 6, 8)), "kv_heads": rng.choice((1, 2, 3, 4)), "dim": rng.choice((64, 96)),
        "ffn_dim": rng.choice((96, 128, 100)), "float8": rng.choice(("off", "off", "tensorwise", "rowwise", "mxfp8")),
        "float8_all_gather": rng.random() < 0.1, "enable": rng.random() < 0.3, "loss_chunks": rng.choice((1, 1, 2, 3)),
        "mode": rng.choice(("none", "full", "selective")), "cp_method": rng.choice(("allgather", "ring", "ulysses")),
        "async_tp": rng.choice(("off", "off", "on", "fallback")), "vocab_size": rng.choice((128, 512)),
        "steps": rng.choice((4, 20)), "sequence_parallel": rng.random() < 0.7,
    }  # fmt: skip


def test_the_nearest_value_mends_the_fault():
    """In 400 random plans every fault with a ``nearest`` is gone once its key has that value."""
    rng, mended = random.Random(0), {}
    for _ in range(400):
        keys = random_keys(rng)
        for problem in faults(**keys):
            near = problem.nearest
            for value in near if isinstance(near, list) else [] if near is None else [near]:
                name = problem.key.split(".")[1]
                after = faults(**{**keys, name: value})
                assert (problem.key, problem.conflicts_with) not in {(p.key, p.conflicts_with) for p in after}, (
                    problem, value, [p.message for p in after])  # fmt: skip
                mended[name] = mended.get(name, 0) + 1
    assert len(mended) >= 10, mended


def test_plans_are_checked_fast_and_without_torch():
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from trainer_core.config import *; from trainer_core import rules, counts\n"
        "assert not rules.check(resolve(TrainConfig(model=MODELS['llama3_405b'])))"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    keys = {"tp": 8, "cp": 16, "pp": 16, "dp_shard": 64, "local_batch_size": 16, "layers": 126, "heads": 128}
    start = time.perf_counter()
    faults(**keys)
    assert time.perf_counter() - start < 1.0


@pytest.mark.parametrize("name", MODELS)
def test_shipped_models_are_valid(name):
    assert rules.check(resolve(replace(TrainConfig(), model=MODELS[name]))) == []


def test_warnings():
    told = {p.key for p in rules.warn(plan(vocab_size=513, tp=2, cp=2, cp_balance=False, async_tp="fallback"))}
    assert told == {"model.vocab_size", "parallel.cp_balance", "parallel.async_tp"}
    assert {p.key for p in rules.warn(plan(tp=4), rules.Device("cuda", (9, 0), 2))} == {"parallel.tp"}
    assert rules.warn(plan(tp=2, cp=2)) == []


def test_bad_values_list_the_valid_ones():
    with pytest.raises(ConfigError) as caught:
        from_dict(TrainConfig, {"parallel": {"tpp": 2, "schedule": "1F1BB"}, "optim": {"lr": "fast"}, "data": 3})
    problems = {p.key: p for p in caught.value.problems}
    assert problems["parallel.tpp"].nearest == "parallel.tp" and "parallel.cp" in problems["parallel.tpp"].message
    assert problems["parallel.schedule"].nearest == "1F1B" and "DualPipeV" in problems["parallel.schedule"].message
    assert "float" in problems["optim.lr"].message and "seq_len" in problems["data"].message
