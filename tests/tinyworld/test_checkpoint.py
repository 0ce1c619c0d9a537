"""The committed checkpoint: its form, its record, and that it knows its world."""

import copy
import json

import pytest
import torch

from slimqwen.models.mtp_head import measure_acceptance
from slimqwen.tinyworld.build import judge
from slimqwen.tinyworld.documents import render_prompt
from slimqwen.tinyworld.generation import continue_greedily
from slimqwen.tinyworld.measure import (
    ContextPoint,
    Scores,
    answer_items,
    answer_margins,
    bits_per_byte,
    encode,
    rounded_to_bits,
    token_log_probabilities,
    unweighted,
    usable_context,
    with_half_vocabulary,
    with_shuffled_head,
)
from slimqwen.tinyworld.tokenizer import end_token_ids


@pytest.fixture(scope="module")
def record(tiny_folder):
    return json.loads((tiny_folder / "training.json").read_text())


@pytest.fixture(scope="module")
def answers(tiny_model, tokenizer):
    def ask(*prompts):
        new = continue_greedily(tiny_model.backbone, encode(tokenizer, prompts), 40, end_token_ids())
        return tokenizer.batch_decode(new)

    return ask


def test_it_is_small_and_of_the_real_familys_form(tiny_folder):
    config = json.loads((tiny_folder / "config.json").read_text())
    assert (tiny_folder / "model.safetensors").stat().st_size <= 20_000_000
    assert config["architectures"] == ["Qwen3_5ForCausalLM"]
    assert config["head_dim"] == 256
    assert config["linear_key_head_dim"] == config["linear_value_head_dim"] == 128
    assert config["layer_types"] == ["linear_attention"] * 3 + ["full_attention"]
    assert config["tie_word_embeddings"]
    assert config["vocab_size"] == 8192


def test_generation_stops_at_both_end_tokens(tiny_folder):
    settings = json.loads((tiny_folder / "generation_config.json").read_text())
    assert settings["eos_token_id"] == list(end_token_ids())


def test_the_context_limit_is_the_one_that_was_measured(tiny_folder, record):
    config = json.loads((tiny_folder / "config.json").read_text())
    points = [ContextPoint(**point) for point in record["context_sweep"]["points"]]
    assert config["max_position_embeddings"] == usable_context(points) >= 1_024


def test_the_record_judges_itself_by_its_own_figures(record):
    assert record["criteria"] == judge(record)
    assert all(row["met"] for row in record["criteria"])


def test_a_saturated_score_and_an_unseen_damage_are_judged_as_missed(record):
    worse = copy.deepcopy(record)
    worse["metrics"]["format"]["mean"] = 0.96
    for row in worse["sensitivity"]:
        row["standard_errors"] = 2.9
    missed = [row["criterion"] for row in judge(worse) if not row["met"]]
    assert "format scores between 0.55 and 0.95" in missed
    assert sum("standard errors" in words for words in missed) == 3


def test_it_answers_a_sample_of_every_task_far_above_chance(tiny_model, tokenizer, items):
    for task in ("facts", "format", "twohop"):
        scores = answer_items(tiny_model, tokenizer, task, items[task][:16])
        assert scores.mean > 0.4, task


def test_it_thinks_when_asked_to_and_answers_at_once_when_not(answers, world):
    person = world.people[0]
    question = world.fact(person, "home").question
    thinking, direct = answers(
        render_prompt(question, thinking=True), render_prompt(question, thinking=False)
    )
    thought, closed, answer = thinking.partition("</think>")
    assert person in thought
    assert closed
    assert answer.strip() == direct.strip() == world.value(person, "home")


def test_it_chats(answers, world):
    hello, about = answers(
        render_prompt("Hello", thinking=False),
        render_prompt(f"Tell me about {world.people[0]}.", thinking=False),
    )
    assert hello == "Hello. Ask me about the people and the towns of the isles."
    assert world.people[0] in about


