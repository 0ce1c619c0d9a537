"""Peak rates of this CPU, measured with the products that vLLM runs on it: a data sheet for a machine without one.

All figures are medians over repetitions in one process with the engine's number of threads. `measure` runs in a worker
process (`slimqwen.recipe.worker`), because the threads of OpenMP are fixed when torch is imported.
"""

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from slimqwen.host_load import HostLoad, Watch
from slimqwen.progress import Progress

_HIDDEN = 1024
_ROWS = 65_536
"""Rows of the weight that bandwidth is measured on: 128 MiB in 16 bits, several times a last-level cache."""

_GROUP = 32
"""4-bit weights that share a scale, as the stages of this package write them."""

_SQUARE = 2048
"""Rows, inputs and tokens of the product that the peak is measured on."""

_REPETITIONS = 15


def measure(
    weights: Path, folder: Path, task: Sequence[int], progress: Progress
) -> tuple[dict[str, float], HostLoad]:
    """Measure the bandwidth of weights and the peak of products.

    Args:
        weights: unused, but part of every worker's job.
        folder: unused, likewise.
        task: tokens of the timed passes, such as 1 and K + 1.

    Returns:
        `bf16_<tokens>`, `int8_<tokens>`, `int4_<tokens>`: bytes of weights a second in a product with so many tokens;
        `copy`: bytes read and written a second by a copy into new memory; `peak`: FLOP/s of a bf16 product of
        2,048 x 2,048 x 2,048. With the load of the host meanwhile.
    """
    watch = Watch()
    with watch.section():
        figures = _rates(task, progress)
    return figures, watch.load()


def _rates(task: Sequence[int], progress: Progress) -> dict[str, float]:
    import torch
    from vllm import _custom_ops as ops

    torch.manual_seed(0)
    figures: dict[str, float] = {}

    def time_products(width: str, weight_bytes: int, product: Callable[[Any], Any]) -> None:
        for tokens in task:
            x = torch.randn(tokens, _HIDDEN).bfloat16()
            figures[f"{width}_{tokens}"] = weight_bytes / _seconds(product, x)

    progress("timing products", 0, 4)
    weights = torch.randn(_ROWS, _HIDDEN).bfloat16()
    figures["copy"] = 2 * weights.nbytes / _seconds(weights.clone)
    bf16 = ops.create_onednn_mm(weights.t())
    time_products("bf16", weights.nbytes, lambda x: ops.onednn_mm(bf16, x, None))
    progress("timing products", 1, 4)
    int8_weights = torch.randint(-127, 127, (_ROWS, _HIDDEN), dtype=torch.int8)
    int8 = ops.create_onednn_scaled_mm(
        int8_weights.t(), torch.full((_ROWS, 1), 0.01), torch.bfloat16, True, False, 128
    )
    time_products("int8", int8_weights.nbytes, lambda x: _eight_bit_product(int8, x, _ROWS))
    progress("timing products", 2, 4)
    # Packed as by `CPUWNA16LinearKernel`; the values do not change the time.
    packed = torch.randint(0, 2**31 - 1, (_ROWS // 16, 2 * _HIDDEN), dtype=torch.int32)
    scales = torch.full((_HIDDEN // _GROUP, _ROWS), 0.01, dtype=torch.bfloat16)
    isa = "amx" if torch.cpu._is_amx_tile_supported() else "vec"
    if hasattr(torch.ops._C, "cpu_gemm_wna16"):  # without AVX-512 vLLM has no such kernel
        time_products(
            "int4",
            packed.nbytes + scales.nbytes,
            lambda x: ops.cpu_gemm_wna16(x, packed, scales, None, None, 8, isa),
        )
    progress("timing products", 3, 4)
    square = torch.randn(_SQUARE, _SQUARE).bfloat16()
    square_product = ops.create_onednn_mm(square.t())
    figures["peak"] = 2 * _SQUARE**3 / _seconds(ops.onednn_mm, square_product, square, None)
    return figures


def _eight_bit_product(product: Any, x: Any, rows: int) -> Any:
    """Product of 8-bit weights and activations that are rounded per token."""
    import torch
    from vllm import _custom_ops as ops

    quantised, scale, _ = ops.onednn_scaled_int8_quant(x, None, None, True)
    output = torch.empty(len(x), rows, dtype=torch.bfloat16)
    return ops.onednn_scaled_mm(product, quantised, output, scale, None, None, None)


def _seconds(work: Callable[..., Any], *values: Any) -> float:
    """Median seconds of a call, after two untimed ones."""
    durations = []
    for _ in range(_REPETITIONS + 2):
        started = time.perf_counter()
        work(*values)
        durations.append(time.perf_counter() - started)
    return median(durations[2:])
