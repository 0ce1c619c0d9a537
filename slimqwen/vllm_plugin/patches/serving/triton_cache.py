"""Triton's compiled kernels inside vLLM's processes: look-up in a cache that was moved, and a log of new ones."""

import json
import logging
from pathlib import Path
from typing import Any

from slimqwen.vllm_plugin.patches.upstream import expect, replace

logger = logging.getLogger(__name__)


def find_beside_group_file() -> None:
    """Make Triton look for the files of a kernel beside their group file; otherwise no cache could be moved.

    The group file has absolute paths (`FileCacheManager.put_group` in triton/runtime/cache.py). Remove this function
    when `get_group` there uses only the names of the files.
    """
    from triton.runtime.cache import FileCacheManager

    def get_group(stock: object, self: Any, filename: str) -> dict[str, str] | None:
        group_file = self.get_file(f"__grp__{filename}")
        if group_file is None:
            return None
        try:
            names = json.loads(Path(group_file).read_bytes())["child_paths"]
        except (OSError, ValueError, KeyError):
            return None  # as from the stock function: Triton then compiles the kernel
        paths = {name: path for name in names if (path := self.get_file(name)) is not None}
        # As Triton 3.8 does; 3.7 returned a part of the files.
        return paths if len(paths) == len(names) else None

    replace("find_beside_group_file", FileCacheManager, "get_group", get_group)


def log_compilations(folder: Path) -> None:
    """Log every kernel that Triton compiles because it is not among those that were compiled ahead.

    Args:
        folder: folder of Triton's cache, with the kernels that were compiled ahead.
    """
    from triton import knobs

    expect(
        "log_compilations", hasattr(knobs.compilation, "listener"), "triton.knobs.compilation has no listener"
    )

    def log(*, src: Any, metadata: Any, metadata_group: Any, times: Any, cache_hit: bool) -> None:
        if not cache_hit:
            logger.info("Triton kernel %s compiled in %.2f s", src.name, times.total / 1e6)

    knobs.compilation.listener = log
    forms = sum(1 for path in folder.iterdir() if path.is_dir())
    logger.info("Triton kernels from the compile cache: %d", forms)
