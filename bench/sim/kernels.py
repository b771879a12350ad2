"""From an aten call to the kernel it launches: kind, FLOPs, bytes, dimensions."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch

from bench.sim.events import Op, OpKind, Phase, Tensor

DTYPES = {
    torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.float64: "fp64", torch.int64: "int64",
    torch.uint64: "int64", torch.int32: "int32", torch.uint32: "int32", torch.int16: "int16", torch.int8: "int8",
    torch.uint8: "int8", torch.bool: "bool", torch.float8_e4m3fn: "fp8", torch.float8_e5m2: "fp8",
    torch.float8_e8m0fnu: "fp8",
}  # fmt: skip

GEMMS = {"mm", "addmm", "bmm", "baddbmm", "_scaled_mm"}
FLASH = {
    "_scaled_dot_product_flash_attention": 0, "_scaled_dot_product_flash_attention_backward": 1,
    "_scaled_dot_product_flash_attention_for_cpu": 0, "_scaled_dot_product_flash_attention_for_cpu_backward": 1,
}  # fmt: skip
"""Fused attention ops: 1 for the backward, whose operands come after the gradient."""
NO_KERNEL = {
    "_unsafe_view", "detach_", "lift_fresh", "set_", "resize_", "_to_copy_view", "is_same_size", "_local_scalar_dense",
    "empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided", "wait_tensor", "record_stream",
    "_record_function_enter_new", "_record_function_exit", "sym_size", "sym_stride", "sym_numel", "device",
}  # fmt: skip
"""Calls without a kernel, besides views (``_unsafe_view`` is one that the schema does not mark)."""
COPIES = {
    "copy_", "clone", "_to_copy", "cat", "stack", "split_with_sizes_copy", "all_gather_copy_in", "chunk_cat",
    "_chunk_cat", "_foreach_copy_", "slice_backward", "select_backward", "constant_pad_nd", "repeat", "_foreach_copy",
    "slice_scatter", "index_select", "roll", "flip",
}  # fmt: skip
FILLS = {"fill_", "zero_", "zeros", "ones", "full", "zeros_like", "ones_like", "full_like", "new_zeros", "new_full",
         "new_ones", "scalar_tensor", "arange", "normal_", "uniform_", "_foreach_zero_", "eye", "tril"}  # fmt: skip
REDUCTIONS = {
    "sum", "mean", "amax", "amin", "max", "min", "norm", "linalg_vector_norm", "var_mean", "_log_softmax", "_softmax",
    "_log_softmax_backward_data", "_softmax_backward_data", "logsumexp", "argmax", "nll_loss_forward", "any", "all",
    "native_layer_norm", "native_layer_norm_backward", "_fused_rms_norm", "_fused_rms_norm_backward", "prod",
    "_foreach_norm", "cumsum", "logcumsumexp", "_foreach_max", "aminmax",
}  # fmt: skip
EMBEDDINGS = {"embedding", "embedding_dense_backward", "index", "index_put", "index_put_", "_index_put_impl_", "gather",
              "scatter", "scatter_", "nll_loss_backward", "scatter_add", "index_add"}  # fmt: skip
OVERWRITES = COPIES | FILLS
"""Calls that do not read what they write into."""

BLOCK_ELEMENTS, BLOCKS = 65536, 320
"""A multi-tensor kernel takes up to 320 chunks of 65,536 elements a launch (ATen's MultiTensorApply)."""


def name_of(func: Any) -> str:
    """``aten::mm`` -> ``mm``."""
    return str(func._schema.name).partition("::")[2]


def tensors(value: Any) -> Iterator[torch.Tensor]:
    """Tensors in (nested lists of) arguments, in order."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors(item)


def describe(t: torch.Tensor) -> Tensor:
    return tuple(t.shape), DTYPES.get(t.dtype, str(t.dtype).removeprefix("torch."))


def nbytes(t: torch.Tensor) -> int:
    """Bytes a kernel touches: an expanded dimension is read once."""
    n = t.element_size()
    for size, stride in zip(t.shape, t.stride(), strict=True):
        if stride != 0 or size == 0:
            n *= size
    return n


def kind_of(name: str, phase: Phase) -> OpKind:
    if name in GEMMS:
        return "gemm"
    if name in FLASH:
        return "attention"
    if phase == "optim" and name.startswith(("_foreach", "_fused_adam")):
        return "optimizer"
    for kind, names in (("copy", COPIES), ("reduction", REDUCTIONS), ("embedding", EMBEDDINGS)):
        if name in names:
            return kind  # type: ignore[return-value]
    return "pointwise"


def gemm_dims(name: str, ins: tuple[Tensor, ...]) -> tuple[int, int, int, int]:
    """(batch, m, n, k) of ins[0] [.., m, k] @ ins[1] [.., k, n]; the bias of addmm comes first."""
    a, b = (ins[1][0], ins[2][0]) if name in ("addmm", "baddbmm") else (ins[0][0], ins[1][0])
    return (a[0] if len(a) == 3 else 1), a[-2], b[-1], a[-1]


def attention_dims(name: str, ins: tuple[Tensor, ...], causal: bool) -> tuple[int, ...]:
    """(batch, heads, kv_heads, q_len, kv_len, head_dim, causal, backward) from q [B, H, Q, D] and k [B, KV, K, D]."""
    backward = FLASH[name]
    q, k = ins[backward][0], ins[backward + 1][0]
    return q[0], q[1], k[1], q[2], k[2], q[3], int(causal), backward


def attention_flops(dims: tuple[int, ...]) -> float:
    """Two matmuls forward, five backward (the scores are formed again), 2 FLOPs a multiply-add.

    Causal counts the pairs a query may see, q (q + 1) / 2 when both lengths are equal.
    """
    b, h, _, q, k, d, causal, backward = dims
    pairs = q * k - q * (q - 1) / 2 if causal else q * k
    return (5 if backward else 2) * 2.0 * b * h * d * pairs


def is_causal(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """The flag's place in the schemas of the fused attention ops (dropout_p comes before it)."""
    if "is_causal" in kwargs:
        return bool(kwargs["is_causal"])
    flags = [a for a in args if isinstance(a, bool)]
    return flags[0] if flags else False


def make_op(
    name: str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    outputs: list[torch.Tensor],
    phase: Phase,
    module: str,
    mutates: tuple[int, ...] = (),
    sharded: bool = False,
) -> Op:
    """The kernel behind one call. ``mutates``: positions of the arguments that are written in place."""
    inputs = [*tensors(args), *tensors(tuple(kwargs.values()))]
    ins, outs = tuple(map(describe, inputs)), tuple(map(describe, outputs))
    kind = kind_of(name, phase)
    written_args = [t for i in mutates for t in tensors(args[i] if i < len(args) else ())]
    written_args += list(tensors(kwargs.get("out", ())))
    written_ids = {id(t) for t in written_args}
    reads = [t for t in inputs if not (id(t) in written_ids and name in OVERWRITES)]
    written = float(sum(nbytes(t) for t in written_args) or sum(map(nbytes, outputs)))
    read = 0.0 if name in FILLS else float(sum(map(nbytes, reads)))
    flops = 0.0
    dims: tuple[int, ...] = ()
    if kind == "gemm":
        dims = gemm_dims(name, ins)
        flops = 2.0 * math.prod(dims)
    elif kind == "attention":
        dims = attention_dims(name, ins, is_causal(name, args, kwargs))
        flops = attention_flops(dims)
    elif name == "all_gather_copy_in":  # the output is as long as all shards, only this rank's is copied
        read = written = float(sum(map(nbytes, tensors(args[0]))))
    elif name == "embedding":
        read = written  # only the looked-up rows are touched
    elif name in ("nll_loss_forward", "gather"):
        read = float(sum(nbytes(t) for t in inputs if not t.is_floating_point()) + 2 * written)
    launches = 1
    if name.startswith(("_foreach", "_fused_adam")):
        elements = sum(t.numel() for t in (outputs or written_args))
        launches = max(1, -(-elements // (BLOCK_ELEMENTS * BLOCKS)))
    return Op(name, kind, ins, outs, flops, read, written, dims, module, phase, (), launches, False, sharded)
