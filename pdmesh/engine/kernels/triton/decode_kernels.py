# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"
"""The kernel of decode_buffers.py: a step's message to where the step's other kernels read it."""

import triton
import triton.language as tl


@triton.jit
def unpack_kernel(
    message, token_ids, positions, slots, context_lens, logits_rows, block_tables, drawn, num_rows, table_stride,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Program: BLOCK rows. message [7, num_rows]: see decode_buffers.Line. A token below 0, -1 - r, is what row r drew last."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < num_rows
    token = tl.load(message + at, mask=inside, other=0)
    before = inside & (token < 0)
    token = tl.where(before, tl.load(drawn + (-1 - token), mask=before, other=0), token)
    tl.store(token_ids + at, token, mask=inside)
    tl.store(positions + at, tl.load(message + num_rows + at, mask=inside, other=0), mask=inside)
    tl.store(slots + at, tl.load(message + 2 * num_rows + at, mask=inside, other=0), mask=inside)
    tl.store(context_lens + at, tl.load(message + 3 * num_rows + at, mask=inside, other=0), mask=inside)
    tl.store(logits_rows + at, tl.load(message + 4 * num_rows + at, mask=inside, other=0), mask=inside)
    column = tl.load(message + 5 * num_rows + at, mask=inside, other=-1)
    block = tl.load(message + 6 * num_rows + at, mask=inside, other=0)
    tl.store(block_tables + at.to(tl.int64) * table_stride + column, block, mask=inside & (column >= 0))
