"""Every change of vLLM, and of torch, Triton and FlashInfer inside vLLM: `table.py` has a row for each.

    cpu/       faults and slow paths of vLLM on a CPU
    faults/    faults of vLLM on every device
    serving/   what the API server refuses and answers, which draft head it loads, how a start uses its compile cache

vLLM calls `register` through its entry point group `vllm.general_plugins` in each process that it spawns (API server,
engine, workers), before the model is built; a forked process has the patches of its parent. `register` makes those
whose row names no other function. Their modules have:

    install() -> bool     make the patch; False if it is made already; PatchError if it cannot be
    is_needed() -> bool   whether this machine needs the patch; left out if every machine of its devices needs it

Most patches replace a function of vLLM by `upstream.replace`. `upstream.require` refuses a vLLM whose functions are not
those for which a patch was written.

If `VLLM_PLUGINS` is set, it is the list of allowed plugins, and has to name `slimqwen_engine_fixes`.
"""

import importlib
from collections.abc import Iterator

from packaging.version import Version

from slimqwen import lifeline
from slimqwen.vllm_plugin import vllm_log
from slimqwen.vllm_plugin.patches.patch import Patch
from slimqwen.vllm_plugin.patches.table import PATCHES


def register() -> None:
    """Make every patch of this machine that no other hook makes, and log which.

    On every platform, an engine and its workers end with the process that started them. A second call changes and logs
    nothing. The modules of vLLM that this function imports are those that an engine imports anyway.

    Raises:
        PatchError: a patch is needed, but the installed vLLM is not the one for which it was written.
    """
    from slimqwen.vllm_plugin.patches import upstream

    lifeline.end_with_parent()
    vllm_log.join()
    is_allowed = upstream.is_untested_allowed()
    changes: dict[str, list[str]] = {}
    made = []
    for patch in _of_this_machine():
        try:
            code = importlib.import_module(f"slimqwen.vllm_plugin.{patch.module}")
            if not getattr(code, "is_needed", lambda: True)():
                continue
            changes[patch.name] = upstream.list_changes(patch)
            # A changed place refuses the start, after the others have been looked at.
            if (is_allowed or not any(changes.values())) and code.install():
                made.append(patch.name)
        except ImportError as error:
            raise upstream.PatchError(patch.file, str(error)) from error
    upstream.refuse_changes(changes)
    upstream.log_patches(made)


def _of_this_machine() -> Iterator[Patch]:
    from vllm import __version__
    from vllm.platforms import current_platform

    for patch in PATCHES.values():
        is_fixed = patch.fixed_in is not None and Version(__version__) >= Version(patch.fixed_in)
        if patch.function == "install" and current_platform.device_type in patch.devices and not is_fixed:
            yield patch
