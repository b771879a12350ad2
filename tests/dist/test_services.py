"""Norms, optimizer and checkpoints over ranks: parameters on two meshes, and a resume in other layouts."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from tests.dist.curves import tiny
from tests.dist.pool import Pool
from trainer_core import checkpoint
from trainer_core.config import OptimConfig, TrainConfig
from trainer_core.data import open_corpus
from trainer_core.optim import build_optimizer, clip_grad_norm
from trainer_core.train import setup

SHAPES = ((6, 4), (4, 6), (5,), (3, 3))


def whole(seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


def mixed(values: list[torch.Tensor]) -> list[Any]:
    """Two tensors on one mesh (cut, and whole on each rank), one on another mesh, one plain."""
    tp, fsdp = (init_device_mesh("cpu", (2,), mesh_dim_names=(name,)) for name in ("tp", "dp_shard"))
    return [
        distribute_tensor(values[0], tp, [Shard(0)]),
        distribute_tensor(values[1], fsdp, [Shard(1)]),
        distribute_tensor(values[2], tp, [Replicate()]),
        values[3],
    ]


def step_on_two_meshes(impl: str) -> tuple[float, list[torch.Tensor]]:
    """Two clipped AdamW steps; the first norm and the whole parameters."""
    module = nn.ParameterList([nn.Parameter(t) for t in mixed(whole(0))])
    optimizer = build_optimizer(OptimConfig(impl=impl, lr=0.1), [module])
    norms = []
    for seed in (1, 2):
        for p, grad in zip(module, mixed(whole(seed)), strict=True):
            p.grad = grad
        norms.append(clip_grad_norm([module], 0.5).item())
        optimizer.step()
    return norms[0], [p.full_tensor().detach() if hasattr(p, "full_tensor") else p.detach() for p in module]


def stage_norm() -> tuple[float, torch.Tensor]:
    """Each rank is a pipeline stage with two of the four tensors."""
    params = [nn.Parameter(t) for t in whole(0)[dist.get_rank() * 2 :][:2]]
    for p, grad in zip(params, whole(1)[dist.get_rank() * 2 :][:2], strict=True):
        p.grad = grad
    norm = clip_grad_norm([nn.ParameterList(params)], 0.5, dist.group.WORLD)
    return norm.item(), torch.cat([p.grad.flatten() for p in params])


@pytest.fixture(scope="module")
def ranks():
    pool = Pool(2)
    yield pool
    pool.close()


@pytest.mark.parametrize("impl", ["for_loop", "foreach", "fused"])
def test_clipped_steps_over_two_meshes_equal_one_process(impl, ranks):
    params = [nn.Parameter(t) for t in whole(0)]
    optimizer = torch.optim.AdamW(params, lr=0.1, betas=(0.9, 0.95), weight_decay=0.1, foreach=False)
    reference = None
    for seed in (1, 2):
        for p, grad in zip(params, whole(seed), strict=True):
            p.grad = grad
        norm = nn.utils.clip_grad_norm_(params, 0.5)
        reference = norm.item() if reference is None else reference
        optimizer.step()
    for norm, found in ranks.run(step_on_two_meshes, 2, impl):
        assert norm == pytest.approx(reference, rel=1e-6)
        for p, q in zip(params, found, strict=True):
            torch.testing.assert_close(p.detach(), q, rtol=1e-5, atol=1e-6)


def test_the_norm_adds_up_over_pipeline_stages(ranks):
    params = [nn.Parameter(t) for t in whole(0)]
    for p, grad in zip(params, whole(1), strict=True):
        p.grad = grad
    reference = nn.utils.clip_grad_norm_(params, 0.5).item()
    (first, head), (second, tail) = ranks.run(stage_norm, 2)
    assert first == second == pytest.approx(reference, rel=1e-6)
    torch.testing.assert_close(torch.cat([head, tail]), torch.cat([p.grad.flatten() for p in params]))


def layout(**parallel: Any) -> TrainConfig:
    return tiny(parallel=parallel, model={"layers": 4}, train={"steps": 5, "deterministic": True})


def run_steps(config: TrainConfig, folder: Path, save_at: int | None, steps: int = 4) -> tuple[int, list[float]]:
    """Train to ``steps`` from the newest checkpoint, if any: (where it went on, the losses since, on every rank)."""
    trainer = setup(config, torch.device("cpu"))
    corpus = open_corpus(config)
    extra = {"data_digest": corpus.digest}
    start = checkpoint.load_latest(folder, trainer.parts, trainer.optimizer, extra) or 0
    losses = []
    for step in range(start + 1, steps + 1):
        loss = trainer.train_step(step, corpus.batches(step, trainer.mesh.dp_rank, config.parallel.dp))["loss"]
        value = torch.zeros(()) if loss is None else loss.detach().clone()
        dist.all_reduce(value, op=dist.ReduceOp.MAX)
        losses.append(value.item())
        if step == save_at:
            checkpoint.save(folder, step, trainer.parts, trainer.optimizer, extra)
    return start, losses


LAYOUTS = {
    "one": (1, {}),
    "fsdp": (2, {"dp_shard": 2}),
    "tp": (2, {"tp": 2}),
    "tp_plain_norms": (2, {"tp": 2, "sequence_parallel": False}),
    "pp_two_stages_a_rank": (2, {"pp": 2, "schedule": "ZBVZeroBubble"}),
}


@pytest.mark.parametrize("source", ["fsdp", "pp_two_stages_a_rank"])
def test_a_checkpoint_goes_on_in_every_layout(source, ranks, tmp_path):
    """Stop at 2, go on to 4: bitwise in the same layout, within 1e-6 in the others."""
    world, parallel = LAYOUTS[source]
    _, unbroken = ranks.run(run_steps, world, layout(**parallel), tmp_path, 2)[0]
    for target, (world, parallel) in LAYOUTS.items():
        for start, losses in ranks.run(run_steps, world, layout(**parallel), tmp_path, None):
            assert start == 2, target
            wanted = unbroken[2:] if target == source else pytest.approx(unbroken[2:], rel=1e-6)
            assert losses == wanted, target
