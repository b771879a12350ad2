"""Fusion rules on small graphs whose kernels Inductor's documentation and generated code make known."""

from bench.sim.events import Collective, Op
from bench.sim.fusion import Node, fuse

T, D = 64, 32
X = ((T, D), "bf16")
ROW = ((T, 1), "fp32")
ONE = ((1,), "fp32")


def op(name, kind, inputs, outputs):
    return Op(name, kind, tuple(inputs), tuple(outputs))


def rmsnorm(x=0, base=10):
    """x -> base+4: square, mean over the row, rsqrt, scale, weight."""
    full = ((T, D), "fp32")
    return [
        Node(op("to", "pointwise", [X], [full]), (x,), (base,)),
        Node(op("pow", "pointwise", [full], [full]), (base,), (base + 1,)),
        Node(op("mean", "reduction", [full], [ROW]), (base + 1,), (base + 2,)),
        Node(op("rsqrt", "pointwise", [ROW], [ROW]), (base + 2,), (base + 3,)),
        Node(op("mul", "pointwise", [full, ROW], [X]), (base, base + 3), (base + 4,)),
    ]


def test_rmsnorm_is_one_kernel_that_reads_and_writes_once():
    gemm = Node(op("mm", "gemm", [X, ((D, D), "bf16")], [X]), (14, 1), (20,))
    kernels = fuse([*rmsnorm(), gemm], keep={20})
    assert [k.op.name for k in kernels] == ["fused_reduction", "mm"]
    norm = kernels[0].op
    assert (norm.bytes_read, norm.bytes_written) == (T * D * 2, T * D * 2)


def test_an_intermediate_that_is_saved_is_written():
    kernels = fuse(rmsnorm(), keep={13, 14})
    assert sum(k.op.bytes_written for k in kernels) == T * D * 2 + T * 4
    assert len(kernels) == 1


def test_swiglu_between_gemms_is_one_kernel():
    w = ((D, D), "bf16")
    nodes = [
        Node(op("mm", "gemm", [X, w], [X]), (0, 1), (2,)),
        Node(op("mm", "gemm", [X, w], [X]), (0, 3), (4,)),
        Node(op("silu", "pointwise", [X], [X]), (2,), (5,)),
        Node(op("mul", "pointwise", [X, X], [X]), (5, 4), (6,)),
        Node(op("mm", "gemm", [X, w], [X]), (6, 7), (8,)),
    ]
    kernels = fuse(nodes, keep={8})
    assert [k.op.name for k in kernels] == ["mm", "mm", "fused_pointwise", "mm"]
    assert kernels[2].op.bytes_read == 2 * T * D * 2 and kernels[2].op.bytes_written == T * D * 2


def test_amax_is_a_barrier_before_the_cast():
    fp8 = ((T, D), "fp8")
    nodes = [
        Node(op("abs", "pointwise", [X], [X]), (0,), (1,)),
        Node(op("amax", "reduction", [X], [ONE]), (1,), (2,)),
        Node(op("reciprocal", "pointwise", [ONE], [ONE]), (2,), (3,)),
        Node(op("mul", "pointwise", [X, ONE], [X]), (0, 3), (4,)),
        Node(op("to", "pointwise", [X], [fp8]), (4,), (5,)),
    ]
    kernels = fuse(nodes, keep={5})
    assert [k.op.name for k in kernels] == ["fused_reduction", "fused_pointwise"]
    assert kernels[0].op.launches == 2
    assert kernels[1].op.bytes_read == T * D * 2 + 4 and kernels[1].op.bytes_written == T * D


def test_readers_of_one_buffer_share_a_kernel_but_not_across_dimensions():
    row, column = ((T,), "fp32"), ((D,), "fp32")
    both = [
        Node(op("sum", "reduction", [X], [row]), (0,), (1,)),
        Node(op("amax", "reduction", [X], [row]), (0,), (2,)),
        Node(op("sum", "reduction", [X], [column]), (0,), (3,)),
    ]
    kernels = fuse(both, keep={1, 2, 3})
    assert sorted(k.members for k in kernels) == [(0, 1), (2,)]


def test_no_fusion_across_a_collective_or_into_a_cycle():
    gather = Collective("all_gather", T * D * 2, "tp", 2, 1)
    nodes = [
        Node(op("relu", "pointwise", [X], [X]), (0,), (1,)),
        Node(gather, (1,), (2,)),
        Node(op("add", "pointwise", [X, X], [X]), (0, 2), (3,)),
    ]
    kernels = fuse(nodes, keep={1, 3})
    assert [k.members for k in kernels] == [(0,), (1,), (2,)]


def test_a_result_of_many_buffers_is_realized_once():
    nodes = [Node(op("add5", "pointwise", [X] * 5, [X]), (0, 1, 2, 3, 4), (5,)),
             Node(op("sum", "reduction", [X], [((D,), "fp32")]), (5,), (6,)),
             Node(op("sum", "reduction", [X], [((T,), "fp32")]), (5,), (7,))]  # fmt: skip
    kernels = fuse(nodes, keep={6, 7})
    assert sum(k.op.bytes_read for k in kernels) == 6 * T * D * 2


def test_a_compiled_cross_entropy_never_writes_the_log_probabilities():
    # Forward: logits are read once for the row maximum, once for the sum and looked up; only rows are written.
    logits, wide, labels = ((T, D), "bf16"), ((T, D), "fp32"), ((T, 1), "int64")
    forward = [
        Node(op("to", "pointwise", [logits], [wide]), (0,), (1,)),
        Node(op("amax", "reduction", [wide], [ROW]), (1,), (2,)),
        Node(op("sub", "pointwise", [wide, ROW], [wide]), (1, 2), (3,)),
        Node(op("exp", "pointwise", [wide], [wide]), (3,), (4,)),
        Node(op("sum", "reduction", [wide], [ROW]), (4,), (5,)),
        Node(op("log", "pointwise", [ROW], [ROW]), (5,), (6,)),
        Node(op("sub", "pointwise", [wide, ROW], [wide]), (3, 6), (7,)),
        Node(op("gather", "embedding", [wide, labels], [ROW]), (7, 8), (9,)),
        Node(op("neg", "pointwise", [ROW], [ROW]), (9,), (10,)),
    ]
    kernels = fuse(forward, keep={2, 6, 10})
    assert sum(k.op.bytes_written for k in kernels) == 3 * T * 4
    assert sum(k.op.bytes_read for k in kernels) < 2.5 * T * D * 2
    # Backward: softmax less one at the label, in one kernel.
    backward = [
        Node(op("full", "pointwise", [], [wide]), (), (20,)),
        Node(op("scatter", "embedding", [wide, labels], [wide]), (20, 8), (21,)),
        Node(op("sub", "pointwise", [logits, ROW], [wide]), (0, 6), (22,)),
        Node(op("add", "pointwise", [wide, wide], [wide]), (21, 22), (23,)),
        Node(op("to", "pointwise", [wide], [logits]), (23,), (24,)),
    ]
    kernels = fuse(backward, keep={24})
    assert len(kernels) == 1
    assert kernels[0].op.bytes_written == T * D * 2 and kernels[0].op.bytes_read == T * D * 2 + T * 4 + T * 8
