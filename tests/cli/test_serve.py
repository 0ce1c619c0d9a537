"""The command that serves a variant."""

import os
import subprocess
import sys

from slimqwen import variant

ROOT = variant.repository_root()


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
