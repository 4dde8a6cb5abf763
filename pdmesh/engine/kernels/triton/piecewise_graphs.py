"""Piecewise graphs of steps that are no plain decode steps: a graph for each bucket of tokens between two attentions.

    graph 0      embedding, norm, qkv, rope, keys and values of layer 0 to the pool        ─► layer 0 is signalled
    launches     attention of layer 0: its grid follows from this step's sequences
    graph 1      output, norm, gate and up, silu · mul, down; norm, qkv, rope, store of layer 1   ─► layer 1 is signalled
    launches     attention of layer 1
    ...
    graph L      output, norm, gate and up, silu · mul, down of the last layer
    launches     norm and head of the rows of logits

Chunks of prompts, drafts that are verified (trees too), and any mix of them with decode rows differ for attention alone: all else
sees tokens. So a graph serves steps of as many tokens as its bucket or fewer, and attention has the launches, and the grid,
that it has without graphs. A layer is one replay and one to three launches in place of nine to eleven.

Where it pays: a launch costs Python some 10 us, so a layer launched one by one takes the host 90 to 110 us. The device multiplies
T tokens with the P weights of a layer in 2 T P / (operations a second), but reads them in bytes(P) / bandwidth at least. For P =
218 M (8B) that is 0.55 us a token, so 200 tokens take as long as their launches; at 61 M (1B) 710 tokens do. Above, the host is
ahead of the device anyway, and a bucket's padding would cost what a graph saves. Up to there it cannot: a step that is padded
to `hidden_at` tokens takes the device no longer than the launches would have taken the host. Hence buckets are powers of two up
to `hidden_at`, or up to all that a step may hold. (790 TFLOP/s is what an H200 was measured to do in bfloat16 elsewhere, 10 us
are what Python and Triton are known for. Timed was Python alone, on a CPU with kernels and products that do nothing: 107 us a
layer launched one by one, 22 us with pieces; launches and replays themselves come on top. So `hidden_at` is rather too low.)

Memory: what crosses from graph to graph lies in buffers of the largest bucket; all else is in one pool of memory that all
graphs share, as no two run at once. For 8B and 256 tokens 7 buckets are 7 * 33 graphs of 6 to 8 launches each.

Bits: the launches of a bucket are the same whether recorded or not. Those of unquantized products may differ between buckets on a
GPU, as cuBLAS chooses its kernels by the number of rows; words (linear.py) change kernels at powers of two, as buckets do.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from pdmesh.engine.kernels.triton.cuda_graphs import Recorder, Recording, Work, is_same_memory
from pdmesh.engine.kernels.triton.metadata import NO_ADAPTER, NOWHERE, PARTS_OF_TOKENS, StepMetadata
from pdmesh.engine.kernels.triton.step import Rows, StepOutput, TritonStep, tell
from pdmesh.engine.kv_cache.events import LayerReadiness
from pdmesh.engine.models.layers import ROW_MULTIPLE

LAUNCH_S = 10e-6
LAUNCHES_PER_LAYER = 11
OPERATIONS_PER_S = 790e12
_TILE = 64  # rows of a product's tile, which are all computed


def hidden_at(layer_weights: int) -> int:
    """Return the tokens of a step whose products with a layer's weights take the device as long as its launches take Python."""
    return max(1, int(LAUNCHES_PER_LAYER * LAUNCH_S * OPERATIONS_PER_S / (2 * max(1, layer_weights))))


def token_buckets(most: int, layer_weights: int) -> tuple[int, ...]:
    """Return ascending buckets: powers of two from 4 on; the last holds `hidden_at`, or `most` tokens if those are fewer."""
    hidden = hidden_at(layer_weights)
    last = min(most + -most % ROW_MULTIPLE, hidden + -hidden % _TILE)
    buckets = [ROW_MULTIPLE]
    while buckets[-1] < last:
        buckets.append(min(2 * buckets[-1], last))
    return tuple(buckets)


