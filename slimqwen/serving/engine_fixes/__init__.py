"""What vLLM gets wrong on a CPU, or needlessly slow, mended in its own processes through `vllm.general_plugins`.

vLLM calls `register` in every process it starts (API server, engine, workers), before the model is built.
Each fix is a module of this package with two functions:

    reason() -> str | None   why this machine needs the fix, or None where it does not
    install() -> bool        put it in place; False where it already is; EngineFixError where it cannot be

`VLLM_PLUGINS`, if set, is a list of the plugins allowed: it must name `slimqwen_engine_fixes`.
"""

import logging

from slimqwen.serving import vllm_log

logger = logging.getLogger(__name__)


def register() -> None:
    """Install every fix that this machine needs, and log which and why.

    Does nothing where vLLM's platform is not the CPU. Calling it again changes and logs nothing. What it
    imports of vLLM is what an engine imports anyway, and nothing but the platform before that is known.

    Raises:
        EngineFixError: a fix is needed, but this vLLM is not the one it was written for.
    """
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return

    from slimqwen.serving.engine_fixes import (
        aot_load,
        lone_token,
        mtp_rotary,
        notify_mailbox,
        sampling_expansion,
        short_convolution,
        short_drafts,
        w4a16_linear,
    )
    from slimqwen.serving.engine_fixes.upstream import EngineFixError

    vllm_log.join()
    for fix in (
        w4a16_linear,
        mtp_rotary,
        sampling_expansion,
        short_convolution,
        lone_token,
        short_drafts,
        notify_mailbox,
        aot_load,
    ):
        name = fix.__name__.rpartition(".")[2]
        reason = fix.reason()
        try:
            active = reason is not None and fix.install()
        except ImportError as error:
            raise EngineFixError(name, str(error)) from error
        if active:
            logger.info("Engine fix %s is active: %s", name, reason)
