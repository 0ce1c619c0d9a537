"""Code inside vLLM's processes, and the hook of vLLM that loads each module.

| module | hook | process |
|---|---|---|
| `api_server` | main module of the command, in place of vLLM's | API server |
| `readiness`, and the modules that it imports | `--middleware` | API server |
| `endpoints`, and the modules that it imports | entry point `vllm.endpoint_plugins` | API server |
| `compile_watch` | entry point `vllm.general_plugins` | every process |
| `engine_fixes` | entry point `vllm.general_plugins` | every process |
| `draft_vocabulary` | model class, named by `engine_fixes` | engine, workers |
| `engine_facts` | `--worker-extension-cls` | workers |

`engine_fixes` installs the fixes of vLLM's platform, and registers `draft_vocabulary` on every platform.
pyproject.toml has the entry points; `slimqwen/serving/command.py` writes the options.
"""
