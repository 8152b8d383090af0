"""Scores and the order of floats, for the kernels that choose experts; chunks are tuples of
vectors."""

import triton
import triton.language as tl

GREATEST = tl.constexpr(2**31 - 1)


@triton.jit
def order_key(x):
    bits = (x + 0.0).to(tl.int32, bitcast=True)  # -0 + 0 = +0
    return tl.where(x != x, GREATEST, bits ^ ((bits >> 31) & GREATEST))


@triton.jit
def from_key(key):
    return (key ^ ((key >> 31) & GREATEST)).to(tl.float32, bitcast=True)


@triton.jit
def fold_max(chunks):
    best = chunks[0]
    for c in tl.static_range(1, len(chunks)):
        best = tl.maximum(best, chunks[c])
    return best


@triton.jit
def softmax_parts(xs):
    """(maximum, sum of exp(x - maximum)) over chunks; the maximum is NaN where any is."""
    keys = ()
    for c in tl.static_range(len(xs)):
        keys = keys + (order_key(xs[c]),)
    top = from_key(tl.max(fold_max(keys)))
    total = exp(xs[0] - top)
    for c in tl.static_range(1, len(xs)):
        total += exp(xs[c] - top)
    return top, tl.sum(total)


@triton.jit
def exp(x):
    return tl.exp2(x * 1.4426950408889634)  # exp guards denormal results, at four instructions


@triton.jit
def softplus(x):
    """log(1 + exp(x)); the logarithm alone would lose what 1 + exp rounds away."""
    e = exp(-tl.abs(x))
    u = 1.0 + e
    return tl.maximum(x, 0.0) + tl.where(u == 1.0, e, tl.log(u) * (e / (u - 1.0)))


@triton.jit
def sigmoid(x):
    root = tl.rsqrt(1.0 + exp(-x))  # as close as 1 / (1 + exp(-x)), at half the instructions
    return root * root


@triton.jit
def log_score(x, SCORING: tl.constexpr):
    """log of the score, up to a constant per row."""
    if SCORING == "softmax":
        return x
    elif SCORING == "sigmoid":
        return -softplus(-x)
    else:
        return 0.5 * tl.where(x < -16.0, x, tl.log(softplus(x)))


@triton.jit
def score(x, top, total, SCORING: tl.constexpr):
    if SCORING == "softmax":
        return exp(x - top) / total
    elif SCORING == "sigmoid":
        return sigmoid(x)
    else:
        return exp(log_score(x, SCORING))


@triton.jit
def log_score_slope(x, SCORING: tl.constexpr):
    """d log_score / dx"""
    if SCORING == "softmax":
        return tl.full(x.shape, 1.0, tl.float32)
    elif SCORING == "sigmoid":
        return sigmoid(-x)
    else:
        return 0.5 * tl.where(x < -16.0, 1.0, sigmoid(x) / softplus(x))
