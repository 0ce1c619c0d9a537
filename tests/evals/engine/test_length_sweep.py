"""The length sweep: which lengths are broken, and that a fault planted at one length is found there."""

import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from slimqwen.evals.engine import length_sweep, scenarios
from slimqwen.evals.engine.combinations import REFERENCE_MODES
from slimqwen.evals.engine.length_sweep import LengthSweepSettings, Sweep, judge
from slimqwen.progress import silent
from slimqwen.stats.verdict import Verdict
from slimqwen.vllm_plugin.engine_fixes import aligned_states
from tests.evals.engine.examples import FLAGS, ROOT, TINY, answer

BLOCK_SIZE = 8
LENGTHS = range(17, 25)
MODES = REFERENCE_MODES.model_copy(update={"draft_tokens": 4, "prefix_caching": True})


CHANGED = {("hit", 20): (1, 99, 3)}


def judged(changes=None, gap=None, hits=8):
    """An arm whose answers are equal but for some changes, and its items; token 99 is `gap` nats less likely."""
    answers = {(cache, length): (1, 2, 3) for cache in ("cold", "hit") for length in LENGTHS}
    sweep = Sweep(BLOCK_SIZE, answers | (changes or {}), dict.fromkeys(LENGTHS, hits))
    reference = {length: answer((1, 2, 3), gap) for length in LENGTHS}
    return judge(length_sweep._ArmRun(MODES, 64, sweep, 1.0), reference, 0.1)


def test_equal_answers_with_hits_pass():
    arm, items = judged()
    assert (arm.verdict, arm.first_length, arm.lengths, arm.hit_tokens) == (Verdict.PASS, 17, 8, 64)
    assert len(items) == 16


def test_one_other_token_breaks_its_length_which_is_listed_with_its_remainders():
    arm, _ = judged(CHANGED)
    (broken,) = arm.broken
    assert (broken.cache, broken.prompt_tokens, broken.first_difference) == ("hit", 20, 1)
    assert arm.verdict == Verdict.FAIL
    assert length_sweep._listed(arm, "hit") == "20 (mod 8: 4, mod 128: 20)"


def test_a_near_tie_breaks_nothing():
    arm, _ = judged(CHANGED, gap=0.05)
    assert (arm.near_ties, arm.broken, arm.verdict) == (1, (), Verdict.PASS)


def test_without_a_hit_nothing_is_proved():
    arm, _ = judged(hits=0)
    assert (arm.misses, arm.verdict) == (8, Verdict.INCONCLUSIVE)


def test_an_engine_that_breaks_down_fails_its_arm():
    run = length_sweep._ArmRun(MODES, 64, "sweeping: the process died (SIGSEGV)", 1.0)
    arm, items = judge(run, {}, 0.1)
    assert (arm.verdict, arm.failure, items) == (Verdict.FAIL, run.sweep, [])


@pytest.fixture
def retentive(tmp_path):
    """tiny with states that hardly decay: its own forget a block while the next one is read."""
    folder = shutil.copytree(TINY, tmp_path / "retentive")
    tensors = load_file(folder / "model.safetensors")
    for name in tensors:
        if name.endswith("A_log"):
            tensors[name] = torch.full_like(tensors[name], -9.0)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.engine
def test_a_state_copied_one_block_late_is_found_at_the_length_where_it_is_planted(retentive, monkeypatch):
    settings = LengthSweepSettings(
        text="tinyworld",
        seed=3,
        noise_factor=3,
        draft_tokens=4,
        lengths=24,
        output_tokens=12,
        timeout_s=300,
    )
    plain = FLAGS | {"max-model-len": 1024, "max-num-batched-tokens": 1024, "dtype": "bfloat16"}
    drafting = {
        "enable-prefix-caching": True,
        "speculative-config": {"method": "mtp", "num_speculative_tokens": 4},
    }
    lengths: list[int] = []
    replay, copy_states = scenarios.replay, aligned_states._copy_states

    def note_length(llm, requests, **options):
        lengths.append(len(requests[0].prompt))
        return replay(llm, requests, **options)

    def copy_late(context, request, source, target, bias):
        late = lengths[-1] == lengths[0] + 9
        copy_states(context, request, source, target + late, bias)

    monkeypatch.setattr(scenarios, "replay", note_length)
    monkeypatch.setattr(aligned_states, "_copy_states", copy_late)
    sweep = length_sweep.sweep_lengths(retentive, retentive, (settings, plain | drafting, ROOT), silent)
    swept = sorted(sweep.hit_tokens)
    answers, noise = length_sweep.answer_lengths(retentive, retentive, (settings, plain, swept, ROOT), silent)
    arm, _ = judge(
        length_sweep._ArmRun(MODES, 1024, sweep, 1.0), answers, noise.near_tie_nats(settings.noise_factor)
    )
    assert set(sweep.hit_tokens.values()) == {sweep.block_size}
    assert {each.prompt_tokens for each in arm.broken} == {swept[0] + 9}
