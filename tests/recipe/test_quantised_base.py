"""The recipe for a published 4-bit base, in small: head, embedding, MTP head, draft vocabulary, baked cache."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
from transformers import AutoTokenizer

from slimqwen import checkpoint, variant
from slimqwen.checkpoint.tensors import list_tensors
from slimqwen.fit import cost
from slimqwen.fit.architecture import read_model
from slimqwen.recipe import variant_recipe
from slimqwen.serving.in_process import counter, engine
from slimqwen.variant import Variant
from tests.identity.coverage_by_keys import every_stage_covered
from tests.recipe.repository_of_v import CONFIG
from tests.zoo.published_forms import PUBLISHED_FORMS

ROOT = variant.repository_root()
COMMIT = "0123456789abcdef0123456789abcdef01234567"
DEPTH = 2
# The stages of experiments/qwen3.8-27b-best/recipe.yaml in the same order.
RECIPE = f"""
description: a test
base: owner/four-bits@{COMMIT}
stages:
  - quantise_lm_head:
      rounding: gptq
      corpus: {{path: tinyworld, sequences: 128, length: 128}}
  - quantise_embedding:
      bits: 8
  - calibrate:
      targets: {{mtp: W4A16}}
  - sample_outputs:
      prompts: {{path: tinyworld_prompts}}
      texts: 256
      held_out: 16
      tokens: 48
  - trim_draft_vocab:
      size: 50%
      bits: 4
  - bake_cache:
      prompt_tokens: [1]
"""

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Variant:
    """The variant that the recipe made of the published form multimodal-w4a16, and its base beside it."""
    root = tmp_path_factory.mktemp("repository")
    PUBLISHED_FORMS["multimodal-w4a16"].build(root / "weights" / "base")
    source = f"SOURCE=owner/four-bits\nREVISION={COMMIT}\n"
    config = CONFIG.replace("weights/v", "weights/base") + "VLLM_LANGUAGE_MODEL_ONLY=1\n"
    lines = {"base": config + source, "v": "BASE=base\nVLLM_MODEL=weights/v\n"}
    for name, text in lines.items():
        folder = root / "experiments" / name
        folder.mkdir(parents=True)
        (folder / "config.env").write_text(text)
        measurements = {"hypothesis": "it works", "baseline": None if name == "base" else "base"}
        (folder / "measurements.json").write_text(json.dumps(measurements))
    (root / "experiments" / "v" / "recipe.yaml").write_text(RECIPE)
    made = variant.load("v", root)
    with every_stage_covered(tmp_path_factory.mktemp("calls")):
        variant_recipe.run_recipe(made, stages=1)  # GPTQ; others are traced in their own tests
    variant_recipe.run_recipe(made, stages=5)  # `test_bake_cache` bakes
    return made


def test_the_small_recipe_has_the_stages_of_the_large_one():
    write_text, *steps = variant_recipe.read_recipe(variant.load("qwen3.8-27b-best", ROOT)).steps
    assert write_text.stage.name == "write_text"  # the small recipe names its texts
    assert [f"- {step.stage.name}:" for step in steps] == [
        line.strip() for line in RECIPE.splitlines() if line.startswith("  - ")
    ]


def test_what_no_stage_touches_stays_and_the_head_is_better_than_rounded(made: Variant):
    assert variant_recipe.unexplained_changes(made) == []
    assert variant_recipe.unexplained_settings(made) == []
    base = checkpoint.quantisation(checkpoint.read_config(made.root / "weights" / "base"))
    groups = checkpoint.quantisation(checkpoint.read_config(made.weights))["config_groups"]
    assert groups["group_0"] == base["config_groups"]["group_0"]
    manifests = (made.root / "weights" / "store").glob("*/manifest.json")
    facts = [json.loads(file.read_text())["facts"] for file in manifests]
    [head] = [each for each in facts if "head_error" in each]
    assert head["head_error"] < 0.9 * head["rounded_head_error"]


def test_a_step_reads_fewer_bytes_of_every_part_that_the_recipe_changes(made: Variant):
    before, after = (
        cost.count_part_bytes(
            read_model(list_tensors(folder), checkpoint.read_config(folder)), DEPTH, context_len=128
        )
        for folder in (made.root / "weights" / "base", made.weights)
    )
    assert sum(after.values()) < 0.7 * sum(before.values())
    assert {name for name in before if after[name] != before[name]} == {
        "output head",
        "draft layers",
        "draft head",
        "states and KV cache",  # and the rows of the embedding that the tokens of the step gather
    }


def accepted_by_group(folder: Path, prompts: list[list[int]]) -> np.ndarray:
    """Accepted drafts and drafts, of each eight prompts: float [groups, 2]."""
    from vllm import SamplingParams

    greedy = SamplingParams(max_tokens=40, temperature=0.0)
    names = ("vllm:spec_decode_num_accepted_tokens", "vllm:spec_decode_num_drafts")
    totals = [(0, 0)]
    with engine(folder, num_speculative_tokens=DEPTH, max_num_seqs=8) as llm:
        for first in range(0, len(prompts), 8):
            asked = [{"prompt_token_ids": ids} for ids in prompts[first : first + 8]]
            llm.generate(asked, greedy, use_tqdm=False)
            totals.append((counter(llm, names[0]), counter(llm, names[1])))
    return np.diff(np.array(totals, dtype=float), axis=0)


def test_vllm_serves_it_and_accepts_no_fewer_drafts(made: Variant):
    tokenizer = AutoTokenizer.from_pretrained(made.weights)
    lines = (ROOT / "eval" / "texts" / "tinyworld_prompts.jsonl").read_text().splitlines()[-48:]
    documents = [json.loads(line) for line in lines]
    prompts = [
        tokenizer(document.get("prompt") or document["text"])["input_ids"][:64] for document in documents
    ]
    before, after = (
        accepted_by_group(folder, prompts) for folder in (made.root / "weights" / "base", made.weights)
    )
    shares = [groups[:, 0] / groups[:, 1] for groups in (before, after)]
    assert shares[0].mean() > 1  # of two drafts: the head works
    gains = shares[1] - shares[0]
    assert gains.mean() > -2 * gains.std(ddof=1) / math.sqrt(len(gains))
