"""Kernels for many networks at once: batch normalisation, pooling and Adam.

Maps are S×B×H×W×C, S networks. One that is not `active` in this step is left alone; what its part
of an output holds is undefined. `pixels` are B·H·W. `stacked_kernels` calls them.
"""
# ruff: noqa: N803

import triton
import triton.language as tl

# One kernel serves all of these sizes.
SHAPE = ["B", "H", "W", "H_OUT", "W_OUT", "pixels", "rows", "relu", "add"]


@triton.jit
def update_running(mean, var, at, average, variance, pixels, momentum):
    """Moves the running statistics."""
    tl.store(mean + at, (1 - momentum) * tl.load(mean + at) + momentum * average)
    unbiased = variance * (pixels / (pixels - 1.0))
    tl.store(var + at, (1 - momentum) * tl.load(var + at) + momentum * unbiased)


@triton.jit
def finish(v, average, scale, gamma, beta, shortcut, z, at, valid, add_mask, relu):
    """Writes relu(norm(v) + shortcut)."""
    v = (
        ((v - average[None, :]) * (scale * gamma)[None, :] + beta[None, :])
        .to(z.dtype.element_ty)
        .to(tl.float32)
    )
    v += tl.load(shortcut + at, mask=add_mask, other=0.0).to(tl.float32)
    v = tl.maximum(v, v * (1 - relu))
    tl.store(z + at, v.to(z.dtype.element_ty), mask=valid)


@triton.jit
def relu_gradient(dz, z, at, valid, relu):
    """The gradient that comes through the ReLU."""
    g = tl.load(dz + at, mask=valid, other=0.0).to(tl.float32)
    return tl.where(tl.load(z + at, mask=valid, other=0.0) > 0, g, g * (1 - relu))


@triton.jit(do_not_specialize=SHAPE[5:7])
def moments(y, parts, active, pixels, rows, C, R: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr):
    s = tl.program_id(2).to(tl.int64)
    if tl.load(active + s) == 0:
        return
    first, c = tl.program_id(0) * rows, tl.program_id(1) * BC + tl.arange(0, BC)
    y += s * pixels * C
    count, mean, squares = 0.0, tl.zeros((BC,), tl.float32), tl.zeros((BC,), tl.float32)
    for start in range(first, min(first + rows, pixels), BR):
        # Blocks are merged as Chan et al. do: nothing cancels.
        m = start + tl.arange(0, BR)
        valid = (m < min(first + rows, pixels))[:, None]
        v = tl.load(y + m[:, None] * C + c[None, :], mask=valid, other=0.0).to(tl.float32)
        tile_count = tl.sum(tl.where(m < min(first + rows, pixels), 1.0, 0.0), 0)
        average = tl.sum(v, 0) / tile_count
        deviation = tl.where(valid, v - average[None, :], 0.0)
        delta, share = average - mean, tile_count / (count + tile_count)
        mean += delta * share
        squares += tl.sum(deviation * deviation, 0) + delta * delta * count * share
        count += tile_count
    parts += (s * R + tl.program_id(0)) * 2 * C
    tl.store(parts + c, mean)
    tl.store(parts + C + c, squares)


