"""A layout is real: what ranks hold and send equals closed formulas. Parity of one that is not there counts nothing."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed.pipelining
from torch.utils._python_dispatch import TorchDispatchMode

from tests.dist.curves import collectives, tiny
from tests.dist.pool import Pool
from trainer_core import counts
from trainer_core.config import MULTI_STAGE_SCHEDULES, TrainConfig
from trainer_core.data import open_corpus
from trainer_core.parallel import context
from trainer_core.parallel.activation import SAVED_OPS
from trainer_core.parallel.context import gather_pieces, ring_pieces
from trainer_core.parallel.pipeline import actions
from trainer_core.train import Trainer, setup

FP32 = 4


def evidence(pool: Pool, **sections: Any) -> tuple[TrainConfig, list[dict[str, Any]]]:
    config = tiny(**sections)
    return config, pool.run(collectives, config.parallel.world_size, config)


def test_fsdp_bytes_and_collectives(pool: Pool) -> None:
    """A gather for the root and each block forward, and for each block but the last (kept) backward; one
    reduce-scatter each. Bytes: the fp32 parameters gathered, the fp32 gradients scattered."""
    config, ranks = evidence(pool, parallel={"dp_shard": 2})
    m = config.model
    whole, block = counts.params(m) * FP32, counts.block_params(m) * FP32
    expected = {
        "all_gather": [1 + 2 * m.layers - 1, whole + (m.layers - 1) * block],
        "reduce_scatter": [1 + m.layers, whole],
    }
    for rank in ranks:
        assert rank["layout"]["parameter_bytes"] == whole // 2
        found = rank["collectives"]["dp_shard"]
        assert {kind: found[kind] for kind in expected} == expected


def test_hsdp_reduces_shards_over_replicas(pool: Pool) -> None:
    """After each reduce-scatter over dp_shard, an all-reduce of the shard over dp_replicate."""
    config, ranks = evidence(pool, parallel={"dp_replicate": 2, "dp_shard": 2})
    units, whole = 1 + config.model.layers, counts.params(config.model) * FP32
    for rank in ranks:
        assert rank["layout"]["parameter_bytes"] == whole // 2
        assert rank["collectives"]["dp_shard"]["reduce_scatter"] == [units, whole]
        assert rank["collectives"]["dp_replicate"]["all_reduce"] == [units, whole // 2]


def test_tp_cuts_matrices_and_sequence(pool: Pool) -> None:
    """Sequence parallel: a gather into attention and into the FFN, a reduce-scatter out of each, mirrored backward; at
    the ends a reduce-scatter out of the embedding and a gather into the projection. Norms stay whole."""
    config, ranks = evidence(pool, parallel={"tp": 2})
    m, tokens = config.model, config.train.local_batch_size * config.data.seq_len
    times = 4 * m.layers + 2
    norms = (2 * m.layers + 1) * m.dim
    for rank in ranks:
        assert rank["layout"]["parameter_bytes"] == ((counts.params(m) - norms) // 2 + norms) * FP32
        for kind in ("all_gather", "reduce_scatter"):
            assert rank["collectives"]["tp"][kind] == [times, times * tokens * m.dim * FP32], kind


@pytest.mark.parametrize("cp", [2, 4])
@pytest.mark.parametrize("method", ["ring", "allgather", "ulysses"])
def test_cp_exchanges(pool: Pool, method: str, cp: int) -> None:
    """Ring: cp - 1 exchanges of K and V forward, cp - 1 of K and V and cp of their gradients backward. All-gather: one
    gather forward, one reduce-scatter backward. Ulysses: two all-to-alls each way. FSDP's own are subtracted."""
    config, ranks = evidence(pool, parallel={"cp": cp, "cp_method": method})
    m, layers = config.model, config.model.layers
    kv = 2 * m.kv_heads * m.head_dim * config.train.local_batch_size * config.data.seq_len // cp * FP32
    whole, block = counts.params(m) * FP32, counts.block_params(m) * FP32
    fsdp = {"all_gather": [2 * layers, whole + (layers - 1) * block], "reduce_scatter": [1 + layers, whole]}
    for rank in ranks:
        found = rank["collectives"]["cp"]
        own = {k: [n - fsdp.get(k, [0, 0])[0], b - fsdp.get(k, [0, 0])[1]] for k, (n, b) in found.items()}
        if method == "ring":
            times = layers * (3 * cp - 2)
            assert own["send"] == own["recv"] == [times, times * kv]
            assert own["all_gather"] == own["reduce_scatter"] == [0, 0]
        elif method == "allgather":
            assert own["all_gather"] == own["reduce_scatter"] == [layers, layers * kv * cp]
        else:
            assert own["all_to_all"][0] == 4 * layers and "send" not in own
        assert rank["cp_balanced"] is (method != "ulysses")


