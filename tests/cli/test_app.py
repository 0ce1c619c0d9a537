"""`slimqwen` as a person meets it: one line for what they can expect to go wrong, and help for every verb."""

import os
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
        ("compare tiny tiny-awq tiny-best", 2, "give two variants, one variant, or none"),
        ("recipe run --variant nope --until calibrate", 2, UNKNOWN),
        ("variant promote --variant nope", 2, UNKNOWN),
        ("gate --variant nope", 3, UNKNOWN),  # 2 is a verdict there: inconclusive
        ("eval fidelity --variant nope", 3, UNKNOWN),
        ("eval engine --variant nope", 3, UNKNOWN),
        ("variant promote --variant tiny", 2, "tiny is a baseline"),
        (f"{NEW.replace('new --base', 'tiny --base')}", 2, "experiments/tiny exists"),
        (f"{NEW.replace('--base tiny', '--base tinny')}", 2, "did you mean tiny?"),
        ("bench latency --variant tiny --baseline", 2, "exactly one variant, which has a baseline"),
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


def test_the_script_that_serves_is_the_verb(run_here):
    # An engine in this process may have left variables of its own.
    shell = {key: value for key, value in os.environ.items() if not key.startswith("VLLM_")}
    script = subprocess.run(
        [sys.executable, ROOT / "scripts" / "serve.py", "--variant", "tiny", "--dry-run"],
        env=shell | {"VLLM_NO_USAGE_STATS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    code, said, _ = run_here("serve", "--variant", "tiny", "--dry-run")
    assert (script.returncode, script.stdout) == (code, said)
    assert "vllm" in script.stdout
    assert "of this shell" not in script.stderr, "none is ignored: the server gets the same value"


def test_variables_of_the_shell_that_do_not_serve_a_variant_are_named(run_here, monkeypatch):
    monkeypatch.setenv("VLLM_PORT", "8311")
    code, said, warned = run_here("serve", "--variant", "tiny", "--dry-run")
    assert (code, "--port 8080" in said) == (0, True)
    assert "VLLM_PORT" in warned
    assert "--port N sets a port" in warned
    monkeypatch.setenv("VLLM_PORT", "8080")
    _, _, warned = run_here("serve", "--variant", "tiny", "--dry-run")
    assert "VLLM_PORT" not in warned, "that is its port"


def test_a_command_whose_start_would_be_refused_for_its_address_is_shown_with_the_reason(
    run_here, monkeypatch
):
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    code, said, warned = run_here("serve", "--variant", "tiny", "--host", "0.0.0.0", "--dry-run")
    assert (code, "--host 0.0.0.0" in said) == (0, True)
    assert "refused: without a key everyone who reaches 0.0.0.0" in " ".join(warned.split())


def test_the_command_of_a_missing_checkpoint_is_shown_with_what_makes_it(run_here):
    code, said, warned = run_here("serve", "--variant", "qwen3.5-4b-best", "--dry-run")
    assert (code, "vllm" in said) == (0, True)
    missing = "weights/qwen3.5-4b-best is missing: `slimqwen recipe run qwen3.5-4b-best` makes it"
    assert missing in " ".join(warned.split())


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


def test_completion_names_the_variants():
    ended = subprocess.run(
        [sys.executable, "-m", "slimqwen.cli"],
        env={
            "PATH": "/usr/bin:/bin",
            "PYTHONPATH": str(ROOT),
            "_SLIMQWEN_COMPLETE": "complete_bash",
            "COMP_WORDS": "slimqwen serve --variant tiny-a",
            "COMP_CWORD": "3",
        },
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert ended.stdout.split() == ["tiny-awq"]
