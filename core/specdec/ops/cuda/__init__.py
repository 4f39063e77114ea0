"""Triton forms of the operators in ``specdec.ops``: same signatures, shapes and result dtypes, rounded where those round.

``specdec.ops.select`` decides which form runs. Modules here import triton, so only ``specdec.ops`` imports them, inside a
function. A kernel takes any sizes (blocks are the next power of two, masked), computes in float32 and adds in a fixed order:
equal operands give equal bits, eager or replayed, whatever else is in the batch.
"""
