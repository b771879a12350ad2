"""A single-file PyTorch training loop of the same model, as one writes it without this suite: the yardstick."""

from __future__ import annotations

import torch
import torch.nn as nn
import torch.nn.functional as F

from trainer_core.config import ModelConfig


class Layer(nn.Module):
    def __init__(self, m: ModelConfig):
        super().__init__()
        self.m, kv = m, m.kv_heads * m.head_dim
        self.n1, self.n2 = nn.RMSNorm(m.dim, eps=m.norm_eps), nn.RMSNorm(m.dim, eps=m.norm_eps)
        self.q, self.k, self.v = (nn.Linear(m.dim, n, bias=False) for n in (m.dim, kv, kv))
        self.o = nn.Linear(m.dim, m.dim, bias=False)
        self.gate, self.up = nn.Linear(m.dim, m.ffn_dim, bias=False), nn.Linear(m.dim, m.ffn_dim, bias=False)
        self.down = nn.Linear(m.ffn_dim, m.dim, bias=False)

    def forward(self, x, cos, sin):
        b, t, d = x.shape
        h = self.n1(x)
        q, k, v = (w(h).view(b, t, -1, self.m.head_dim).transpose(1, 2) for w in (self.q, self.k, self.v))
        q, k = turn(q, cos, sin), turn(k, cos, sin)
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.o(a.transpose(1, 2).reshape(b, t, d))
        h = self.n2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


def turn(x, cos, sin):
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1)


class Plain:
    """Forward, backward, clip and AdamW on one process."""

    def __init__(self, m: ModelConfig, seq_len: int):
        self.embed = nn.Embedding(m.vocab_size, m.dim)
        self.layers = nn.ModuleList(Layer(m) for _ in range(m.layers))
        self.norm, self.out = nn.RMSNorm(m.dim, eps=m.norm_eps), nn.Linear(m.dim, m.vocab_size, bias=False)
        self.all = nn.ModuleList([self.embed, self.layers, self.norm, self.out])
        angle = torch.arange(seq_len)[:, None] * m.rope_theta ** (-torch.arange(0, m.head_dim, 2) / m.head_dim)
        self.cos, self.sin = angle.cos(), angle.sin()
        self.optimizer = torch.optim.AdamW(self.all.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)

    def step(self, tokens, labels):
        self.optimizer.zero_grad()
        h = self.embed(tokens)
        for layer in self.layers:
            h = layer(h, self.cos, self.sin)
        logits = self.out(self.norm(h))
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(self.all.parameters(), 1.0)
        self.optimizer.step()
        return loss.item()
