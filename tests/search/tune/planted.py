"""Planted faults of served engines, as a plugin of vLLM: which of them an engine has, its draft depth decides.

`install` writes what `importlib.metadata` needs to find the plugin into a folder that a server's PYTHONPATH names.
"""

import importlib
from pathlib import Path
from typing import Any

NAME = "planted_faults"
CORRUPT, DYING = 3, 5
"""Draft depths: one whose responses are corrupt, one that dies at its first draft."""


def install(folder: Path) -> None:
    """Make a folder for PYTHONPATH from which vLLM loads the plugin."""
    information = folder / f"{NAME}-1.0.dist-info"
    information.mkdir(parents=True)
    (information / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {NAME}\nVersion: 1.0\n")
    (information / "entry_points.txt").write_text(f"[vllm.general_plugins]\n{NAME} = {NAME}:register\n")
    (folder / f"{NAME}.py").write_text(Path(__file__).read_text(encoding="utf-8"))


def register() -> None:
    """Plant the faults in this process's rejection sampler."""
    module = importlib.import_module("vllm.v1.sample.rejection_sampler")
    stock = module.rejection_sample
    if getattr(stock, "is_planted", False):
        return

    def sample(
        draft_token_ids: Any, num_draft_tokens: Any, max_spec_len: int, *rest: Any, **more: Any
    ) -> Any:
        tokens = stock(draft_token_ids, num_draft_tokens, max_spec_len, *rest, **more)
        if max_spec_len == DYING:
            raise RuntimeError("planted: this engine dies")
        if max_spec_len == CORRUPT:
            tokens[:, 0] = 7
        return tokens

    sample.is_planted = True  # type: ignore[attr-defined]
    module.rejection_sample = sample
