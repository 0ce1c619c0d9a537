"""A tuning of the embedded model over real servers: planted faults are out, useless drafts do not pay."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from slimqwen import variant
from slimqwen.records import store
from slimqwen.search.tune import Tune, tune_variant, tuner
from slimqwen.search.tune.arms import UNDRAFTED, Arm
from slimqwen.search.tune.contest import Contest
from slimqwen.serving.server import free_port
from slimqwen.stats.verdict import Verdict
from slimqwen.variant import Variant
from slimqwen.vllm_plugin.registration import PLUGINS
from tests.search.tune import planted
from tests.search.tune.turns import K2
from tests.zoo.specimen import Specimen
from tests.zoo.specimen import tiny as tiny_specimen

pytestmark = pytest.mark.engine

OPTIONS: dict[str, Any] = {"command": ["slimqwen", "tune"], "even_if_busy": True}


def at_depth(depth: int) -> Arm:
    return Arm({"method": "mtp", "num_speculative_tokens": depth})


@pytest.fixture
def faulty(subject: Variant, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Variant:
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


def scramble_drafts(specimen: Specimen) -> None:
    """Give the MTP head random weights, so that hardly any of its drafts is accepted."""
    generator = torch.Generator().manual_seed(0)
    for name, tensor in specimen.tensors.items():
        if name.startswith("mtp.") and tensor.dim() == 2:
            random = torch.randn(tensor.shape, generator=generator) * tensor.float().std()
            specimen.tensors[name] = random.to(tensor.dtype)


@pytest.mark.timeout(1200)
def test_where_drafts_are_useless_it_says_that_they_do_not_pay(
    subject: Variant, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, add_variant: Callable[..., Path]
) -> None:
    specimen = tiny_specimen()
    scramble_drafts(specimen)
    specimen.write(tmp_path / "weights" / "useless")
    add_variant("useless", "BASE=v\nVLLM_MODEL=weights/useless\nVLLM_MAX_MODEL_LEN=256\n")
    useless = variant.load("useless", tmp_path).with_lines({"VLLM_PORT": str(free_port())})
    monkeypatch.setattr(tuner, "list_arms", lambda served: [UNDRAFTED, at_depth(4), at_depth(6)])
    record = store.read_record(tune_variant(useless, (1,), minutes=10, **OPTIONS), Tune)
    assert (record.verdict, record.chosen, record.lines) == (Verdict.FAIL, "none", {})
    assert record.advice[0].startswith("Drafts do not pay here: the fastest, MTP K=")


def test_a_killed_tuning_continues(subject: Variant, tmp_path: Path) -> None:
    """The process is killed in its second turn; the same command takes the first from its journal."""
    port = free_port()
    code = f"""
import sys
from slimqwen import variant
from slimqwen.search.tune import tune_variant, tuner
from slimqwen.search.tune.arms import UNDRAFTED, Arm
from slimqwen.search.tune.contest import Contest
Contest.is_decided = True  # after a round
tuner.list_arms = lambda served: [UNDRAFTED, Arm({{"method": "mtp", "num_speculative_tokens": 2}})]
one = variant.load("v", __import__("pathlib").Path(sys.argv[1])).with_lines({{"VLLM_PORT": "{port}"}})
print(tune_variant(one, (1,), minutes=10, command=["slimqwen"], even_if_busy=True,
                   progress=lambda *step: print(*step, flush=True)))
"""
    command = [sys.executable, "-c", code, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as first:
        assert first.stdout is not None
        for line in first.stdout:
            if line.startswith("MTP K=2: own"):
                first.kill()
                break
    (journal,) = (tmp_path / ".cache" / "tune").glob("*.jsonl")
    assert len(journal.read_text().splitlines()) == 2  # what was prepared, and the undrafted turn
    second = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "none: own" not in second.stdout.partition("MTP K=2")[0]
    assert "plain engine" not in second.stdout
    record = store.read_record(Path(second.stdout.splitlines()[-1]), Tune)
    assert {arm.name: arm.rounds for arm in record.arms} == {"none": 1, "MTP K=2": 1}
