"""The kernels for many networks at once,
with the tiles that measured best on an H200 with ResNet-18's shapes.

They are written for Triton, which comes with PyTorch's CUDA builds, and compiled when they are
first called. Maps are S×B×H×W×C, weights S×O×h×w×C.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

SLOTS = 24  # networks at most
# Maps of so many channels, or fewer, have this many in memory; a row of a window is one product.
FEW_CHANNELS = 4
BUSY_BLOCKS = 1024  # blocks that keep a GPU busy
LEAST_PIXELS = 512  # pixels of a block's share of a sum
CHUNKS = 32  # parts of a map whose statistics are taken side by side
COLUMNS = 64  # channels that a block handles
ROWS = 64  # pixels that it handles at a time
SMALL_MAPS = (64, 256)  # maps of so many pixels at most are normalised in one go
NARROW_COLUMNS = 32  # channels of a block that does
ENTRIES = 1024  # weights that a block of Adam updates
COMPILERS = 8  # threads


def _convolution() -> Any:
    from fednoro.engine.cuda.stacked import triton_convolution

    return triton_convolution


def _layers() -> Any:
    from fednoro.engine.cuda.stacked import triton_layers

    return triton_layers


_launches: list[tuple[Any, tuple[Any, ...], dict[str, int]]] | None = None


def _launch(kernel: Any, grid: tuple[int, ...], *args: Any, **options: int) -> None:
    if _launches is None:
        kernel[grid](*args, **options)
    else:
        _launches.append((kernel, args, options))


def compile_ahead(device: torch.device, work: Callable[[], object]) -> None:
    """Compiles the kernels that `work` calls, several at a time;
    they are not run, so that its results mean nothing.
    """
    global _launches
    _launches = []
    try:
        work()
        calls = {_signature(*call): call for call in _launches}
    finally:
        _launches = None
    number = torch.cuda.current_device() if device.index is None else device.index
    with ThreadPoolExecutor(
        COMPILERS, initializer=torch.cuda.set_device, initargs=(number,)
    ) as pool:
        for future in [
            pool.submit(k.warmup, *args, grid=(1,), **options)
            for k, args, options in calls.values()
        ]:
            future.result()


def _signature(kernel: Any, args: Sequence[Any], options: Mapping[str, int]) -> Any:
    """Equal for calls that one compiled kernel serves."""
    kinds: list[Any] = []
    for parameter, value in zip(kernel.params, args, strict=True):
        if isinstance(value, Tensor):
            kinds.append((value.dtype, value.data_ptr() % 16 == 0))
        elif parameter.is_constexpr or parameter.do_not_specialize:
            kinds.append(value if parameter.is_constexpr else type(value))
        else:
            kinds.append((type(value), value == 1, value % 16 == 0))
    return kernel.fn.__name__, tuple(kinds), tuple(options.items())


def padded(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Maps as the kernels read them:
    in the type of the weights, and with `FEW_CHANNELS` or many more.
    """
    if x.shape[4] > FEW_CHANNELS:
        return x.to(dtype)
    wide = torch.zeros((*x.shape[:4], FEW_CHANNELS), dtype=dtype, device=x.device)
    wide[..., : x.shape[4]] = x
    return wide


