"""A tuning of the embedded model over real servers: planted faults are out, useless drafts do not pay."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from slimqwen import variant
from slimqwen.records import store
from slimqwen.search.tune import Tune, contest, tune_variant, tuner
from slimqwen.search.tune.arms import UNDRAFTED, Arm
from slimqwen.search.tune.changes import SettingsChange
from slimqwen.search.tune.contest import Contest
from slimqwen.serving.server import free_port
from slimqwen.stats.verdict import Verdict
from slimqwen.variant import Variant
from slimqwen.vllm_plugin.registration import PLUGINS
from tests.search.tune import planted
from tests.search.tune.turns import K2
from tests.zoo.editable_checkpoint import EditableCheckpoint
from tests.zoo.editable_checkpoint import tiny as tiny_checkpoint

pytestmark = pytest.mark.engine

OPTIONS: dict[str, Any] = {"command": ["slimqwen", "tune"], "even_if_busy": True}


def at_depth(depth: int) -> Arm:
    return Arm({"method": "mtp", "num_speculative_tokens": depth})


@pytest.fixture
def faulty(
    subject: Variant, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, servers_are_no_forks: None
) -> Variant:
    """The variant, served by engines with planted faults."""
    planted.install(tmp_path / "plugins")
    monkeypatch.syspath_prepend(str(tmp_path / "plugins"))
    return subject.with_lines(
        {
            "VLLM_PLUGINS": ",".join([*PLUGINS, planted.NAME]),
            "VLLM_MAX_MODEL_LEN": "256",
            "VLLM_PORT": str(free_port()),
        }
    )


def test_an_arm_that_corrupts_responses_and_one_that_dies_are_out_with_their_reasons(
    faulty: Variant, monkeypatch: pytest.MonkeyPatch
) -> None:
    arms = [UNDRAFTED, K2, at_depth(planted.CORRUPT), at_depth(planted.DYING)]
    monkeypatch.setattr(tuner, "list_arms", lambda served: arms)
    monkeypatch.setattr(Contest, "is_decided", True)  # after a round
    record = store.read_record(tune_variant(faulty, (1, 2), minutes=10, **OPTIONS), Tune)
    ended = {arm.name: arm.ended for arm in record.arms}
    assert ended["none"] == ended["MTP K=2"] == ""
    assert "greedy responses, 1 at a time, differ from the undrafted engine's" in ended["MTP K=3"]
    assert "planted: this engine dies" in ended["MTP K=5"]
    drafting = next(arm for arm in record.arms if arm.name == "MTP K=2")
    assert list(drafting.loads) == ["1", "2"]
    assert (drafting.loads["1"].acceptance_length or 0) > 1.5
    assert drafting.kv_tokens


@pytest.mark.timeout(1200)
def test_a_planted_winner_among_flags_is_found_and_a_slow_and_a_wrong_one_are_out(
    faulty: Variant, monkeypatch: pytest.MonkeyPatch
) -> None:
    budgets = {"quick": planted.QUICK, "slow": planted.SLOW, "wrong": planted.WRONG}
    flags = [
        SettingsChange(name, {"VLLM_MAX_NUM_BATCHED_TOKENS": str(size)}) for name, size in budgets.items()
    ]
    monkeypatch.setattr(tuner, "list_arms", lambda served: [UNDRAFTED])
    monkeypatch.setattr(tuner, "list_changes", lambda figures, **_: flags)
    monkeypatch.setattr(contest, "FEWEST_ROUNDS", 2)
    path = tune_variant(faulty, (1,), minutes=20, flags="exact", sessions=False, **OPTIONS)
    record = store.read_record(path, Tune)
    ended = {arm.name.removeprefix("none, "): arm.ended for arm in record.flags[0].arms}
    assert (ended["quick"], ended["slow"]) == ("pays alone", "surely slower than it")
    assert "greedy responses, 1 at a time, differ from the undrafted engine's" in ended["wrong"]
    assert (record.chosen, record.lines) == ("none, quick", {"VLLM_MAX_NUM_BATCHED_TOKENS": "1001"})


def scramble_drafts(editable: EditableCheckpoint) -> None:
    """Give the MTP head random weights, so that hardly any of its drafts is accepted."""
    generator = torch.Generator().manual_seed(0)
    for name, tensor in editable.tensors.items():
        if name.startswith("mtp.") and tensor.dim() == 2:
            random = torch.randn(tensor.shape, generator=generator) * tensor.float().std()
            editable.tensors[name] = random.to(tensor.dtype)


@pytest.mark.timeout(1200)
def test_where_drafts_are_useless_it_says_that_they_do_not_pay(
    subject: Variant, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, add_variant: Callable[..., Path]
) -> None:
    editable = tiny_checkpoint()
    scramble_drafts(editable)
    editable.write(tmp_path / "weights" / "useless")
    add_variant("useless", "BASE=v\nVLLM_MODEL=weights/useless\nVLLM_MAX_MODEL_LEN=256\n")
    useless = variant.load("useless", tmp_path).with_lines({"VLLM_PORT": str(free_port())})
    monkeypatch.setattr(tuner, "list_arms", lambda served: [UNDRAFTED, at_depth(4), at_depth(6)])
    record = store.read_record(tune_variant(useless, (1,), minutes=10, **OPTIONS), Tune)
    assert (record.verdict, record.chosen, record.lines) == (Verdict.FAIL, "none", {})
    assert record.advice[0].startswith("Drafts do not pay here: the fastest, MTP K=")