def attention_lengths(config: TrainConfig) -> list[tuple[int, int, int]]:
    """(sequence of the queries, of the keys, kv shards alive at once) of every attention core's call."""
    trainer, seen = setup(config, torch.device("cpu")), []
    alive: list[int] = []
    add = context._Accumulator.add

    def watched(self: Any, k: torch.Tensor, v: torch.Tensor, pieces: Any) -> None:
        alive.append(k.shape[2])
        add(self, k, v, pieces)

    context._Accumulator.add = watched
    try:
        for block in trainer.parts[0].layers.values():
            block.attention.core.register_forward_pre_hook(lambda _, x: seen.append((x[0].shape[2], x[1].shape[2])))
        trainer.forward_backward(open_corpus(config).batches(1, 0, 1))
    finally:
        context._Accumulator.add = add
    return [(q, k, max(alive, default=0)) for q, k in seen]


@pytest.mark.parametrize("method", ["ring", "allgather", "ulysses"])
def test_sequence_entering_attention(pool: Pool, method: str) -> None:
    """T / cp positions enter; a ring never attends to more than one shard at a time."""
    config = tiny(parallel={"cp": 4, "cp_method": method})
    local, whole = config.data.seq_len // 4, config.data.seq_len
    for rank in pool.run(attention_lengths, 4, config):
        assert {(q, k) for q, k, _ in rank} == {(local, local)}
        assert {n for *_, n in rank} == {{"ring": local, "allgather": whole, "ulysses": 0}[method]}


