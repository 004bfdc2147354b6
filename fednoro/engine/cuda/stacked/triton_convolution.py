"""Kernels that convolve the maps of many networks at once, each with its own weights.

Every tensor has the networks first and channels last: maps are S×B×H×W×C, weights S×O×h×w×C. A
network that is not `active` in this step is left alone; what its part of an output holds is
undefined. `stacked_kernels` calls them.
"""
# ruff: noqa: E741, N803

import triton
import triton.language as tl

SHAPE = ["B", "H", "W", "H_OUT", "W_OUT", "KH", "KW", "PAD", "share"]  # one kernel serves them all


@triton.jit(do_not_specialize=SHAPE)
def forward(
    x, w, y, active, w_stride, B, H, W, H_OUT, W_OUT, C, O, KH, KW, PAD,
    STRIDE: tl.constexpr, FEW: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    s = tl.program_id(2).to(tl.int64)
    if tl.load(active + s) == 0:
        return
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    o = tl.program_id(1) * BN + tl.arange(0, BN)
    q = tl.arange(0, BK)
    pixels = B * H_OUT * W_OUT
    n, r = m // (H_OUT * W_OUT), m % (H_OUT * W_OUT)
    top, left = r // W_OUT * STRIDE - PAD, r % W_OUT * STRIDE - PAD
    w += s * w_stride
    total = tl.zeros((BM, BN), tl.float32)
    if FEW:  # pixels that are neighbours in a row are neighbours in memory
        x += s * B * H * W * FEW
        column, channel = q // FEW, q % FEW
        weights = ((column < KW) & (channel < C))[:, None]
        w += o[None, :] * (KH * KW * C) + (column * C + channel)[:, None]
        for i in range(KH):
            h, v = top + i, left[:, None] + column[None, :]
            valid = (
                ((m < pixels) & (h >= 0) & (h < H))[:, None]
                & (column < KW)[None, :]
                & (v >= 0)
                & (v < W)
            )
            a = tl.load(
                x + (((n * H + h) * W + left) * FEW)[:, None] + q[None, :], mask=valid, other=0.0
            )
            b = tl.load(w + i * KW * C, mask=weights, other=0.0)
            total = tl.dot(a, b, total)
    else:
        x += s * B * H * W * C
        w += o[None, :] * (KH * KW * C) + q[:, None]
        for part in range(KH * KW * (C // BK)):
            t, c = part // (C // BK), part % (C // BK) * BK
            h, v = top + t // KW, left + t % KW
            valid = (m < pixels) & (h >= 0) & (h < H) & (v >= 0) & (v < W)
            a = tl.load(
                x + (((n * H + h) * W + v) * C + c)[:, None] + q[None, :],
                mask=valid[:, None],
                other=0.0,
            )
            b = tl.load(w + t * C + c)
            total = tl.dot(a, b, total)
    y += s * pixels * O
    tl.store(
        y + m[:, None] * O + o[None, :], total.to(y.dtype.element_ty), mask=(m < pixels)[:, None]
    )


@triton.jit(do_not_specialize=SHAPE[:-1])
def to_input(
    dy, w, dx, active, w_stride, B, H, W, H_OUT, W_OUT, C, O, KH, KW, PAD,
    STRIDE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    s = tl.program_id(2).to(tl.int64)
    if tl.load(active + s) == 0:
        return
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    c = tl.program_id(1) * BN + tl.arange(0, BN)
    q = tl.arange(0, BK)
    pixels = B * H * W
    n, r = m // (H * W), m % (H * W)
    bottom, right = r // W + PAD, r % W + PAD
    dy += s * B * H_OUT * W_OUT * O
    w += s * w_stride + q[:, None] * (KH * KW * C) + c[None, :]
    total = tl.zeros((BM, BN), tl.float32)
    for part in range(KH * KW * (O // BK)):
        t, o = part // (O // BK), part % (O // BK) * BK
        h, v = bottom - t // KW, right - t % KW
        valid = (m < pixels) & (h >= 0) & (v >= 0)
        if STRIDE > 1:
            valid = valid & (h % STRIDE == 0) & (v % STRIDE == 0)
            h, v = h // STRIDE, v // STRIDE
        valid = valid & (h < H_OUT) & (v < W_OUT)
        at = ((n * H_OUT + h) * W_OUT + v) * O + o
        a = tl.load(dy + at[:, None] + q[None, :], mask=valid[:, None], other=0.0)
        b = tl.load(w + o * (KH * KW * C) + t * C)
        total = tl.dot(a, b, total)
    dx += s * pixels * C
    tl.store(
        dx + m[:, None] * C + c[None, :], total.to(dx.dtype.element_ty), mask=(m < pixels)[:, None]
    )


@triton.jit(do_not_specialize=SHAPE)
def to_weights(
    x, dy, dw, active, dw_stride, share, B, H, W, H_OUT, W_OUT, C, O, KH, KW, PAD,
    STRIDE: tl.constexpr, FEW: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    s = tl.program_id(2).to(tl.int64)
    if tl.load(active + s) == 0:
        return
    # Pixels may be shared out to several blocks; their sums are added up later.
    split, tile = tl.program_id(0) // (O // BM), tl.program_id(0) % (O // BM)
    o, q = tile * BM + tl.arange(0, BM), tl.arange(0, BK)
    pixels = B * H_OUT * W_OUT
    dy += s * pixels * O
    if FEW:
        x += s * B * H * W * FEW
        t, e = tl.program_id(1) * KW, tl.arange(0, BN)
    else:
        x += s * B * H * W * C
        t, e = tl.program_id(1) // (C // BN), tl.program_id(1) % (C // BN) * BN + tl.arange(0, BN)
    total = tl.zeros((BM, BN), tl.float32)
    for first in range(split * share, min((split + 1) * share, pixels), BK):
        m = first + q
        n, r = m // (H_OUT * W_OUT), m % (H_OUT * W_OUT)
        h, v = r // W_OUT * STRIDE - PAD + t // KW, r % W_OUT * STRIDE - PAD + t % KW
        valid = (m < pixels) & (h >= 0) & (h < H)
        if FEW:
            column = v[:, None] + (e // FEW)[None, :]
            inside = valid[:, None] & (column >= 0) & (column < W) & (e // FEW < KW)[None, :]
            b = tl.load(
                x + (((n * H + h) * W + v) * FEW)[:, None] + e[None, :], mask=inside, other=0.0
            )
        else:
            inside = (valid & (v >= 0) & (v < W))[:, None]
            b = tl.load(
                x + (((n * H + h) * W + v) * C)[:, None] + e[None, :], mask=inside, other=0.0
            )
        a = tl.load(dy + m[:, None] * O + o[None, :], mask=(m < pixels)[:, None], other=0.0)
        total = tl.dot(tl.trans(a), b, total)
    dw += s * dw_stride + split * O * KH * KW * C + o[:, None] * (KH * KW * C) + t * C
    if FEW:
        column, channel = e // FEW, e % FEW
        tl.store(
            dw + (column * C + channel)[None, :],
            total,
            mask=((column < KW) & (channel < C))[None, :],
        )
    else:
        tl.store(dw + e[None, :], total)
