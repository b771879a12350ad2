"""The closed forms, against the built model, torch's FlopCounterMode and published parameter counts."""

import contextlib
import random
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from trainer_core import counts
from trainer_core.config import (
    MODELS,
    ACConfig,
    DataConfig,
    ModelConfig,
    ParallelConfig,
    PrecisionConfig,
    TrainConfig,
    resolve,
)
from trainer_core.model import Decoder, init_weights
from trainer_core.optim import build_optimizer
from trainer_core.parallel.activation import apply_ac
from trainer_core.parallel.float8 import apply_float8, converted

TINY = ModelConfig("tiny", 64, 4, 8, 2, 160, 512)
BATCH, LENGTH = 2, 32


def random_models(n: int) -> list[ModelConfig]:
    rng = random.Random(0)
    models = []
    for i in range(n):
        heads, kv_heads = rng.choice([(4, 4), (8, 2), (6, 3), (4, 1)])
        dim, layers = rng.choice((4, 8, 10)) * heads, rng.randint(1, 5)
        models.append(ModelConfig(f"random{i}", dim, layers, heads, kv_heads, rng.randint(3, 90), rng.randint(9, 99)))
    return models


def built(m: ModelConfig) -> Decoder:
    with torch.device("meta"):
        return Decoder(m, list(range(m.layers)))


@pytest.mark.parametrize("m", [*MODELS.values(), *random_models(6)], ids=lambda m: m.name)
def test_parameters_are_the_built_models(m):
    model = built(m)
    assert counts.params(m) == sum(p.numel() for p in model.parameters())
    assert counts.gemm_params(m) == sum(x.weight.numel() for x in model.modules() if isinstance(x, nn.Linear))
    assert counts.embedding_params(m) == model.embed.weight.numel()
    assert counts.block_params(m) == sum(p.numel() for p in model.layers["0"].parameters())


@pytest.mark.parametrize(
    ("name", "published"),
    [("llama3_8b", 8_030_261_248), ("llama3_70b", 70_553_706_496), ("llama3_405b", 405_853_388_800)],
)
def test_parameters_are_the_published_ones(name, published):
    """The counts of the released Llama 3.1 checkpoints."""
    assert counts.params(MODELS[name]) == published


def measured(m: ModelConfig, ac: str = "none", backend: SDPBackend | None = SDPBackend.MATH) -> float:
    """FLOPs a token, forward and backward. The math backend runs attention as matmuls, which are counted whole."""
    model = Decoder(m, list(range(m.layers)))
    model.set_positions(torch.arange(LENGTH))
    init_weights(model, m, 0)
    if ac != "none":
        apply_ac(model, ACConfig(ac))
    attention = sdpa_kernel(backend) if backend else contextlib.nullcontext()
    with attention, FlopCounterMode(display=False) as counter:
        model(torch.zeros(BATCH, LENGTH, dtype=torch.long)).sum().backward()
    return counter.get_total_flops() / (BATCH * LENGTH)


@pytest.mark.parametrize("m", [TINY, *random_models(4)], ids=lambda m: m.name)
def test_flops_are_torchs(m):
    """Exactly: 6 a GEMM parameter and both attention matmuls with *query* heads, forward and twice that backward."""
    assert measured(m) == counts.flops_per_token(m, LENGTH, causal=False)


def test_causal_attention_counts_the_lower_triangle():
    full, causal = (counts.attention_flops_per_token(TINY, LENGTH, causal) for causal in (False, True))
    pairs = sum(1 for q in range(LENGTH) for k in range(LENGTH) if k <= q)
    assert causal / full == pytest.approx(pairs / LENGTH**2)


@pytest.mark.parametrize("mode", ["full", "every_k", "selective"])
def test_recomputation_is_what_torch_runs(mode):
    """The extra FLOPs of a checkpointed step. Selective keeps attention, which FlopCounterMode does not see on CPU."""
    backend = None if mode == "selective" else SDPBackend.MATH
    extra = measured(TINY, mode, backend) - measured(TINY, "none", backend)
    config = TrainConfig(model=TINY, ac=ACConfig(mode), data=DataConfig("synthetic", LENGTH))
    assert extra == counts.recompute_flops_per_token(config, causal=False) > 0
    assert counts.recompute_flops_per_token(replace(config, ac=ACConfig("none")), causal=False) == 0


def test_torchtitans_convention():
    """Llama 3 8B at 8192, by hand: 6 x (8,030,261,248 - 525,336,576) + 12 x 32 x 4096 x 8192."""
    assert counts.torchtitan_flops_per_token(MODELS["llama3_8b"], 8192) == 57_914_449_920


def test_state_is_what_the_optimizer_holds():
    model = Decoder(TINY, list(range(4)))
    optimizer = build_optimizer(TrainConfig().optim, [model])
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    size = lambda tensors: sum(t.numel() * t.element_size() for t in tensors) / 2**30
    moments = [s[k] for s in optimizer.state.values() for k in ("exp_avg", "exp_avg_sq")]
    expected = {"params": size(model.parameters()), "grads": size(p.grad for p in model.parameters())}
    config = resolve(TrainConfig(model=TINY))
    found = counts.state_gib(config)
    assert found == pytest.approx({**expected, "optimizer": size(moments), "total": 4 * expected["params"]})
    sharded = counts.state_gib(resolve(TrainConfig(model=TINY, parallel=ParallelConfig(dp_shard=2, tp=2, pp=2))))
    assert sharded["total"] == pytest.approx(found["total"] / 8)


@pytest.mark.parametrize("recipe", ["tensorwise", "mxfp8"])
def test_float8_layers_are_those_that_are_converted(recipe):
    model = built(TINY)
    apply_float8(model, PrecisionConfig(float8=recipe), "cpu")
    told = counts.float8_layers(TrainConfig(model=TINY, precision=PrecisionConfig(float8=recipe)))
    assert sorted(told["converted"]) == sorted(converted(model))
    linear = {name for name, x in built(TINY).named_modules() if isinstance(x, nn.Linear)}
    assert {s["name"] for s in told["skipped"]} == linear - set(told["converted"])