def convolve(x: Tensor, w: Tensor, y: Tensor, active: Tensor, stride: int, pad: int) -> None:
    """Puts x ∗ w into `y`, for maps that are `padded`."""
    (slots, batch, height, width, _), (_, outputs, kh, kw, inputs) = x.shape, w.shape
    pixels, few = batch * y.shape[2] * y.shape[3], FEW_CHANNELS if inputs <= FEW_CHANNELS else 0
    tile, warps = (
        ((128, 64, _power_of_two(kw * few)), 4) if few else _tile(pixels, outputs, inputs, w)
    )
    _launch(
        _convolution().forward, (-(-pixels // tile[0]), outputs // tile[1], slots),
        x, w, y, active, w.stride(0), batch, height, width, *y.shape[2:4], inputs, outputs, kh, kw,
        pad, stride, few, *tile, num_warps=warps, num_stages=3,
    )  # fmt: skip


def convolve_back(dy: Tensor, w: Tensor, dx: Tensor, active: Tensor, stride: int, pad: int) -> None:
    """The gradient for a convolution's input."""
    (slots, batch, height, width, inputs), (_, outputs, kh, kw, _) = dx.shape, w.shape
    pixels = batch * height * width
    tile, warps = _tile(pixels, inputs, outputs, w)
    _launch(
        _convolution().to_input, (-(-pixels // tile[0]), inputs // tile[1], slots),
        dy, w, dx, active, w.stride(0), batch, height, width, *dy.shape[2:4], inputs, outputs, kh,
        kw, pad, stride, *tile, num_warps=warps, num_stages=3,
    )  # fmt: skip


def convolve_weights(
    x: Tensor, dy: Tensor, dw: Tensor, active: Tensor, stride: int, pad: int
) -> None:
    """The gradient for a convolution's weights; maps are `padded`."""
    (slots, batch, height, width, _), (_, outputs, kh, kw, inputs) = x.shape, dw.shape
    pixels, few = batch * dy.shape[2] * dy.shape[3], FEW_CHANNELS if inputs <= FEW_CHANNELS else 0
    tile = (64, _power_of_two(kw * few), 64) if few else (64 if outputs < 128 else 128, 64, 64)
    tiles, columns = outputs // tile[0], kh if few else kh * kw * (inputs // tile[1])
    # By rule, not by how many there are: the order of a sum shows in its last bits.
    parts = (
        max(1, min(pixels // LEAST_PIXELS, -(-BUSY_BLOCKS // (tiles * columns * SLOTS))))
        if few
        else 1
    )
    share = -(-pixels // parts // tile[2]) * tile[2]
    parts = -(-pixels // share)
    out = dw if parts == 1 else torch.empty((slots, parts, *dw.shape[1:]), device=dw.device)
    _launch(
        _convolution().to_weights, (tiles * parts, columns, slots),
        x, dy, out, active, out.stride(0), share, batch, height, width, *dy.shape[2:4], inputs,
        outputs, kh, kw, pad, stride, few, *tile, num_warps=4, num_stages=3,
    )  # fmt: skip
    if parts > 1:
        dw.copy_(out.sum(1))


def _tile(
    pixels: int, outputs: int, inputs: int, weights: Tensor
) -> tuple[tuple[int, int, int], int]:
    """Pixels, outputs and inputs of a product's tile, and the warps that work on it."""
    if outputs < 128:
        return (128, 64, 64), 4
    if pixels >= 512 or inputs % 128:
        return (64, 128, 64), 4
    deep = 128 if weights.itemsize == 2 else 64  # the memory of a block holds no more
    return (64, 128 if pixels >= 128 else 64, deep), 8


def _power_of_two(least: int) -> int:
    return 1 << max(4, (least - 1).bit_length())


def normalise(
    y: Tensor, gamma: Tensor, beta: Tensor, shortcut: Tensor | None, z: Tensor, statistics: Tensor,
    mean: Tensor, var: Tensor, active: Tensor, eps: float, momentum: float, relu: bool,
) -> None:  # fmt: skip
    """Puts relu(norm(y) + shortcut) into `z`;
    the maps' own statistics go to `statistics` and into the running ones.
    """
    (slots, *_, channels), (pixels, rows) = y.shape, _chunks(y)
    strides = gamma.stride(0), mean.stride(0)
    arguments = (
        gamma, beta, y if shortcut is None else shortcut, z, statistics, mean, var, active,
        *strides,
    )  # fmt: skip
    flags = int(relu), int(shortcut is not None), eps, momentum, channels
    block = _block(pixels)
    if block:
        _launch(
            _layers().normalise_small, (channels // NARROW_COLUMNS, slots),
            y, *arguments, pixels, *flags, block, NARROW_COLUMNS, num_warps=4,
        )  # fmt: skip
        return
    parts, columns = (
        y.new_empty((slots, CHUNKS, 2, channels), dtype=statistics.dtype),
        channels // COLUMNS,
    )
    _launch(
        _layers().moments, (-(-pixels // rows), columns, slots),
        y, parts, active, pixels, rows, channels, CHUNKS, ROWS, COLUMNS, num_warps=4,
    )  # fmt: skip
    _launch(
        _layers().normalise, (-(-pixels // ROWS), columns, slots),
        y, parts, *arguments, pixels, rows, *flags, CHUNKS, ROWS, COLUMNS, num_warps=4,
    )  # fmt: skip


def normalise_back(
    dz: Tensor, z: Tensor, y: Tensor, statistics: Tensor, gamma: Tensor, dy: Tensor,
    dshortcut: Tensor | None, dgamma: Tensor, dbeta: Tensor, active: Tensor, relu: bool,
) -> None:  # fmt: skip
    """The gradients of `normalise`."""
    (slots, *_, channels), (pixels, rows) = y.shape, _chunks(y)
    block, parts = _block(pixels), statistics
    if not block:
        parts = y.new_empty((slots, CHUNKS, 2, channels), dtype=statistics.dtype)
        _launch(
            _layers().sums, (-(-pixels // rows), channels // COLUMNS, slots),
            dz, z, y, statistics, parts, active, pixels, rows, int(relu), channels, CHUNKS, ROWS,
            COLUMNS, num_warps=4,
        )  # fmt: skip
    width = NARROW_COLUMNS if block else COLUMNS
    _launch(
        _layers().denormalise, (-(-pixels // (block or ROWS)), channels // width, slots),
        dz, z, y, statistics, parts, gamma, dy, dy if dshortcut is None else dshortcut, dgamma,
        dbeta, active, gamma.stride(0), dgamma.stride(0), pixels, rows, int(relu),
        int(dshortcut is not None), channels, 0 if block else CHUNKS, block or ROWS, width,
        num_warps=4,
    )  # fmt: skip


def _chunks(y: Tensor) -> tuple[int, int]:
    """Pixels of a map, and of a part of it."""
    pixels = y.shape[1] * y.shape[2] * y.shape[3]
    return pixels, max(ROWS, -(-pixels // CHUNKS))


def _block(pixels: int) -> int:
    """Pixels of a block that holds a whole map; 0 where that is too large."""
    return next((size for size in SMALL_MAPS if pixels <= size), 0)


def pool(x: Tensor, y: Tensor, taps: Tensor, active: Tensor) -> None:
    """The largest of 3×3 pixels, every other row and column, with a border;
    `taps` says which of the nine it was.
    """
    (slots, batch, height, width, channels), (_, _, rows, columns, _) = x.shape, y.shape
    _launch(
        _layers().pool, (-(-batch * rows * columns // ROWS), channels // COLUMNS, slots),
        x, y, taps, active, batch, height, width, rows, columns, channels, ROWS, COLUMNS,
        num_warps=4,
    )  # fmt: skip


def unpool(dy: Tensor, taps: Tensor, dx: Tensor, active: Tensor) -> None:
    """The gradient of `pool`."""
    (slots, batch, height, width, channels), (_, _, rows, columns, _) = dx.shape, dy.shape
    _launch(
        _layers().unpool, (-(-batch * height * width // ROWS), channels // COLUMNS, slots),
        dy, taps, dx, active, batch, height, width, rows, columns, channels, ROWS, COLUMNS,
        num_warps=4,
    )  # fmt: skip


def adam(
    values: Tensor, gradient: Tensor, direct: Tensor | None, means: Tensor, squares: Tensor,
    low: Tensor, factors: Tensor, active: Tensor, trainable: int, decay: float,
) -> None:  # fmt: skip
    """One update of the first `trainable` entries of each row by `gradient`,
    plus `direct` if there is one.

    `factors` are each row's rate and its correction.
    """
    # What is known to be a multiple of 16 is read in large pieces.
    aligned_end = trainable // 16 * 16
    for first, last in ((0, aligned_end), (aligned_end, trainable)):
        if first < last:
            _launch(
                _layers().adam, (-(-(last - first) // ENTRIES), len(values)),
                values, gradient, values if direct is None else direct, means, squares, low,
                factors, active, values.stride(0), first, last, decay, direct is not None, ENTRIES,
                num_warps=4,
            )  # fmt: skip
