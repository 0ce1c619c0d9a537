"""vLLM's API server with its modules imported once for all of its processes (`python -m` this module, vLLM's flags).

The import makes hundreds of thousands of objects that stay; without the garbage collector, which walks through them
again and again meanwhile, it takes two thirds of the CPU time. Objects that forks share are frozen, so that no
collection writes into them.
"""

import gc


def main() -> None:
    """Import vLLM, and run its API server with the flags of the command line."""
    gc.disable()
    import_server()
    freeze()
    run()


def import_server() -> None:
    """Import vLLM's API server."""
    import vllm.entrypoints.launchers.api_server.entry  # noqa: F401


def freeze() -> None:
    """Make this process, which has imported vLLM without the garbage collector, ready to be forked."""
    from slimqwen.vllm_plugin.engine_fixes import forked_processes

    forked_processes.allow()
    gc.freeze()
    gc.enable()


def run() -> None:
    """Run the API server with the flags of sys.argv."""
    from vllm.config.logging import LoggingConfig
    from vllm.entrypoints.launchers.api_server import entry
    from vllm.logger import configure_logging

    # vLLM loads plugins before it reads how to log, and a fork loads none again: their lines would be lost.
    configure_logging(LoggingConfig())
    entry.main()


if __name__ == "__main__":
    main()
