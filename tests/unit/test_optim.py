"""The optimizer's choices and the learning rate's course, on one process. Norms over meshes: tests/dist."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from trainer_core.config import OptimConfig, TrainConfig, TrainSection
from trainer_core.optim import build_optimizer, clip_grad_norm, lr_at, set_lr


def parts() -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Linear(4, 3), nn.Sequential(nn.Linear(3, 2), nn.LayerNorm(2))]


def fill_grads(modules: list[nn.Module]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    params = [p for m in modules for p in m.parameters()]
    for p in params:
        p.grad = torch.randn(p.shape, generator=generator)
    return [p.grad for p in params]


@pytest.mark.parametrize("impl", ["for_loop", "foreach", "fused"])
def test_implementations_follow_the_adamw_equations(impl):
    """Three steps against AdamW written out (Loshchilov and Hutter 2019, algorithm 2), decay on every parameter."""
    c = OptimConfig(impl=impl, lr=0.01, weight_decay=0.3)
    modules = parts()
    optimizer = build_optimizer(c, modules)
    params = [p for m in modules for p in m.parameters()]
    expected = [p.detach().double().clone() for p in params]
    m, v = ([torch.zeros_like(e) for e in expected] for _ in range(2))
    for step in range(1, 4):
        grads = fill_grads(modules)
        set_lr(optimizer, c.lr / step)
        optimizer.step()
        for e, mi, vi, g in zip(expected, m, v, grads, strict=True):
            mi.lerp_(g.double(), 1 - c.beta1)
            vi.mul_(c.beta2).add_(g.double() ** 2, alpha=1 - c.beta2)
            e.mul_(1 - c.lr / step * c.weight_decay)
            e.sub_(c.lr / step * (mi / (1 - c.beta1**step)) / ((vi / (1 - c.beta2**step)).sqrt() + c.eps))
    for p, e in zip(params, expected, strict=True):
        torch.testing.assert_close(p.detach().double(), e, rtol=1e-5, atol=1e-7)


def test_a_rank_without_parameters_has_an_optimizer():
    optimizer = build_optimizer(OptimConfig(), [nn.Module()])
    optimizer.step()
    assert clip_grad_norm([nn.Module()], 1.0).item() == 0.0


def test_clipping_is_torchs_on_plain_tensors():
    ours, theirs = parts(), parts()
    fill_grads(ours), fill_grads(theirs)
    reference = nn.utils.clip_grad_norm_([p for m in theirs for p in m.parameters()], 0.5)
    assert clip_grad_norm(ours, 0.5) == pytest.approx(reference.item(), rel=1e-6)
    for a, b in zip(ours, theirs, strict=True):
        for p, q in zip(a.parameters(), b.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad)


def test_no_clipping_only_measures():
    modules = parts()
    before = [g.clone() for g in fill_grads(modules)]
    norm = clip_grad_norm(modules, 0.0)
    assert norm.item() == pytest.approx(sum((g**2).sum().item() for g in before) ** 0.5, rel=1e-6)
    after = [p.grad for m in modules for p in m.parameters()]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_norm_of_nan_is_nan():
    modules = parts()
    fill_grads(modules)[0][0, 0] = float("nan")
    assert clip_grad_norm(modules, 1.0).isnan()


@pytest.mark.parametrize(("decay", "middle"), [("cosine", 0.55), ("linear", 0.55), ("none", 1.0)])
def test_learning_rate(decay, middle):
    """Ramp 1/10 .. 10/10, the middle of the decay half way between 1 and 0.1, the end at 0.1."""
    c = TrainConfig(optim=OptimConfig(lr=1.0, decay=decay), train=TrainSection(steps=110))
    assert [lr_at(c, s) for s in (1, 5, 10)] == pytest.approx([0.1, 0.5, 1.0])
    assert lr_at(c, 60) == pytest.approx(middle)
    assert lr_at(c, 110) == pytest.approx(1.0 if decay == "none" else 0.1)
    course = [lr_at(c, s) for s in range(10, 111)]
    assert course == sorted(course, reverse=True)


def test_learning_rate_without_a_ramp_or_longer_than_the_run():
    c = TrainConfig(optim=OptimConfig(lr=1.0, lr_warmup_steps=0), train=TrainSection(steps=4))
    assert lr_at(c, 4) == pytest.approx(0.1) and 0.1 < lr_at(c, 1) < 1
    longer = replace(c, optim=replace(c.optim, lr_warmup_steps=8))
    assert lr_at(longer, 4) == 0.5