class PieceGraphs:
    """Run steps of one model on one pool. `recorder` None: the same launches over the same buffers, made one by one."""

    def __init__(self, step: TritonStep, kv: Tensor, buckets: Sequence[int], recorder: Recorder | None) -> None:
        """`buckets` are ascending multiples of 4, at least one."""
        self._step, self._kv, self._recorder, self._buckets = step, kv, recorder, tuple(buckets)
        self._message = torch.zeros(PARTS_OF_TOKENS * buckets[-1], dtype=torch.int32, device=kv.device)
        token_ids, positions, slots, adapter_slots = self._message.view(PARTS_OF_TOKENS, -1)
        self._rows = Rows.of(token_ids, positions, slots, step.decoder, step.groups_of(adapter_slots))
        self._rows.attended.zero_()  # attention does not write rows of padding
        self._ready: dict[tuple[int, bool], list[Work]] = {}  # the recorded pieces by bucket, and with adapters or without

    @property
    def num_bytes(self) -> int:
        """Return the bytes of the buffers, without those of the graphs."""
        return self._message.nbytes + self._rows.num_bytes

    def is_of(self, kv: Tensor) -> bool:
        """Return whether the graphs are recorded on this pool."""
        return is_same_memory(self._kv, kv)

    def bucket_of(self, num_tokens: int) -> int | None:
        """Return the bucket of so many tokens; None: more than any holds."""
        return next((bucket for bucket in self._buckets if bucket >= num_tokens), None)

    def run(self, meta: StepMetadata, signal: LayerReadiness | None = None, *, adapted: bool = False) -> StepOutput:
        """Run a step like TritonStep.run; the metadata has as many tokens as a bucket. Outputs are new tensors, which stay."""
        works, rows = self._pieces(meta.num_tokens, adapted), self._rows_of(meta.num_tokens, adapted)
        plan = self._step.attention.plan_of(meta)
        self._message[: PARTS_OF_TOKENS * meta.num_tokens].copy_(meta.of_tokens)
        for index in range(self._step.num_layers):
            works[index]()
            tell(signal, index, self._kv.device)
            plan.attend(index, rows.query, self._kv, rows.attended)
        (last,) = works[-1]()
        return self._step.output(last, rows.states, meta.logits_rows)

    def prepare(self) -> None:
        """Record all buckets, the largest first, whose memory the others share. Tokens go nowhere: nothing is written."""
        for bucket in reversed(self._buckets):
            for adapted in self._step.kinds:
                self._pieces(bucket, adapted)

    def _pieces(self, num_tokens: int, adapted: bool) -> list[Work]:
        """Return the pieces of a bucket, recorded if need be. Recording runs a piece more than once, and pieces change what they
        read; so all are recorded before the step's own numbers are copied."""
        if (num_tokens, adapted) not in self._ready:
            self._clear(num_tokens)
            self._ready[num_tokens, adapted] = [self._recorded(work) for work in self._works(num_tokens, adapted)]
        return self._ready[num_tokens, adapted]

    def _recorded(self, work: Work) -> Work:
        return work if self._recorder is None else partial(_replayed, self._recorder.record(work))

    def _works(self, num_tokens: int, adapted: bool) -> list[Work]:
        step, rows = self._step, self._rows_of(num_tokens, adapted)

        def piece(index: int) -> tuple[Tensor, ...]:
            step.piece(index, rows, self._kv)
            return ()

        return [*(partial(piece, index) for index in range(step.num_layers)), lambda: (step.end(rows),)]

    def _rows_of(self, num_tokens: int, adapted: bool) -> Rows:
        """Return views of the first rows, the same at each call. A message of T tokens is 4 T numbers, as in StepMetadata's
        buffer."""
        token_ids, positions, slots, adapter_slots = self._parts(num_tokens)
        rows, groups = self._rows, self._rows.groups if adapted else None
        return Rows(
            token_ids,
            positions,
            slots,
            rows.states[:num_tokens],
            rows.query[:num_tokens],
            rows.attended[:num_tokens],
            groups=None if groups is None else groups.over(adapter_slots),
        )

    def _parts(self, num_tokens: int) -> Tensor:
        return self._message[: PARTS_OF_TOKENS * num_tokens].view(PARTS_OF_TOKENS, num_tokens)

    def _clear(self, num_tokens: int) -> None:
        token_ids, positions, slots, adapter_slots = self._parts(num_tokens)
        adapter_slots.fill_(NO_ADAPTER)
        token_ids.zero_()
        positions.zero_()
        slots.fill_(NOWHERE)


def _replayed(recording: Recording) -> tuple[Tensor, ...]:
    recording.replay()
    return recording.output
