"""The tests that depend on the CPU, on each kind of CPU that this host is or can play: `make test KINDS=1`.

vLLM has other libraries and kernels for AVX2, AVX-512, AVX-512 with bfloat16, and AMX. A host can play a lower kind
than its own, never a higher one. `python -m tests.cpu_kinds` takes arguments of pytest instead of `ARGUMENTS`.
"""

import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.played_cpu.sitecustomize import LACKS, VARIABLE

ARGUMENTS = ("-n", "2", "--dist", "loadgroup", "--no-loadscope-reorder", "tests/vllm_plugin", "tests/serving")

_FLAGS = {"amx": "amx_tile", "avx512_bf16": "avx512_bf16", "avx512": "avx512f", "avx2": "avx2"}
# oneDNN cannot play AVX2: torch, which asks the CPU itself, would still hand it bfloat16.
_TORCH = {
    "avx512_bf16": {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"},
    "avx512": {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_VNNI"},
    "avx2": {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_VNNI", "ATEN_CPU_CAPABILITY": "avx2"},
}


def find_playable_kinds(cpuinfo: str) -> list[str]:
    """The host's own kind and those below it, best first; none on another architecture than x86.

    Args:
        cpuinfo: content of /proc/cpuinfo.
    """
    line = re.search(r"^flags\s*:(.*)$", cpuinfo, re.MULTILINE)
    flags = line[1].split() if line else []
    own = next((number for number, kind in enumerate(LACKS) if _FLAGS[kind] in flags), len(LACKS))
    return list(LACKS)[own:]


def describe_cpu(cpuinfo: str, environment: Mapping[str, str]) -> str:
    """The CPU of this process in a line: its name, its kind, and the kind that is played."""
    name = re.search(r"^model name\s*:\s*(.+)$", cpuinfo, re.MULTILINE)
    kinds = find_playable_kinds(cpuinfo)
    played = environment.get(VARIABLE)
    return (
        f"{name[1] if name else os.uname().machine}, {kinds[0] if kinds else 'of no known kind'}"
        f"{f', played as {played}' if played else ''}"
    )


def environment_of_kind(kind: str, host: str) -> dict[str, str]:
    """Environment variables for a process, and all that it starts, on a host of one kind to play another."""
    if kind == host:
        return {}
    folder = str(Path(__file__).parent / "played_cpu")
    path = os.pathsep.join(filter(None, [folder, os.environ.get("PYTHONPATH")]))
    return {VARIABLE: kind, "PYTHONPATH": path, **_TORCH[kind]}


def run_kinds(arguments: Sequence[str]) -> int:
    """Run pytest for each kind, one after the other, or once where no kind is known; returns 1 if one failed."""
    kinds = find_playable_kinds(Path("/proc/cpuinfo").read_text()) or ["this CPU"]
    command = [sys.executable, "-m", "pytest", *(arguments or ARGUMENTS)]
    results = []
    for kind in kinds:
        environment = os.environ | environment_of_kind(kind, kinds[0])
        status = subprocess.run(command, env=environment, check=False).returncode
        results.append(f"{kind}: {'passed' if status == 0 else f'pytest ended with {status}'}\n")
    sys.stdout.writelines(results)
    return int(any(not result.endswith("passed\n") for result in results))


if __name__ == "__main__":
    sys.exit(run_kinds(sys.argv[1:]))
