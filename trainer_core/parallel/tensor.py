"""Tensor parallel with sequence parallel and loss parallel: tables of module name -> style."""

from __future__ import annotations

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from trainer_core.config import TrainConfig
from trainer_core.model import Decoder


def apply_tp(model: Decoder, mesh: DeviceMesh, config: TrainConfig, program: str) -> None:
    """Shard the matrices over ``mesh`` [tp] in place. Activations between blocks are [B, T/CP/TP, dim] with sequence
    parallel, else [B, T/CP, dim] on every rank. ``program`` is the device kind."""
    p = config.parallel
    ends = end_plan(p.sequence_parallel, p.loss_parallel)
    parallelize_module(model, mesh, {name: style for name, style in ends.items() if getattr(model, name) is not None})
    # gloo moves no Float8
    float8_gather = config.precision.float8 == "tensorwise" and program == "cuda"
    for block in model.layers.values():
        parallelize_module(block, mesh, block_plan(p.sequence_parallel, float8_gather))
    if model.embed is not None and config.compile.enable:
        # The embedding's reduce-scatter returns an AsyncCollectiveTensor. Handed to a compiled block as it is, its
        # gradient is lost without a word, and .wait() detaches it; any op on it waits and keeps the gradient.
        model.embed.register_forward_hook(_resolve_async)


def _resolve_async(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
    return output + 0


def block_plan(sequence_parallel: bool, float8_gather: bool) -> dict[str, ParallelStyle]:
    """One block. wq wk wv w1 w3 are cut by columns, wo and w2 by rows.

    ``float8_gather``: with tensorwise Float8 the sequence-parallel all-gather moves Float8 bytes.
    """
    colwise, rowwise, prepare = ColwiseParallel, RowwiseParallel, PrepareModuleInput
    if float8_gather:
        from torchao.float8 import float8_tensor_parallel as float8

        colwise, rowwise = float8.Float8ColwiseParallel, float8.Float8RowwiseParallel
        prepare = float8.PrepareFloat8ModuleInput
    hidden = Shard(1) if sequence_parallel else Replicate()
    plan: dict[str, ParallelStyle] = {
        "attention": prepare(input_layouts=(hidden, None), desired_input_layouts=(Replicate(), None)),
        "attention.wq": colwise(),
        "attention.wk": colwise(),
        "attention.wv": colwise(),
        "attention.wo": rowwise(output_layouts=hidden),
        "ffn": prepare(input_layouts=(hidden,), desired_input_layouts=(Replicate(),)),
        "ffn.w1": colwise(),
        "ffn.w3": colwise(),
        "ffn.w2": rowwise(output_layouts=hidden),
    }
    if sequence_parallel:
        plan |= {"attention_norm": SequenceParallel(), "ffn_norm": SequenceParallel()}
    return plan


def end_plan(sequence_parallel: bool, loss_parallel: bool) -> dict[str, ParallelStyle]:
    """The embedding, cut by vocabulary, and the output projection, whose logits stay cut with loss parallel."""
    hidden = Shard(1) if sequence_parallel else Replicate()
    plan: dict[str, ParallelStyle] = {
        "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=hidden),
        "output": ColwiseParallel(
            input_layouts=hidden,
            output_layouts=Shard(-1) if loss_parallel else Replicate(),
            use_local_output=not loss_parallel,
        ),
    }
    if sequence_parallel:
        plan["norm"] = SequenceParallel()
    return plan
