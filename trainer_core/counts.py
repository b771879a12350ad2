"""Parameters, FLOPs and state bytes of a Llama-3 decoder, in closed form and without torch."""

from __future__ import annotations

from typing import Any

from trainer_core.config import ModelConfig, TrainConfig

GIB = 1024**3


def block_params(m: ModelConfig) -> int:
    """One layer: wq and wo (dim x dim), wk and wv (dim x kv_heads head_dim), w1 w2 w3 (dim x ffn), two RMSNorms."""
    attention = 2 * m.dim * m.heads * m.head_dim + 2 * m.dim * m.kv_heads * m.head_dim
    return attention + 3 * m.dim * m.ffn_dim + 2 * m.dim


def embedding_params(m: ModelConfig) -> int:
    return m.vocab_size * m.dim


def params(m: ModelConfig) -> int:
    """All parameters: embedding, layers, final norm, output projection (untied)."""
    return 2 * embedding_params(m) + m.layers * block_params(m) + m.dim


def gemm_params(m: ModelConfig) -> int:
    """Parameters that are a GEMM operand: no norms, and no embedding (a lookup)."""
    return embedding_params(m) + m.layers * (block_params(m) - 2 * m.dim)


def attention_flops_per_token(m: ModelConfig, seq_len: int, causal: bool) -> float:
    """Forward FLOPs of the two attention matmuls, all layers: 2 matmuls x 2 FLOPs x heads x head_dim x T.

    They scale with *query* heads. ``causal`` counts the lower triangle only, T(T+1)/2 of T^2 pairs.
    """
    pairs = (seq_len + 1) / 2 if causal else seq_len
    return m.layers * 4 * m.heads * m.head_dim * pairs


def flops_per_token(m: ModelConfig, seq_len: int, causal: bool) -> float:
    """Forward and backward model FLOPs a token (backward is twice the forward), without recomputation.

    Every GEMM parameter costs 2 FLOPs forward and 4 backward; attention as :func:`attention_flops_per_token`. Norms,
    activations, rotary, softmax and the optimizer are left out (Megatron-LM appendix; PaLM appendix B).
    """
    return 6 * gemm_params(m) + 3 * attention_flops_per_token(m, seq_len, causal)


def torchtitan_flops_per_token(m: ModelConfig, seq_len: int) -> float:
    """torchtitan's convention: 6 (N - embedding) + 12 layers heads head_dim T; norms counted as GEMM parameters."""
    return 6 * (params(m) - embedding_params(m)) + 12 * m.layers * m.heads * m.head_dim * seq_len


def recompute_flops_per_token(c: TrainConfig, causal: bool) -> float:
    """Extra forward FLOPs a token that activation checkpointing spends: they enter HFU, never MFU.

    ``full`` recomputes every block but its last matmul (nothing needs w2's output again, so torch stops before it),
    ``every_k`` one block in k, ``selective`` every second matmul of a block (attention and the other matmuls are
    kept). The output projection is outside the blocks.
    """
    m = c.model
    matmuls = 2 * (block_params(m) - 2 * m.dim - m.dim * m.ffn_dim)
    attention = attention_flops_per_token(m, c.data.seq_len, causal) / m.layers
    if c.ac.mode == "full":
        return m.layers * (matmuls + attention)
    if c.ac.mode == "every_k":
        return len(range(0, m.layers, c.ac.k)) * (matmuls + attention)
    if c.ac.mode == "selective":
        return m.layers * 2 * sum(selective_recomputed(m))
    return 0.0


def selective_recomputed(m: ModelConfig) -> list[int]:
    """Parameters of the matmuls that selective AC recomputes: the 2nd, 4th and 6th of wq wk wv wo w1 w3 w2."""
    q, kv, ffn = m.dim * m.heads * m.head_dim, m.dim * m.kv_heads * m.head_dim, m.dim * m.ffn_dim
    return [q, kv, kv, q, ffn, ffn, ffn][1::2]


def state_gib(c: TrainConfig) -> dict[str, float]:
    """GiB of fp32 parameters, gradients and Adam moments on one rank, on average: sharded over FSDP, TP and PP.

    Left out: activations, gathered bf16 copies, buffers, and that stages and shards are uneven (norms stay whole
    under TP, the embedding sits on the first stage).
    """
    p = c.parallel
    local = params(c.model) / (p.fsdp * p.tp * p.pp)
    gib = {"params": 4 * local / GIB, "grads": 4 * local / GIB, "optimizer": 8 * local / GIB}
    return {**gib, "total": sum(gib.values())}


def float8_layers(c: TrainConfig) -> dict[str, list[Any]]:
    """Which linear layers Float8 converts, and why the others are skipped."""
    kinds = ("attention.wq", "attention.wk", "attention.wv", "attention.wo", "ffn.w1", "ffn.w3", "ffn.w2")
    names = [f"layers.{i}.{kind}" for i in range(c.model.layers) for kind in kinds]
    if c.precision.float8 == "off":
        return {"converted": [], "skipped": []}
    return {"converted": names, "skipped": [{"name": "output", "reason": "the logits keep full precision"}]}
