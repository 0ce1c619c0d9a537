"""Quote paths with a space, or another character special to a shell, in torch.compile's calls of the C++ compiler.

`CppBuilder` in torch/_inductor/cpp_builder.py makes one command line, which is later split as by a shell, and quotes
only the folders of headers. In a checkout at "/home/me/my models" the compiler looks for files named "/home/me/my", and
the start ends with a CppCompileError. Seen in torch 2.13.0.

Remove this fix when torch quotes every path of the command, or passes the command as a list of words.
"""

import os
import shlex
import sys
import tempfile
from collections.abc import Callable, Sequence
from typing import Any

from slimqwen.vllm_plugin.patches.upstream import replace

_FIX = "quoted_paths"


def is_needed() -> bool:
    """Whether a path in the compiler's command is more than one word for a shell."""
    paths = sys.prefix, os.environ.get("TORCHINDUCTOR_CACHE_DIR", ""), tempfile.gettempdir()
    return any(path and shlex.quote(path) != path for path in paths)


def install() -> bool:
    """Make torch quote all paths; False if it is installed already in this process."""
    from torch._inductor import cpp_builder

    def build(
        stock: Callable[..., None],
        self: Any,
        name: str,
        sources: str | Sequence[str],
        BuildOption: Any,  # noqa: N803  (torch's name)
        output_dir: str = "",
    ) -> None:
        files = [sources] if isinstance(sources, str) else sources
        stock(self, name, [shlex.quote(file) for file in files], BuildOption, output_dir)
        self._output = self._output.replace(self._target_file, shlex.quote(self._target_file))
        folders = BuildOption.get_libraries_dirs()
        self._libraries_dirs_args = "".join(f"-L{shlex.quote(folder)} " for folder in folders)
        if header := BuildOption.precompiled_header:
            include = f"-include {header} "
            quoted = f"-include {shlex.quote(header)} "
            self._include_dirs_args = self._include_dirs_args.replace(include, quoted, 1)

    return replace(_FIX, cpp_builder.CppBuilder, "__init__", build)
