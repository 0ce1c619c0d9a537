"""The shortest time per output token (TPOT) that memory bandwidth allows, shown beside a measured one.

A decode step lasts at least its memory traffic (`fit/cost.py`) divided by the bandwidth: for a GPU that of its data
sheet, for a CPU the measured speed of copying memory.
"""

import json
import time
from pathlib import Path

from slimqwen.fit import cost
from slimqwen.fit.architecture import read_model, shape_tensors
from slimqwen.fit.memory import ServerSettings
from slimqwen.fit.subject import variant_subject
from slimqwen.host import Platform
from slimqwen.plan.devices import UnknownGpuError, UnservedGpuError
from slimqwen.plan.host_gpus import choose_gpu
from slimqwen.records import provenance
from slimqwen.variant import Variant

_FILE = Path(".cache") / "memory_bandwidth.json"
_COPIED_BYTES = 256 << 20  # beyond every cache
_COPIES = 10


def find_bandwidth(platform: Platform, root: Path) -> float | None:
    """Memory bandwidth of the device that serves, bytes per second.

    For a GPU it is that of the data sheet. For a CPU it is measured by copying memory. Other work only slows that, so
    the fastest measurement ever made on this kind of hardware counts, which is kept in .cache/ of the folder `root`.

    Returns:
        The bandwidth; None without a known GPU: eval/devices.yaml lacks it, or vLLM does not serve on it.
    """
    if platform == "cuda":
        try:
            chosen = choose_gpu(None, root)
        except (UnknownGpuError, UnservedGpuError):
            return None
        return chosen and chosen.gpu.bandwidth
    file, kind = root / _FILE, provenance.host_kind().hardware
    known: dict[str, float] = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    if (measured := _measure_copy()) > known.get(kind, 0):
        known[kind] = measured
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(known, indent=1) + "\n", encoding="utf-8")
    return known[kind]


def _measure_copy() -> float:
    """Bytes per second that all threads of torch read and write together, in the fastest of some copies."""
    import torch

    source = torch.ones(_COPIED_BYTES, dtype=torch.uint8)
    target = torch.zeros_like(source)
    seconds = []
    for _ in range(_COPIES):
        began = time.perf_counter()
        target.copy_(source)
        seconds.append(time.perf_counter() - began)
    return 2 * _COPIED_BYTES / min(seconds)


def shortest_tpot_ms(
    variant: Variant, bandwidth: float, context_len: int, sequences: int, acceptance_length: float | None
) -> float | None:
    """Time per output token if a decode step is as short as memory bandwidth allows, milliseconds.

    Args:
        variant: the variant, whose checkpoint is on this machine.
        bandwidth: bytes per second.
        context_len: cached tokens of each sequence.
        sequences: number of sequences that a step decodes together.
        acceptance_length: output tokens per step; None without drafts.

    Returns:
        The time; None where memory traffic is not modelled: several GPUs, or drafts by anything but an MTP head.

    Raises:
        FitError: config.env has a dtype or number that vLLM does not read.
    """
    subject = variant_subject(variant)
    settings = ServerSettings.of(subject, None, None)
    depth = settings.depth if acceptance_length else 0
    if settings.gpus > 1 or (acceptance_length and not depth):
        return None
    model = read_model(
        shape_tensors(subject.tensors),
        subject.config,
        kv_cache_dtype=settings.kv_cache_dtype,
        state_dtype=settings.state_dtype,
    )
    step = cost.count_verify_work(model, sequences, context_len, depth).bytes
    step += depth * cost.count_draft_work(model, sequences, context_len).bytes
    return 1e3 * step / bandwidth / (acceptance_length or 1)
