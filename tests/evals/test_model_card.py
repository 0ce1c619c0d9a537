"""What a model card states: the hub's metadata, base and licence, the gate's table, what vLLM needs."""

from pathlib import Path

import pytest
import torch

from slimqwen import checkpoint
from slimqwen.checkpoint import draft_head
from slimqwen.checkpoint.config import write_config
from slimqwen.checkpoint.files import bytes_on_disk, carry_all
from slimqwen.records import provenance
from tests.checkpoints import edited_tensors, in_old_layout
from tests.evals.recipe_made import RECIPE, gated, promoted_card

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.usefixtures("stamps")


def test_the_card_has_the_hubs_metadata_and_the_table_of_the_gate(made):
    gated(made)
    card = promoted_card(made)
    data = card.data
    assert (data.base_model, data.library_name, data.license) == ("tiny", "transformers", "unknown")
    assert data.base_model_relation == "finetune"
    assert {"slimqwen", "vllm", "qwen3_5_text"} == set(data.tags)
    assert data.model_name == "small"
    for text in (
        "Four bits for the MLPs.",
        made.hypothesis,
        "Gate of small against tiny: pass",
        "max-model-len: 256",
    ):
        assert text in card.text
    assert checkpoint.digest(made.weights) in card.text
    assert f"{bytes_on_disk(made.weights) / 1e6:.1f} MB" in card.text
    assert provenance.CPU_NOTE in card.text
    assert str(made.root) not in card.content


def test_a_quantised_checkpoint_says_how(made):
    quantisation = {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True}
    write_config(made.weights, checkpoint.read_config(made.weights) | {"quantization_config": quantisation})
    gated(made)
    data = promoted_card(made).data
    assert data.base_model_relation == "quantized"
    assert "gptq" in data.tags


def test_a_base_from_the_hub_is_named_as_there(made, add_variant, tmp_path):
    add_variant("copy", "SOURCE=Owner/Model\nVLLM_MODEL=weights/copy\n")
    (made.folder / "recipe.yaml").write_text(RECIPE.replace("base: tiny", "base: copy"))
    gated(made)
    data = promoted_card(made).data
    assert (data.base_model, data.license) == ("Owner/Model", "other")
    assert data.license_link == "https://huggingface.co/Owner/Model"


BASES_CARD = "---\nlicense: apache-2.0\nlicense_link: LICENSE\nbase_model: Owner/Model\n---\n# Mine\n"
OWN = {"license": "other", "license_name": "that of tiny", "license_link": "LICENSE.txt"}


@pytest.mark.parametrize(
    ("files", "base_model", "licence", "said"),
    [
        ({}, "tiny", {"license": "unknown"}, "Neither the base's model card nor a licence file states one."),
        ({"README.md": BASES_CARD}, "Owner/Model", {"license": "apache-2.0"}, "**Licence.** apache-2.0."),
        ({"README.md": BASES_CARD}, "Owner/Model", {"license": "apache-2.0"}, "was made from Owner/Model by its own"),
        ({"LICENSE": " Apache License\nVersion 2.0,"}, "tiny", {"license": "apache-2.0"}, "text is in `LICENSE`"),
        ({"LICENSE.txt": "Tongyi Qianwen LICENSE"}, "tiny", OWN, "that of tiny; its text is in `LICENSE.txt`"),
        ({"README.md": "---\n: [\n---\n"}, "tiny", {"license": "unknown"}, "Neither"),
        ({"README.md": "no front matter"}, "tiny", {"license": "unknown"}, "Neither"),
    ],
)  # fmt: skip
def test_the_card_names_the_base_and_licence_that_the_bases_own_card_and_files_state(
    made, tmp_path, files, base_model, licence, said
):
    (tmp_path / "weights" / "tiny").unlink()
    base = tmp_path / "weights" / "tiny"
    base.mkdir()
    carry_all(ROOT / "weights" / "tiny", base)
    for name, text in files.items():
        for folder in (base, *([made.weights] if name != "README.md" else [])):  # as a stage carries it
            (folder / name).write_text(text)
    gated(made)
    card = promoted_card(made)
    stated = {key: value for key, value in card.data.to_dict().items() if key.startswith("license")}
    assert (card.data.base_model, stated) == (base_model, licence)
    assert said in card.text


def test_a_relative_link_to_the_licence_of_a_base_on_the_hub_leads_to_its_repository(
    made, add_variant, tmp_path
):
    add_variant("copy", "SOURCE=Owner/Model\nVLLM_MODEL=weights/copy\n")
    (tmp_path / "weights" / "copy").mkdir()
    (tmp_path / "weights" / "copy" / "README.md").write_text(BASES_CARD.replace("Owner", "Other"))
    (made.folder / "recipe.yaml").write_text(RECIPE.replace("base: tiny", "base: Owner/Model"))
    gated(made)
    data = promoted_card(made).data
    assert (data.base_model, data.license) == ("Owner/Model", "apache-2.0")
    assert data.license_link == "https://huggingface.co/Owner/Model/blob/main/LICENSE"


def head_apart(tensors):
    head = {
        draft_head.WEIGHT: tensors["model.embed_tokens.weight"][:64].clone(),
        draft_head.TOKEN_IDS: torch.arange(64),
    }
    return tensors | head


def head_lost(tensors):
    return {name: tensor for name, tensor in tensors.items() if not name.startswith("mtp.")}


@pytest.mark.parametrize(
    ("change", "old", "said"),
    [
        (dict, False, "drafts from the full vocabulary, which needs no plugin"),
        (head_lost, False, "no MTP head and nothing that needs Slimqwen's plugin"),
        (head_apart, False, "(64 ids, in `draft_head.safetensors`) needs Slimqwen's plugin"),
        (head_apart, True, "ends at the start with MTP (no module or parameter named 'draft_head')"),
    ],
)
def test_the_card_says_what_vllm_does_without_the_plugin(made, change, old, said):
    with edited_tensors(made.weights) as tensors:
        changed = change(tensors)
        tensors.clear()
        tensors.update(changed)
    if change is head_apart:
        write_config(made.weights, draft_head.announced(checkpoint.read_config(made.weights), 64))
    if old:
        in_old_layout(made.weights)
    gated(made)
    assert said in promoted_card(made).text
