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
_STEP_S = {QUICK: 0.0, SLOW: 0.08}


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
    """Make each step last as its token budget decides, and change tokens under the wrong one."""
    scheduler = importlib.import_module("vllm.v1.core.sched.scheduler").Scheduler
    schedule, update = scheduler.schedule, scheduler.update_from_output
    if getattr(schedule, "is_planted", False):
        return

    def wait(self: Any, *arguments: Any, **more: Any) -> Any:
        time.sleep(_STEP_S.get(self.scheduler_config.max_num_batched_tokens, 0.03))
        return schedule(self, *arguments, **more)

    def change(self: Any, scheduled: Any, output: Any) -> Any:
        if self.scheduler_config.max_num_batched_tokens == WRONG:
            output.sampled_token_ids = [[7] * len(tokens) for tokens in output.sampled_token_ids]
        return update(self, scheduled, output)

    wait.is_planted = True  # type: ignore[attr-defined]
    scheduler.schedule, scheduler.update_from_output = wait, change
