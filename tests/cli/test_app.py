"""`slimqwen` as a person meets it: one line for what they can expect to go wrong, and help for every verb."""

import re
import subprocess
import sys

import pytest

from slimqwen import variant

ROOT = variant.repository_root()
UNKNOWN = "there is no variant 'nope'"
NEW = "variant new --name new --base tiny --hypothesis x"


@pytest.mark.parametrize(
    ("command", "code", "message"),
    [
        ("serve --variant nope", 2, UNKNOWN),
        ("eval quality --variant nope", 2, UNKNOWN),
        ("bench latency --variant nope", 2, UNKNOWN),
        ("compare tiny nope", 2, UNKNOWN),
        ("compare tiny", 2, "tiny has no baseline"),
        ("compare tiny tiny-awq tiny-best", 2, "3 variants are too many; name two, one or none"),
        ("recipe run --variant nope --until calibrate", 2, UNKNOWN),
        ("variant promote --variant nope", 2, UNKNOWN),
        ("gate --variant nope", 3, UNKNOWN),  # 2 is a verdict there: inconclusive
        ("eval fidelity --variant nope", 3, UNKNOWN),
        ("eval engine --variant nope", 3, UNKNOWN),
        ("variant promote --variant tiny", 2, "tiny is a baseline"),
        (f"{NEW.replace('new --base', 'tiny --base')}", 2, "experiments/tiny exists"),
        (f"{NEW.replace('--base tiny', '--base tinny')}", 2, "did you mean tiny?"),
        ("bench latency --variant tiny --baseline", 2, "--baseline takes one variant that has a baseline"),
        ("eval quality --variant tiny --full --limit 3", 2, "exclude each other"),
        ("eval quality --varian tiny", 2, "No such option: --varian"),
        ("evl quality", 2, "Did you mean 'eval'?"),
        ("serve", 2, "Missing option '--variant'"),
        ("download", 2, "name a variant with --variant, or a suite with --suite"),
        ("download --variant tiny --suite core", 2, "name a variant with --variant, or a suite with --suite"),
        ("gate", 3, "Missing option '--variant'"),
        ("gate --variant tiny-awq --no-such", 3, "No such option"),
        ("plan --gpu a10g", 2, "Missing option '--variant'"),
        ("tune tiny --load 1,x", 2, "--load 1,x: give numbers of concurrent requests, such as 1,4,16"),
        ("fit qwen9", 2, "qwen9 is not a variant, folder, config.json"),
        ("fit tiny --gpu rtx3909", 2, "no GPU 'rtx3909' in eval/devices.yaml; did you mean rtx-3090"),
        ("fit qwen3-4b --gpu l4 --context 99999", 2, "made for contexts of 1 to 40,960 tokens"),
        ("fit owner/name", 2, "forbids asking the hub"),
        ("fit weights/tinny", 2, "there is no tinny in the folder weights; did you mean weights/tiny?"),
    ],
)
def test_what_cannot_be_is_one_line_and_an_exit_code(run_here, command, code, message):
    ended, _, said = run_here(*command.split())
    assert (ended, len(said.splitlines())) == (code, 1), said
    assert said.startswith("error: ")
    assert message in said
    assert not (ROOT / "experiments" / "new").exists()


def test_a_process_ends_with_the_exit_code_and_the_one_line_of_its_error():
    words = [sys.executable, "-m", "slimqwen.cli", "report", "--mlflow", "nonsense://x"]
    ended = subprocess.run(words, capture_output=True, text=True, timeout=300)
    assert (ended.returncode, len(ended.stderr.splitlines())) == (2, 1)
    assert ended.stderr.startswith("error: ")
    assert "check URI" in ended.stderr


@pytest.mark.parametrize(
    ("command", "heavy"),
    [
        ("eval quality --help", "torch vllm transformers matplotlib pandas scipy numpy mlflow"),
        ("fit qwen3.5-4b-best --gpu a10g", "torch vllm transformers"),
    ],
)
def test_help_and_arithmetic_import_nothing_heavy(command, heavy):
    asked = f"""
import sys
from slimqwen.cli.app import app
try:
    app({command.split()})
finally:
    print(sorted(set({heavy.split()}) & set(sys.modules)))
"""
    ended = subprocess.run([sys.executable, "-c", asked], capture_output=True, text=True, timeout=600)
    assert ended.stdout.splitlines()[-1] == "[]"


def test_the_version_has_the_commit(run_here):
    code, said, _ = run_here("--version")
    commit = subprocess.run(
        ["git", "-C", str(ROOT), "rev-parse", "HEAD"], capture_output=True, text=True, check=True
    ).stdout
    assert code == 0
    assert re.fullmatch(rf"slimqwen \d+\.\d+\.\d+, commit {commit[:12]}(, changed since)?\n", said)
