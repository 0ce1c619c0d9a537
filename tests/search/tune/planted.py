"""Planted faults of served engines, as a plugin of vLLM: which an engine has, its draft depth or token budget decides.

`install` writes what `importlib.metadata` needs to find the plugin into a folder that a server's PYTHONPATH names.
"""

import importlib
import time
from pathlib import Path
from typing import Any

NAME = "planted_faults"
CORRUPT, DYING = 3, 5
"""Draft depths: one whose responses are corrupt, one that dies at its first draft."""

QUICK, SLOW, WRONG = 1001, 1002, 1003
"""Token budgets: one with quick steps, one with slow steps, one whose responses are wrong."""
_STEP_S = {QUICK: 0.0, SLOW: 0.04}


def install(folder: Path) -> None:
    """Make a folder for PYTHONPATH from which vLLM loads the plugin."""
    information = folder / f"{NAME}-1.0.dist-info"
    information.mkdir(parents=True)
    (information / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {NAME}\nVersion: 1.0\n")
    (information / "entry_points.txt").write_text(f"[vllm.general_plugins]\n{NAME} = {NAME}:register\n")
    (folder / f"{NAME}.py").write_text(Path(__file__).read_text(encoding="utf-8"))


def register() -> None:
    """Plant the faults in this process's rejection sampler and scheduler."""
    plant_in_scheduler()
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


def plant_in_scheduler() -> None:
    """Make each step last as its token budget decides, and change tokens under the wrong one.

    Another body of `Scheduler.schedule` would be refused: this project's patches were written for vLLM's own.
    """
    scheduler = importlib.import_module("vllm.v1.core.sched.scheduler").Scheduler
    stock = scheduler.update_from_output
    if getattr(stock, "is_planted", False):
        return

    def update(self: Any, scheduled: Any, output: Any) -> Any:
        budget = self.scheduler_config.max_num_batched_tokens
        time.sleep(_STEP_S.get(budget, 0.01))
        if budget == WRONG:
            output.sampled_token_ids = [[7] * len(tokens) for tokens in output.sampled_token_ids]
        return stock(self, scheduled, output)

    update.is_planted = True  # type: ignore[attr-defined]
    scheduler.update_from_output = update
