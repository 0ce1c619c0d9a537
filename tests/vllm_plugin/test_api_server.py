"""vLLM's entry is called with the garbage collector back on, its modules frozen and one OpenMP thread."""

import subprocess
import sys

PROBE = """
import gc
from slimqwen.vllm_plugin import api_server
from slimqwen.vllm_plugin.engine_fixes import forked_processes
from vllm.entrypoints.launchers.api_server import entry
import torch

def main():
    print("state:", gc.isenabled(), gc.get_freeze_count() > 10_000, torch.get_num_threads(), forked_processes._allowed)

entry.main = main
api_server.main()
"""


def test_vllm_is_called_frozen_collecting_and_with_one_thread():
    probe = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True, timeout=600)
    assert "state: True True 1 True" in probe.stdout, probe.stderr


def test_to_name_the_module_imports_nothing_heavy():
    code = "import sys, slimqwen.vllm_plugin.api_server; print('torch' in sys.modules, 'vllm' in sys.modules)"
    named = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600)
    assert named.stdout.split() == ["False", "False"]
