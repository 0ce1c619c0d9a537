"""Secrets do not reach what is written down; what only looks like one does."""

import pytest

from slimqwen import redaction


@pytest.mark.parametrize(
    ("word", "left"),
    [
        ("http://me:hunter2@host:5000/x", "http://<redacted>@host:5000/x"),
        ("postgresql://me:hun@ter2@host/db", "postgresql://<redacted>@host/db"),
        ("http://host/x?a=1&password=hunter2&b=2", "http://host/x?a=1&password=<redacted>&b=2"),
        ("https://host/x?api_key=hunter2", "https://host/x?api_key=<redacted>"),
        ("https://host/a@b", "https://host/a@b"),
        ("sqlite:////tmp/mlflow.db", "sqlite:////tmp/mlflow.db"),
    ],
)
def test_an_address_keeps_all_but_its_credentials(word, left):
    assert redaction.text(f"see {word}") == f"see {left}"


@pytest.mark.parametrize(
    ("given", "left"),
    [
        (["--api-key", "hunter2", "x"], ["--api-key", "<redacted>", "x"]),
        (["--hf-token=hunter2"], ["--hf-token=<redacted>"]),
        (["HF_TOKEN=hunter2"], ["HF_TOKEN=<redacted>"]),
        (["--uri", "http://me:hunter2@host"], ["--uri", "http://<redacted>@host"]),
        (["--uri=http://me:hunter2@host"], ["--uri=http://<redacted>@host"]),
        (["--token", "--variant", "tiny"], ["--token", "--variant", "tiny"]),
        (["--tokens", "200000", "--text", "keys=a.txt"], ["--tokens", "200000", "--text", "keys=a.txt"]),
    ],
)
def test_a_command_keeps_its_words_but_for_secrets(given, left):
    assert redaction.command(given) == left
