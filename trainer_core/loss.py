"""Next-token cross entropy, token-weighted: plain, compiled, or in chunks that never hold all logits at once."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from trainer_core.config import TrainConfig
from trainer_core.data import IGNORE_INDEX
from trainer_core.model import Decoder


def token_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """logits [B, T, V], labels [B, T] -> the *sum* of the losses of the tokens that count, in fp32."""
    return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), ignore_index=IGNORE_INDEX, reduction="sum")


class Loss:
    """A rank's share of the global mean loss: sum over its tokens / ``tokens``, the global count, set for each step.

    Shares of microbatches, accumulation steps and ranks add up, so uneven token counts are weighted right.
    """

    def __init__(self, config: TrainConfig, stages: dict[int, Decoder]):
        self.tokens = torch.ones(())
        self.chunks = config.train.loss_chunks
        p = config.parallel
        self.sequence_shards = p.tp if p.sequence_parallel else 1
        last = stages.get(p.stages - 1)
        self.output = last.output if last is not None else None
        self.token_loss = torch.compile(token_loss) if config.compile.loss else token_loss

    def __call__(self, output: Tensor, labels: Tensor) -> Tensor:
        """``output``: logits [B, T/CP, V], or with chunks the hidden state [B, T/CP(/TP), dim]."""
        if self.chunks == 1:
            total = self.token_loss(output, labels)
        else:
            hidden = output.to_local() if isinstance(output, DTensor) else output
            # a chunk takes the same part of every tp rank's shard, so its labels are not one run
            labels = labels.unflatten(1, (self.sequence_shards, self.chunks, -1))
            total = sum(
                (
                    checkpoint(self._chunk, part, labels[:, :, i].flatten(1), use_reentrant=False)
                    for i, part in enumerate(hidden.chunk(self.chunks, dim=1))
                ),
                start=torch.zeros((), device=hidden.device),
            )
        if isinstance(total, DTensor):
            total = total.full_tensor()
        return total / self.tokens

    def _chunk(self, hidden: Tensor, labels: Tensor) -> Tensor:
        assert self.output is not None
        total = self.token_loss(self.output(hidden), labels)
        return total.full_tensor() if isinstance(total, DTensor) else total
