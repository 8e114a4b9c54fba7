"""One block of keys through an online softmax in FP32: the step that the attention kernels repeat."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def attend(
    b_q,  # [BM, D]
    b_max,  # [BM], largest score so far, before scaling; -inf: no key yet
    b_sum,  # [BM], sum of 2^(SCALE * (score - max))
    b_out,  # [BM, D], the values' sum with these weights
    p_k,  # [BN, D]
    p_v,  # [BN, D]
    m_key,  # [BN, 1], keys that may be read; None where all may
    m_score,  # [BM, BN], keys that a row sees; None where each sees all
    SCALE: tl.constexpr,  # of scores, times log2(e): a number that Inductor passes to a kernel is FP64
    WIDE: tl.constexpr,  # matrix products in FP32, for the interpreter, which has none in BF16
):
    """The next ``b_max, b_sum, b_out``; keys outside of ``m_key`` are not read, outside of ``m_score`` do not count."""
    if m_key is None:
        b_k = tl.load(p_k)
        b_v = tl.load(p_v)
    else:
        b_k = tl.load(p_k, mask=m_key, other=0.0)
        b_v = tl.load(p_v, mask=m_key, other=0.0)
    if WIDE:
        b_score = tl.dot(b_q.to(tl.float32), tl.trans(b_k.to(tl.float32)), input_precision="ieee")  # [BM, BN]
    else:
        b_score = tl.dot(b_q, tl.trans(b_k), input_precision="ieee")
    if m_score is not None:
        b_score = tl.where(m_score, b_score, float("-inf"))
    b_new = tl.maximum(b_max, tl.max(b_score, 1))
    b_zero = tl.where(b_new == float("-inf"), 0.0, b_new * SCALE)  # a row without a key has weights of 0, not NaN
    b_weight = tl.exp2(b_score * SCALE - b_zero[:, None])
    b_old = tl.exp2(b_max * SCALE - b_zero)
    b_sum = b_sum * b_old + tl.sum(b_weight, 1)
    b_out = b_out * b_old[:, None]
    if WIDE:
        b_weight = b_weight.to(b_v.dtype).to(tl.float32)
        b_out += tl.dot(b_weight, b_v.to(tl.float32), input_precision="ieee")
    else:
        b_out = tl.dot(b_weight.to(b_v.dtype), b_v, b_out, input_precision="ieee")
    return b_new, b_sum, b_out
