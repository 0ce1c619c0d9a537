"""Code inside vLLM's processes, and what starts or loads each module there.

| module | hook | process |
|---|---|---|
| `api_server`, and the modules that it imports | main module of the command, in place of vLLM's | API server |
| `readiness`, and the modules that it imports | `--middleware` | API server |
| `endpoints`, and the modules that it imports | entry point `vllm.endpoint_plugins` | API server |
| `patches.serving.compile_watch` | entry point `vllm.general_plugins` | every process |
| `patches` | entry point `vllm.general_plugins` | every process |
| `draft_vocabulary` | model class, named by `patches.serving.draft_head_class` | engine, workers |
| `engine_facts` | `--worker-extension-cls` | workers |

Every change of vLLM is a row of `patches/table.py`, whichever hook makes it; `patches.register` makes those of vLLM's
platform. pyproject.toml has the entry points; `slimqwen/serving/command.py` writes the options.
"""