@pytest.mark.parametrize("cp", [2, 4, 8])
@pytest.mark.parametrize("method", ["ring", "allgather"])
def test_balanced_ranks_do_equal_attention(method: str, cp: int) -> None:
    """(query, key) pairs computed by each rank: within 5 % of each other balanced; 2 cp - 1 times apart at most not.
    Reference: the causal triangle, which all ranks together cover once."""
    length = 64 // cp

    def pairs(rank: int, balance: bool) -> int:
        pieces = gather_pieces(rank, cp, length, balance)
        if method == "ring":
            pieces = [p for source in range(cp) for p in ring_pieces(rank, source, length, balance)]
        square = sum((p.q1 - p.q0) * (p.k1 - p.k0) for p in pieces if not p.causal)
        return square + sum((p.q1 - p.q0) * (p.q1 - p.q0 + 1) // 2 for p in pieces if p.causal)

    for balance in (True, False):
        work = [pairs(rank, balance) for rank in range(cp)]
        assert sum(work) == 64 * 65 // 2
        assert (max(work) / min(work) <= 1.05) is balance, work


def pipeline(config: TrainConfig) -> tuple[list[int], list[str], list[str]]:
    """Layers held; the forwards (F), backwards (B, or input I and weight W apart) that this rank ran in a step, as
    ``<stage><kind><microbatch>``; and what torch's table says, empty where it has none."""
    trainer, ran = setup(config, torch.device("cpu")), []
    stage_type = torch.distributed.pipelining.PipelineStage
    originals = {name: getattr(stage_type, f"{name}_one_chunk") for name in ("forward", "backward", "backward_weight")}

    def watch(name: str) -> Any:
        def call(self: Any, chunk: int, *args: Any, **kwargs: Any) -> Any:
            kind = {"forward": "F", "backward_weight": "W"}.get(name) or "IB"[kwargs.get("full_backward", True)]
            ran.append(f"{self.stage_index}{kind}{chunk}")
            return originals[name](self, chunk, *args, **kwargs)

        return call

    for name in originals:
        setattr(stage_type, f"{name}_one_chunk", watch(name))
    try:
        corpus = open_corpus(config)
        for step in (1, 2):
            ran.clear()
            trainer.train_step(step, corpus.batches(step, trainer.mesh.dp_rank, 1))
    finally:
        for name, original in originals.items():
            setattr(stage_type, f"{name}_one_chunk", original)
    table = actions(trainer.schedule).get(trainer.mesh.rank("pp"), [])
    planned = [action for row in table for action in re.findall(r"\d+[FIBW]\d+", row)]
    return [int(i) for part in trainer.parts for i in part.layers], ran, planned


@pytest.mark.parametrize("schedule", ["GPipe", "1F1B", *MULTI_STAGE_SCHEDULES])
def test_pipeline_stages_and_actions(pool: Pool, schedule: str) -> None:
    """Layers a rank as stage_layers says, every layer once. What ran is torch's own table; the two schedules that torch
    runs without one are held to their definition."""
    config = tiny(parallel={"pp": 2, "schedule": schedule, "microbatches": 4})
    stages = config.stage_layers()
    ranks = pool.run(pipeline, 2, config)
    assert sorted(layer for held, *_ in ranks for layer in held) == list(range(config.model.layers))
    for number, (held, ran, planned) in enumerate(ranks):
        assert held == [layer for stage in config.rank_stages(number) for layer in stages[stage]]
        if schedule in MULTI_STAGE_SCHEDULES:
            assert ran == planned
        elif schedule == "GPipe":
            assert ran == [f"{number}F{i}" for i in range(4)] + [f"{number}B{i}" for i in range(4)]
        else:
            ahead = 2 - number
            steady = [f"{number}{kind}{i}" for i in range(4 - ahead) for kind in ("B", "F")]
            steady = [x if "B" in x else f"{number}F{int(x[-1]) + ahead}" for x in steady]
            drain = [f"{number}B{i}" for i in range(4 - ahead, 4)]
            assert ran == [f"{number}F{i}" for i in range(ahead)] + steady + drain


class Storages(TorchDispatchMode):
    """Bytes of storages made under it that are still alive, and how often each operator ran."""

    def __init__(self) -> None:
        super().__init__()
        self.made: dict[int, Any] = {}
        self.ops: Counter[Any] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.ops[func] += 1
        for t in torch.utils._pytree.tree_leaves(out):
            if isinstance(t, torch.Tensor):
                storage = t.untyped_storage()
                self.made[storage._cdata] = (torch.multiprocessing.reductions.StorageWeakRef(storage), storage.nbytes())
        return out

    def alive(self) -> int:
        return sum(size for ref, size in self.made.values() if not ref.expired())


def kept_and_recomputed(config: TrainConfig) -> tuple[int, dict[str, int]]:
    """Bytes held between forward and backward, and the matmuls and attentions of the backward's recomputation."""
    trainer: Trainer = setup(config, torch.device("cpu"))
    (tokens, labels), *_ = open_corpus(config).batches(1, 0, 1)
    (model,) = trainer.parts
    with Storages() as forward:
        loss = trainer.loss(model(tokens), labels)
        kept = forward.alive()
    with Storages() as backward:
        loss.backward()
    aten = torch.ops.aten
    # each linear layer's backward is two matmuls
    recomputed = backward.ops[aten.mm.default] - 2 * (7 * config.model.layers + 1)
    attention = backward.ops[aten._scaled_dot_product_flash_attention_for_cpu.default]
    return kept, {"mm": recomputed, "attention": attention}


def test_activation_checkpointing_keeps_and_recomputes(pool: Pool) -> None:
    """Memory held for the backward falls none > every-k > selective > full; what is recomputed is the table: of the
    7 matmuls of a block selective keeps every second, and attention; full stops before w2, which nobody needs."""
    modes = {mode: pool.run(kept_and_recomputed, 1, tiny(ac={"mode": mode}))[0]
             for mode in ("none", "every_k", "selective", "full")}  # fmt: skip
    kept = [modes[mode][0] for mode in ("none", "every_k", "selective", "full")]
    assert kept == sorted(kept, reverse=True) and len(set(kept)) == 4, kept
    layers = tiny().model.layers
    assert modes["none"][1] == {"mm": 0, "attention": 0}
    assert modes["selective"][1] == {"mm": 3 * layers, "attention": 0}
    assert modes["full"][1] == {"mm": 6 * layers, "attention": layers}
    assert modes["every_k"][1] == {"mm": 6 * layers // 2, "attention": layers // 2}
    assert torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default in SAVED_OPS


def test_ranks_agree_on_recipe(pool: Pool) -> None:
    """All ranks report the same dtypes, the same converted layers, and the table's names."""
    precision = {"param": "bf16", "float8": "rowwise"}
    config, ranks = evidence(pool, parallel={"dp_shard": 2}, precision=precision)
    assert {rank["reduce_dtype"] for rank in ranks} == {"float32"}
    assert all(sorted(counts.float8_layers(config)["converted"]) == rank["float8_converted"] for rank in ranks)


def test_mxfp8_and_rowwise_differ_on_outliers() -> None:
    """One large element costs rowwise the precision of its whole row, MXFP8 that of its block of 32. The outlier's own
    weight is zero, so that only the rounding of its neighbours shows; without outliers both err alike."""
    from torch import nn

    from trainer_core.config import PrecisionConfig
    from trainer_core.parallel.float8 import apply_float8

    def error(recipe: Any, x: torch.Tensor) -> float:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(128, 64, bias=False))
        with torch.no_grad():
            model[0].weight[:, 0] = 0
            exact = model(x)
            apply_float8(model, PrecisionConfig(float8=recipe), "cpu")
            return float((model(x) - exact).norm() / exact.norm())

    torch.manual_seed(1)
    even = torch.randn(64, 128)
    outliers = even.clone()
    outliers[:, 0] = 3e4
    assert error("rowwise", even) == pytest.approx(error("mxfp8", even), rel=0.2)
    assert error("rowwise", outliers) > 1.5 * error("mxfp8", outliers)
