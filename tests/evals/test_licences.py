"""The chain of licences: which parts a variant has, and which of them stop its publication."""

import pytest

from slimqwen import variant
from slimqwen.evals.licences import list_parts
from slimqwen.evals.model_card import _name_datasets
from slimqwen.evals.suites.suite import Suite
from slimqwen.text import corpus
from tests.evals.recipe_made import RECIPE, ROOT, gated, promoted_card

pytestmark = pytest.mark.usefixtures("stamps")


def licences(one):
    return {(part.role, part.name): part.licence for part in list_parts(one)}


def with_drafter(made, model, card=""):
    drafter = made.root / "weights" / "drafter"
    drafter.mkdir()
    (drafter / "README.md").write_text(card)
    return made.with_lines(
        {"VLLM_SPECULATIVE_CONFIG": f'{{"model": "{model}", "num_speculative_tokens": 4}}'}
    )


def test_a_variant_without_drafter_and_public_text_has_the_base_alone(made):
    assert licences(made) == {("base", "tiny"): "unknown"}
    assert [part.fault for part in list_parts(made)] == ["tiny states no licence"]


@pytest.mark.parametrize(
    ("card", "licence", "fault"),
    [
        ("---\nlicense: mit\n---\n", "mit", None),
        ("no front matter", "unknown", "weights/drafter states no licence"),
        ("---\nlicense: cc-by-nc-4.0\n---\n", "cc-by-nc-4.0", "weights/drafter has the licence cc-by-nc-4.0"),
        (
            "---\nlicense: other\nlicense_name: qwen-research\n---\n", "qwen-research",
            "weights/drafter has the licence qwen-research",
        ),
    ],
)  # fmt: skip
def test_a_drafter_of_another_maker_states_its_own(made, card, licence, fault):
    _, drafter = list_parts(with_drafter(made, "weights/drafter", card))
    assert (drafter.role, drafter.licence, drafter.fault) == ("drafter", licence, fault)


def test_a_drafter_outside_the_workspace_is_named_without_its_folders(made):
    one = with_drafter(made, made.root / "weights" / "drafter")
    assert ("drafter", "drafter") in licences(one)


def test_the_checkpoints_own_drafts_are_no_part_of_another_maker(made):
    assert len(list_parts(with_drafter(made, "weights/small"))) == 1
    assert len(list_parts(made.with_lines({"VLLM_SPECULATIVE_CONFIG": '{"method": "mtp"}'}))) == 1


def test_a_licence_text_for_non_commercial_use_is_one(made):
    one = with_drafter(made, "weights/drafter")
    (made.root / "weights" / "drafter" / "LICENSE").write_text("You may use it for NON-COMMERCIAL purposes.")
    assert list_parts(one)[1].is_non_commercial


def test_the_data_sets_of_a_public_mix_are_parts_also_of_a_recipe_further_back(
    made, add_variant, monkeypatch
):
    monkeypatch.setattr(corpus, "repository_root", lambda: made.root)
    config = add_variant("between", "BASE=tiny\nVLLM_MODEL=weights/between\n", baseline="tiny")
    (config.parent / "recipe.yaml").write_text(RECIPE.replace("path: tinyworld", "path: general"))
    (made.folder / "recipe.yaml").write_text(RECIPE.replace("base: tiny", "base: between"))
    found = licences(variant.load("small", made.root))
    assert found["text", "HuggingFaceTB/smoltalk"] == "Apache-2.0"
    assert len(found) == 5


def test_the_card_lists_what_is_not_the_base(made):
    one = with_drafter(made, "weights/drafter", "---\nlicense: mit\n---\n")
    gated(made)
    assert "- drafter" not in promoted_card(made).text
    setting = one.settings["VLLM_SPECULATIVE_CONFIG"].value
    with (made.folder / "config.env").open("a") as lines:
        lines.write(f"VLLM_SPECULATIVE_CONFIG='{setting}'\n")
    drafting = variant.load("small", made.root)
    gated(drafting)
    assert "- drafter weights/drafter: mit" in promoted_card(drafting).text


def test_a_task_of_a_hubs_data_set_names_it_and_one_of_the_same_responses_too():
    names = _name_datasets(Suite.load("core", ROOT))
    assert names["mmlu_pro"] == names["loops"] == "TIGER-Lab/MMLU-Pro"
    assert "tool_calls" not in names