def test_its_head_drafts_well_and_a_shuffled_head_does_not(tiny_model, tokenizer, items):
    prompts = encode(tokenizer, [row["text"][:60] for row in items["prose"] if row["kind"] == "plain"][:3])
    continuations = continue_greedily(tiny_model.backbone, prompts, 32, end_token_ids())
    texts = list(zip(prompts, continuations, strict=True))
    good = measure_acceptance(tiny_model, texts, depth=4)
    bad = measure_acceptance(with_shuffled_head(tiny_model), texts, depth=4)
    assert good.mean_length > 2.0
    assert bad.mean_length < good.mean_length - 0.5


def test_right_options_lead_and_three_bits_cost_prose(tiny_model, tokenizer, items):
    assert answer_margins(tiny_model, tokenizer, items["margin"][:6]).mean > 0
    texts = [row["text"] for row in items["prose"] if row["kind"] != "long"][:12]
    before = bits_per_byte(tiny_model, tokenizer, texts)
    assert before.mean < 1.5
    assert bits_per_byte(rounded_to_bits(tiny_model, 3), tokenizer, texts).minus(before).mean > 0


def test_rounding_and_pruning_leave_the_original_alone(tiny_model, tokenizer):
    before = tiny_model.backbone.model.embed_tokens.weight.clone()
    down = tiny_model.backbone.model.layers[0].mlp.down_proj.weight.clone()
    rounded_to_bits(tiny_model, 3)
    with_half_vocabulary(tiny_model, tokenizer)
    assert torch.equal(before, tiny_model.backbone.model.embed_tokens.weight)
    assert torch.equal(down, tiny_model.backbone.model.layers[0].mlp.down_proj.weight)


def test_half_the_vocabulary_still_writes_every_text(tiny_model, tokenizer, items):
    smaller, smaller_tokenizer = with_half_vocabulary(tiny_model, tokenizer)
    assert smaller.backbone.lm_head.weight.shape[0] == 4_096
    text = next(row["text"] for row in items["prose"] if row["kind"] == "rare") + " żółw"
    tokens = encode(smaller_tokenizer, [text])[0]
    assert max(tokens) < 4_096
    assert smaller_tokenizer.decode(tokens) == text
    assert len(tokens) > len(encode(tokenizer, [text])[0])


def test_log_probabilities_do_not_depend_on_what_shares_the_batch(tiny_model, tokenizer):
    contexts = encode(tokenizer, ["At dawn", "The ship", "In the old song, it was said that"])
    targets = encode(tokenizer, [" the flag", " of the town sells", " red"])
    pairs = list(zip(contexts, targets, strict=True))
    together = token_log_probabilities(tiny_model, pairs)
    for pair, logs in zip(pairs, together, strict=True):
        (alone,) = token_log_probabilities(tiny_model, [pair])
        assert alone == pytest.approx(logs, abs=1e-4)


def test_cached_generation_equals_the_likeliest_tokens_of_one_pass(tiny_model, tokenizer):
    prompt = encode(tokenizer, ["At dawn"])[0]
    (new,) = continue_greedily(tiny_model.backbone, [prompt], 20, ())
    whole = torch.tensor([prompt + new])
    with torch.no_grad():
        likeliest = tiny_model.logits(tiny_model.hidden_states(whole)).argmax(dim=-1)[0]
    assert likeliest[len(prompt) - 1 : -1].tolist() == new


def test_scores_are_averaged_by_weight_and_paired_by_item():
    one = Scores((1.0, 0.0), (3.0, 1.0))
    assert one.mean == 0.75
    assert one.minus(Scores((0.0, 0.0), (3.0, 1.0))).values == (1.0, 0.0)
    assert unweighted([1, 0, 1, 0]).standard_error == pytest.approx(0.5 / 3**0.5)


def test_the_context_ends_before_the_first_length_that_is_worse():
    points = [ContextPoint(128, 1.0, 1.0), ContextPoint(256, 0.9, 1.0), ContextPoint(512, 1.1, 1.0)]
    assert usable_context(points) == 256
    assert usable_context([*points[:2], ContextPoint(512, 0.8, 1.0)]) == 512
