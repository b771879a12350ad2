"""Checkpoints on one rank: the run goes on bitwise, a partial one is never taken. More ranks: tests/dist."""

import logging

import pytest
import torch
import torch.distributed as dist
from torch import nn

from trainer_core import checkpoint
from trainer_core.config import ConfigError, ModelConfig, OptimConfig
from trainer_core.model import Decoder, init_weights
from trainer_core.optim import build_optimizer

TINY = ModelConfig("tiny", dim=16, layers=4, heads=2, kv_heads=1, ffn_dim=32, vocab_size=32)


@pytest.fixture(scope="module", autouse=True)
def one_rank(tmp_path_factory):
    store = tmp_path_factory.mktemp("group") / "store"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def build(impl: str = "foreach", seed: int = 0, stages=((0, 1, 2, 3),)) -> tuple[list[nn.Module], torch.optim.AdamW]:
    """The tiny decoder, whole or in stages, with its optimizer."""
    last = len(stages) - 1
    parts = [Decoder(TINY, list(layers), first=i == 0, last=i == last) for i, layers in enumerate(stages)]
    for part in parts:
        part.set_positions(torch.arange(8))
        init_weights(part, TINY, seed)
    return parts, build_optimizer(OptimConfig(impl=impl, lr=0.01), parts)


def train(parts: list[nn.Module], optimizer: torch.optim.AdamW, steps: range) -> list[float]:
    losses = []
    for step in steps:
        h = torch.randint(32, (2, 8), generator=torch.Generator().manual_seed(step))
        for part in parts:
            h = part(h)
        loss = h.float().logsumexp(-1).mean() + 0.01 * torch.rand(())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("resumed", ["for_loop", "foreach", "fused"])
def test_resume_goes_on_bitwise(resumed, tmp_path):
    """3 + 3 steps equal 6, with the random numbers drawn in between; a resumed run may take another implementation
    (whose arithmetic may differ in the last bit)."""
    torch.manual_seed(5)
    parts, optimizer = build()
    train(parts, optimizer, range(3))
    checkpoint.save(tmp_path, 3, parts, optimizer, {})
    unbroken = train(parts, optimizer, range(3, 6))
    torch.manual_seed(99)
    parts, optimizer = build(resumed, seed=1)
    assert checkpoint.load_latest(tmp_path, parts, optimizer) == 3
    assert optimizer.param_groups[0]["lr"] == 0.01 and optimizer.state[parts[0].norm.weight]["step"] == 3
    losses = train(parts, optimizer, range(3, 6))
    assert losses == unbroken if resumed == "foreach" else losses == pytest.approx(unbroken, rel=1e-6)


def test_two_parts_and_one_part_are_the_same_checkpoint(tmp_path):
    """Two stages on a rank, saved; one whole model goes on from it, and the other way round."""
    two = ((0, 1), (2, 3))
    for source, target in (((0, 1, 2, 3),), two), (two, ((0, 1, 2, 3),)):
        folder = tmp_path / str(len(source))
        torch.manual_seed(5)
        parts, optimizer = build(stages=source)
        train(parts, optimizer, range(2))
        checkpoint.save(folder, 2, parts, optimizer, {})
        unbroken = train(parts, optimizer, range(2, 4))
        parts, optimizer = build(seed=1, stages=target)
        assert checkpoint.load_latest(folder, parts, optimizer) == 2
        assert train(parts, optimizer, range(2, 4)) == unbroken


def damage_marker(path):
    (path / "complete.json").unlink()


def damage_data(path):
    file = next(path.glob("*.distcp"))
    file.write_bytes(file.read_bytes()[:-100])


DAMAGE = [(damage_marker, "not written to its end"), (damage_data, "missing or cut")]


@pytest.mark.parametrize(("damage", "said"), DAMAGE)
def test_a_partial_checkpoint_is_ignored_with_a_message(damage, said, tmp_path, caplog):
    parts, optimizer = build()
    checkpoint.save(tmp_path, 1, parts, optimizer, {})
    damage(checkpoint.save(tmp_path, 2, parts, optimizer, {}))
    with caplog.at_level(logging.WARNING):
        assert checkpoint.load_latest(tmp_path, parts, optimizer) == 1
    assert said in caplog.text and "step-00000002" in caplog.text
    checkpoint.save(tmp_path, 2, parts, optimizer, {})
    assert checkpoint.load_latest(tmp_path, parts, optimizer) == 2


def test_the_newest_two_are_kept(tmp_path):
    parts, optimizer = build()
    damage_marker(checkpoint.save(tmp_path, 1, parts, optimizer, {}))
    for step in (2, 10, 100):
        checkpoint.save(tmp_path, step, parts, optimizer, {})
    assert [p.name for p in sorted(tmp_path.iterdir())] == ["step-00000010", "step-00000100"]
    assert checkpoint.load_latest(tmp_path, parts, optimizer) == 100


def test_no_checkpoint_is_no_error(tmp_path):
    assert checkpoint.load_latest(tmp_path / "none", *build()) is None


def test_other_data_is_refused(tmp_path):
    parts, optimizer = build()
    checkpoint.save(tmp_path, 1, parts, optimizer, {"data_digest": "abc"})
    assert checkpoint.load_latest(tmp_path, parts, optimizer, {"data_digest": "abc"}) == 1
    with pytest.raises(ConfigError, match="data_digest abc, this run has xyz"):
        checkpoint.load_latest(tmp_path, parts, optimizer, {"data_digest": "xyz"})


def test_a_seed_gives_every_layout_one_start(tmp_path):
    parts, _ = build(seed=7)
    checkpoint.save_seed(tmp_path / "seed", parts)
    wanted = parts[0].state_dict()
    others, _ = build(seed=8, stages=((0,), (1, 2, 3)))
    checkpoint.load_seed(tmp_path / "seed", others)
    found = {k: v for part in others for k, v in part.state_dict().items()}
    assert found.keys() == wanted.keys() and all(torch.equal(found[k], wanted[k]) for k in wanted)


def test_a_seed_that_does_not_fit_is_named(tmp_path):
    with pytest.raises(ConfigError, match="there is no such folder"):
        checkpoint.load_seed(tmp_path / "none", build()[0])
    checkpoint.save_seed(tmp_path, build()[0])
    with pytest.raises(ConfigError, match=r"weight is absent, needed is \[3\]"):
        checkpoint.load_seed(tmp_path, [nn.LayerNorm(3)])
    wider = Decoder(ModelConfig("wider", 16, 4, 2, 1, 48, 32), [0])
    with pytest.raises(ConfigError, match=r"ffn.w1.weight is \[32, 16\], needed is \[48, 16\]"):
        checkpoint.load_seed(tmp_path, [wider])
