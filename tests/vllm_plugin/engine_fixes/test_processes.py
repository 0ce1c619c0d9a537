"""The plugin is loaded in each of the processes that a server starts."""

import os
import re
import subprocess
import sys

import pytest

SERVED = """
import sys
from vllm import LLM, SamplingParams

if __name__ == "__main__":
    llm = LLM(
        sys.argv[1],
        distributed_executor_backend="mp",
        enforce_eager=True,
        enable_prefix_caching=False,
        max_model_len=64,
        kv_cache_memory_bytes=64 << 20,
        speculative_config={"method": "mtp", "num_speculative_tokens": 2},
    )
    output = llm.generate({"prompt_token_ids": [1, 2, 3]}, SamplingParams(max_tokens=4, ignore_eos=True))
    print("tokens:", len(output[0].outputs[0].token_ids))
"""


@pytest.mark.engine
def test_engine_and_worker_processes_say_which_fixes_they_run_with(tiny_with_mrope):
    environment = {name: value for name, value in os.environ.items() if not name.startswith("VLLM_")}
    served = subprocess.run(
        [sys.executable, "-c", SERVED, str(tiny_with_mrope)],
        env=environment | {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    log = served.stdout + served.stderr
    assert "tokens: 4" in log, log
    for process in ("EngineCore", "Worker"):
        assert re.search(rf"\(\w*{process}[^)]* pid=\d+\).*Engine fix mtp_rotary is active: ", log), log
