"""One Llama-3 decoder, whole or one pipeline stage of it: shapes and initialisation. Counts are in counts.py."""

from __future__ import annotations

import hashlib

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from trainer_core.config import ModelConfig


class CausalAttention(nn.Module):
    """Scaled dot-product attention over a whole sequence. Context parallel puts another module in its place."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [B, H, T, D], k and v [B, KV, T, D] -> [B, H, T, D]."""
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])


def rotate(x: Tensor, rope: Tensor) -> Tensor:
    """Rotary position embedding of x [B, T, H, D] by rope [T, 2, D/2] (cos, sin), halves paired as (i, i + D/2)."""
    cos, sin = rope[:, None, 0], rope[:, None, 1]
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1).to(x.dtype)


class Attention(nn.Module):
    def __init__(self, m: ModelConfig):
        super().__init__()
        self.head_dim = m.head_dim
        self.wq = nn.Linear(m.dim, m.heads * m.head_dim, bias=False)
        self.wk = nn.Linear(m.dim, m.kv_heads * m.head_dim, bias=False)
        self.wv = nn.Linear(m.dim, m.kv_heads * m.head_dim, bias=False)
        self.wo = nn.Linear(m.heads * m.head_dim, m.dim, bias=False)
        self.core = CausalAttention()

    def forward(self, x: Tensor, rope: Tensor) -> Tensor:
        """x [B, T/CP, dim] -> the same. Under TP the projections hold H/TP and KV/TP heads."""
        b, t, _ = x.shape
        q = rotate(self.wq(x).view(b, t, -1, self.head_dim), rope)
        k = rotate(self.wk(x).view(b, t, -1, self.head_dim), rope)
        v = self.wv(x).view(b, t, -1, self.head_dim)
        out = self.core(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
        return self.wo(out.transpose(1, 2).reshape(b, t, -1))


class FeedForward(nn.Module):
    def __init__(self, m: ModelConfig):
        super().__init__()
        self.w1 = nn.Linear(m.dim, m.ffn_dim, bias=False)
        self.w3 = nn.Linear(m.dim, m.ffn_dim, bias=False)
        self.w2 = nn.Linear(m.ffn_dim, m.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    def __init__(self, m: ModelConfig):
        super().__init__()
        self.attention_norm = nn.RMSNorm(m.dim, eps=m.norm_eps)
        self.attention = Attention(m)
        self.ffn_norm = nn.RMSNorm(m.dim, eps=m.norm_eps)
        self.ffn = FeedForward(m)

    def forward(self, x: Tensor, rope: Tensor) -> Tensor:
        h = x + self.attention(self.attention_norm(x), rope)
        return h + self.ffn(self.ffn_norm(h))


class Decoder(nn.Module):
    """The layers of one stage; the first also embeds tokens, the last also norms and projects to logits.

    Layers keep their global number as name at every layout, so that names, initial values and checkpoints agree.
    ``project=False`` returns the normed hidden state: the chunked loss projects it piece by piece.
    """

    def __init__(self, m: ModelConfig, layers: list[int], first: bool = True, last: bool = True, project: bool = True):
        super().__init__()
        self.config, self.project = m, project
        self.embed = nn.Embedding(m.vocab_size, m.dim) if first else None
        self.layers = nn.ModuleDict({str(i): Block(m) for i in layers})
        self.norm = nn.RMSNorm(m.dim, eps=m.norm_eps) if last else None
        self.output = nn.Linear(m.dim, m.vocab_size, bias=False) if last else None
        self.register_buffer("rope", torch.empty(0), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Tokens [B, T/CP] (first stage) or hidden [B, T/CP, dim] -> logits [B, T/CP, V] (last stage) or hidden."""
        h = self.embed(x) if self.embed is not None else x
        for block in self.layers.values():
            h = block(h, self.rope)
        if self.norm is not None:
            h = self.norm(h)
        if self.output is not None and self.project:
            h = self.output(h)
        return h

    def set_positions(self, positions: Tensor) -> None:
        """Fill the rotary table for the positions [T/CP] that this rank holds."""
        m = self.config
        frequency = m.rope_theta ** (-torch.arange(0, m.head_dim, 2, device=positions.device).double() / m.head_dim)
        angle = positions.double()[:, None] * frequency
        self.rope = torch.stack([angle.cos(), angle.sin()], dim=1).float()


def clean_name(name: str) -> str:
    """The parameter's or module's name without what wrappers put into it."""
    return name.replace("_checkpoint_wrapped_module.", "").replace("_orig_mod.", "")


def init_std(name: str, m: ModelConfig) -> float:
    """Standard deviation of a parameter's initial normal; 0 means ones (norms).

    0.02 as in GPT-2, residual projections divided by sqrt(2 (layer + 1)), logits by sqrt(dim).
    """
    if "norm" in name:
        return 0.0
    if name.startswith("embed"):
        return 1.0
    if name.startswith("output"):
        return m.dim**-0.5
    layer = int(name.split(".")[1])
    return 0.02 / (2 * (layer + 1)) ** 0.5 if name.endswith(("wo.weight", "w2.weight")) else 0.02


@torch.no_grad()
def init_weights(model: nn.Module, m: ModelConfig, seed: int) -> None:
    """Initial values that depend on the seed and the parameter's name alone, never on the layout.

    Each rank draws the whole parameter and keeps its shard: no communication, one whole parameter of extra memory.
    """
    for name, parameter in model.named_parameters():
        name = clean_name(name)
        target = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        std = init_std(name, m)
        if std == 0:
            target.fill_(1.0)
            continue
        digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
        generator = torch.Generator(device=target.device).manual_seed(int.from_bytes(digest[:8], "little") >> 1)
        whole = torch.empty(parameter.shape, device=target.device).normal_(std=std, generator=generator)
        if isinstance(parameter, DTensor):
            shape, offset = compute_local_shape_and_global_offset(
                parameter.shape, parameter.device_mesh, parameter.placements
            )
            whole = whole[tuple(slice(o, o + s) for o, s in zip(offset, shape, strict=True))]
        target.copy_(whole)


def is_block_linear(module: nn.Module, name: str) -> bool:
    """The linear layers that a precision recipe converts: all but the output projection."""
    return isinstance(module, nn.Linear) and not name.endswith("output")
