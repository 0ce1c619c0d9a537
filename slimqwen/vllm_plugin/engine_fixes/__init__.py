"""Patches for faults and slow paths of vLLM, loaded through its entry point group `vllm.general_plugins`.

vLLM calls `register` in each process that it spawns (API server, engine, workers), before the model is built; a forked
process has the patches of its parent. `register` also registers the model class of trimmed draft vocabularies, on every
device: as a plugin of its own, the class would change VLLM_PLUGINS and so vLLM's compile key.

Each fix is a module of this package:

    WHY: str              what goes wrong without the fix, for the log
    install() -> bool     install the fix; False if it is installed already; EngineFixError if it cannot be
    is_needed() -> bool   whether this machine needs the fix; left out if every machine of its platforms needs it
    FIXED_IN: str         first version of vLLM without the fault; left out while none is known

Most fixes replace a function of vLLM by `upstream.replace`.

If `VLLM_PLUGINS` is set, it is the list of allowed plugins, and has to name `slimqwen_engine_fixes`.
"""

import functools
import importlib
import logging
from collections.abc import Mapping
from types import MappingProxyType

from packaging.version import Version

from slimqwen import lifeline
from slimqwen.vllm_plugin import vllm_log

logger = logging.getLogger(__name__)

_CPU = ("cpu",)
_EVERY = ("cpu", "cuda")

FIXES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "forked_processes": _CPU,
        "model_inspection": _CPU,
        "widened_linears": _CPU,
        "int4_activations": _CPU,
        "w4a16_linear": _CPU,
        "w8a16_linear": _CPU,
        "unpacked_prompts": _CPU,
        "mtp_rotary": _CPU,
        "sampling_expansion": _CPU,
        "draft_logits": _CPU,
        "seeded_prompts": _CPU,
        "top_k_without_drafts": _CPU,
        "short_convolution": _CPU,
        "prompt_convolution": _CPU,
        "draft_prompts": _CPU,
        "lone_token": _CPU,
        "lone_sequence": _CPU,
        "padded_prompts": _EVERY,  # in the scheduler, which knows no device
        "short_drafts": _CPU,
        "aligned_states": _CPU,
        "notify_mailbox": _EVERY,  # between processes: on a GPU those of tensor parallelism
        "aot_load": _CPU,
        "quoted_paths": _CPU,
        "eager_ranks": _CPU,
    }
)
"""Module of each fix, in the order of installation -> the platforms that have the fault, as vLLM's `device_type`."""


@functools.cache
def _log_obsolete_fix(name: str, version: str) -> None:
    logger.info("Engine fix %s is not needed any more: vLLM %s does not have the fault", name, version)


def register() -> None:
    """Register the draft vocabulary's model class, install every fix that this machine needs, and log which and why.

    A fix of a fault that the installed vLLM no longer has is not installed, and the log says so.

    On every platform, an engine and its workers end with the process that started them. A second call changes and logs
    nothing. The modules of vLLM that this function imports are those that an engine imports anyway.

    Raises:
        EngineFixError: a fix is needed, but the installed vLLM is not the one for which it was written.
    """
    from vllm import ModelRegistry, __version__
    from vllm.platforms import current_platform

    lifeline.end_with_parent()
    ModelRegistry.register_model("Qwen3_5MTP", "slimqwen.vllm_plugin.draft_vocabulary:DraftVocabularyMTP")

    from slimqwen.vllm_plugin.engine_fixes.upstream import EngineFixError

    vllm_log.join()
    for name, platforms in FIXES.items():
        if current_platform.device_type not in platforms:
            continue
        fix = importlib.import_module(f"{__name__}.{name}")
        fixed_in = getattr(fix, "FIXED_IN", None)
        if fixed_in is not None and Version(__version__) >= Version(fixed_in):
            _log_obsolete_fix(name, __version__)
            continue
        is_needed = getattr(fix, "is_needed", lambda: True)
        try:
            active = is_needed() and fix.install()
        except ImportError as error:
            raise EngineFixError(name, str(error)) from error
        if active:
            logger.info("Engine fix %s is active: %s", name, fix.WHY)