@triton.jit(do_not_specialize=SHAPE[5:])
def normalise(
    y, parts, gamma, beta, shortcut, z, statistics, mean, var, active, p_stride, b_stride, pixels,
    rows, relu, add, eps, momentum, C, R: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    s = tl.program_id(2).to(tl.int64)
    if tl.load(active + s) == 0:
        return
    c, r = tl.program_id(1) * BC + tl.arange(0, BC), tl.arange(0, R)
    counts = tl.minimum(tl.maximum(pixels - r * rows, 0), rows).to(tl.float32)[:, None]
    place = parts + s * R * 2 * C + r[:, None] * 2 * C + c[None, :]
    means = tl.load(place, mask=counts > 0, other=0.0)
    squares = tl.load(place + C, mask=counts > 0, other=0.0)
    average = tl.sum(means * counts, 0) / pixels
    deviation = means - average[None, :]
    variance = (tl.sum(squares, 0) + tl.sum(counts * deviation * deviation, 0)) / pixels
    scale = 1 / tl.sqrt(variance + eps)
    if tl.program_id(0) == 0:
        tl.store(statistics + s * 2 * C + c, average)
        tl.store(statistics + s * 2 * C + C + c, scale)
        update_running(mean, var, s * b_stride + c, average, variance, pixels, momentum)
    m = tl.program_id(0) * BR + tl.arange(0, BR)
    valid = (m < pixels)[:, None]
    at = s * pixels * C + m[:, None] * C + c[None, :]
    v = tl.load(y + at, mask=valid, other=0.0).to(tl.float32)
    p = s * p_stride + c
    add_mask = (m < pixels * add)[:, None]
    finish(
        v, average, scale, tl.load(gamma + p), tl.load(beta + p), shortcut, z, at, valid, add_mask,
        relu,
    )  # fmt: skip


@triton.jit(do_not_specialize=SHAPE[5:])
def normalise_small(
    y, gamma, beta, shortcut, z, statistics, mean, var, active, p_stride, b_stride, pixels, relu,
    add, eps, momentum, C, BR: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    s = tl.program_id(1).to(tl.int64)
    if tl.load(active + s) == 0:
        return
    m, c = tl.arange(0, BR), tl.program_id(0) * BC + tl.arange(0, BC)
    valid = (m < pixels)[:, None]
    at = s * pixels * C + m[:, None] * C + c[None, :]
    v = tl.load(y + at, mask=valid, other=0.0).to(tl.float32)
    average = tl.sum(v, 0) / pixels
    deviation = tl.where(valid, v - average[None, :], 0.0)
    variance = tl.sum(deviation * deviation, 0) / pixels
    scale = 1 / tl.sqrt(variance + eps)
    tl.store(statistics + s * 2 * C + c, average)
    tl.store(statistics + s * 2 * C + C + c, scale)
    update_running(mean, var, s * b_stride + c, average, variance, pixels, momentum)
    p = s * p_stride + c
    add_mask = (m < pixels * add)[:, None]
    finish(
        v, average, scale, tl.load(gamma + p), tl.load(beta + p), shortcut, z, at, valid, add_mask,
        relu,
    )  # fmt: skip


@triton.jit(do_not_specialize=SHAPE[5:])
def sums(
    dz, z, y, statistics, parts, active, pixels, rows, relu, C, R: tl.constexpr, BR: tl.constexpr,
    BC: tl.constexpr,
):  # fmt: skip
    s = tl.program_id(2).to(tl.int64)
    if tl.load(active + s) == 0:
        return
    first, c = tl.program_id(0) * rows, tl.program_id(1) * BC + tl.arange(0, BC)
    average = tl.load(statistics + s * 2 * C + c)[None, :]
    scale = tl.load(statistics + s * 2 * C + C + c)[None, :]
    plain, product = tl.zeros((BC,), tl.float32), tl.zeros((BC,), tl.float32)
    for start in range(first, min(first + rows, pixels), BR):
        m = start + tl.arange(0, BR)
        valid = (m < min(first + rows, pixels))[:, None]
        at = s * pixels * C + m[:, None] * C + c[None, :]
        g = relu_gradient(dz, z, at, valid, relu)
        v = (tl.load(y + at, mask=valid, other=0.0).to(tl.float32) - average) * scale
        plain += tl.sum(g, 0)
        product += tl.sum(g * v, 0)
    parts += (s * R + tl.program_id(0)) * 2 * C
    tl.store(parts + c, plain)
    tl.store(parts + C + c, product)


@triton.jit(do_not_specialize=SHAPE[5:])
def denormalise(
    dz, z, y, statistics, parts, gamma, dy, dshortcut, dgamma, dbeta, active, p_stride, g_stride,
    pixels, rows, relu, add, C, R: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """With one row of parts for each chunk; with none where one block sees all pixels."""
    s = tl.program_id(2).to(tl.int64)
    if tl.load(active + s) == 0:
        return
    m, c = tl.program_id(0) * BR + tl.arange(0, BR), tl.program_id(1) * BC + tl.arange(0, BC)
    average, scale = tl.load(statistics + s * 2 * C + c), tl.load(statistics + s * 2 * C + C + c)
    valid = (m < pixels)[:, None]
    at = s * pixels * C + m[:, None] * C + c[None, :]
    g = relu_gradient(dz, z, at, valid, relu)
    v = (tl.load(y + at, mask=valid, other=0.0).to(tl.float32) - average[None, :]) * scale[None, :]
    if R:
        r = tl.arange(0, R)
        in_use = (r * rows < pixels)[:, None]
        place = parts + s * R * 2 * C + r[:, None] * 2 * C + c[None, :]
        plain = tl.sum(tl.load(place, mask=in_use, other=0.0), 0)
        product = tl.sum(tl.load(place + C, mask=in_use, other=0.0), 0)
    else:
        plain, product = tl.sum(g, 0), tl.sum(tl.where(valid, g * v, 0.0), 0)
    if tl.program_id(0) == 0:
        tl.store(dgamma + s * g_stride + c, product)
        tl.store(dbeta + s * g_stride + c, plain)
    tl.store(dshortcut + at, g.to(dshortcut.dtype.element_ty), mask=(m < pixels * add)[:, None])
    g = g - (plain / pixels)[None, :] - v * (product / pixels)[None, :]
    g = g * (scale * tl.load(gamma + s * p_stride + c))[None, :]
    tl.store(dy + at, g.to(dy.dtype.element_ty), mask=valid)


@triton.jit(do_not_specialize=SHAPE[:5])
def pool(x, y, taps, active, B, H, W, H_OUT, W_OUT, C, BR: tl.constexpr, BC: tl.constexpr):
    s = tl.program_id(2).to(tl.int64)
    if tl.load(active + s) == 0:
        return
    m, c = tl.program_id(0) * BR + tl.arange(0, BR), tl.program_id(1) * BC + tl.arange(0, BC)
    n, r = m // (H_OUT * W_OUT), m % (H_OUT * W_OUT)
    top, left = r // W_OUT * 2 - 1, r % W_OUT * 2 - 1
    best, tap = tl.full((BR, BC), float("-inf"), tl.float32), tl.zeros((BR, BC), tl.int8)
    for t in tl.static_range(9):
        h, v = top + t // 3, left + t % 3
        valid = ((n < B) & (h >= 0) & (h < H) & (v >= 0) & (v < W))[:, None]
        at = ((s * B + n) * H + h) * W + v
        value = tl.load(x + (at * C)[:, None] + c[None, :], mask=valid, other=float("-inf")).to(
            tl.float32
        )
        tap = tl.where(value > best, t, tap).to(tl.int8)
        best = tl.maximum(best, value)
    at = (s * B * H_OUT * W_OUT + m)[:, None] * C + c[None, :]
    tl.store(y + at, best.to(y.dtype.element_ty), mask=(n < B)[:, None])
    tl.store(taps + at, tap, mask=(n < B)[:, None])


@triton.jit(do_not_specialize=SHAPE[:5])
def unpool(dy, taps, dx, active, B, H, W, H_OUT, W_OUT, C, BR: tl.constexpr, BC: tl.constexpr):
    s = tl.program_id(2).to(tl.int64)
    if tl.load(active + s) == 0:
        return
    m, c = tl.program_id(0) * BR + tl.arange(0, BR), tl.program_id(1) * BC + tl.arange(0, BC)
    n, r = m // (H * W), m % (H * W)
    bottom, right = r // W + 1, r % W + 1
    total = tl.zeros((BR, BC), tl.float32)
    for t in tl.static_range(9):
        h, v = bottom - t // 3, right - t % 3
        valid = (n < B) & (h % 2 == 0) & (v % 2 == 0) & (h < 2 * H_OUT) & (v < 2 * W_OUT)
        valid = (valid & (h >= 0) & (v >= 0))[:, None]
        at = (((s * B + n) * H_OUT + h // 2) * W_OUT + v // 2)[:, None] * C + c[None, :]
        is_source = tl.load(taps + at, mask=valid, other=-1) == t
        total += tl.where(is_source, tl.load(dy + at, mask=valid, other=0.0).to(tl.float32), 0.0)
    at = (s * B * H * W + m)[:, None] * C + c[None, :]
    tl.store(dx + at, total.to(dx.dtype.element_ty), mask=(n < B)[:, None])


@triton.jit
def adam(
    values, gradient, direct, means, squares, low, factors, active, stride, first, last, decay,
    DIRECT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    s = tl.program_id(1).to(tl.int64)
    if tl.load(active + s) == 0:
        return
    at = first + tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    valid = at < last
    place = s * stride + at
    rate, correction = tl.load(factors + 2 * s), tl.load(factors + 2 * s + 1)
    w = tl.load(values + place, mask=valid, other=0.0)
    g = tl.load(gradient + place, mask=valid, other=0.0).to(tl.float32) + decay * w
    if DIRECT:
        g += tl.load(direct + place, mask=valid, other=0.0)
    m = tl.load(means + place, mask=valid, other=0.0)
    v = tl.load(squares + place, mask=valid, other=0.0)
    m = 0.9 * m + (1 - 0.9) * g
    v = 0.999 * v + (1 - 0.999) * g * g
    w -= rate * m / (tl.sqrt(v) * correction + 1e-8)
    tl.store(means + place, m, mask=valid)
    tl.store(squares + place, v, mask=valid)
    tl.store(values + place, w, mask=valid)
    tl.store(low + place, w.to(low.dtype.element_ty), mask=valid)
