import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests import cpu_kinds
from tests.played_cpu.sitecustomize import VARIABLE

CPUINFO = Path("/proc/cpuinfo").read_text()
CHOICES = {
    "amx": [True, True, True],
    "avx512_bf16": [False, True, True],
    "avx512": [False, False, True],
    "avx2": [False, False, False],
}
"""Whether vLLM would find AMX, AVX-512 with bfloat16, and AVX-512."""

ASK = """
import json, subprocess, sys
code = '''
import importlib.util, json
importlib.util.find_spec("torch")  # as some libraries do before they import it
import torch
print(json.dumps([torch.cpu._is_amx_tile_supported(), torch.cpu._is_avx512_bf16_supported(),
                  torch.cpu._is_avx512_supported()]))
'''
print(subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True).stdout)
"""


def cpuinfo(*flags):
    return f"model name\t: Some CPU\nflags\t\t: fpu sse2 {' '.join(flags)}\nflags\t\t: fpu\n"


@pytest.mark.parametrize(
    ("flags", "kinds"),
    [
        (["avx2", "avx512f", "avx512_bf16", "amx_tile"], ["amx", "avx512_bf16", "avx512", "avx2"]),
        (["avx2", "avx512f", "avx512_bf16"], ["avx512_bf16", "avx512", "avx2"]),
        (["avx2", "avx512f"], ["avx512", "avx2"]),
        (["avx2"], ["avx2"]),
        ([], []),
    ],
)
def test_a_host_plays_its_own_kind_and_those_below_it(flags, kinds):
    assert cpu_kinds.find_playable_kinds(cpuinfo(*flags)) == kinds
    described = cpu_kinds.describe_cpu(cpuinfo(*flags), {})
    assert described == f"Some CPU, {kinds[0] if kinds else 'of no known kind'}"


def test_the_kind_that_is_played_is_printed():
    described = cpu_kinds.describe_cpu(cpuinfo("avx2", "avx512f"), {VARIABLE: "avx2"})
    assert described == "Some CPU, avx512, played as avx2"


@pytest.mark.skipif(not cpu_kinds.find_playable_kinds(CPUINFO), reason="a CPU of no known kind")
def test_every_process_below_finds_the_lowest_kind_if_it_is_played():
    host, *_, kind = cpu_kinds.find_playable_kinds(CPUINFO) * 2
    unplayed = {name: value for name, value in os.environ.items() if name != VARIABLE}
    environment = unplayed | cpu_kinds.environment_of_kind(kind, host)
    done = subprocess.run(
        [sys.executable, "-c", ASK], env=environment, capture_output=True, check=True, text=True
    )
    assert json.loads(done.stdout) == CHOICES[kind]


def test_each_kind_is_run_and_one_failure_fails(monkeypatch, capsys):
    played = []

    def run(command, env, check):
        played.append(env.get(VARIABLE))
        return SimpleNamespace(returncode=int(env.get(VARIABLE) == "avx2"))

    monkeypatch.setattr(cpu_kinds, "find_playable_kinds", lambda cpuinfo: ["avx512", "avx2"])
    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.delenv(VARIABLE, raising=False)
    assert cpu_kinds.run_kinds([]) == 1
    assert played == [None, "avx2"]
    assert capsys.readouterr().out == "avx512: passed\navx2: pytest ended with 1\n"
