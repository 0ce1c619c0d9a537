"""A published variant: what the folder holds, that it is the checkpoint that was judged, and what is refused."""

import hashlib

import pytest
import yaml
from huggingface_hub import ModelCard

from slimqwen import checkpoint
from slimqwen.checkpoint.files import COMPILE_CACHE, MANIFEST, carry_all
from slimqwen.errors import SlimqwenError
from slimqwen.evals import EvalError
from slimqwen.evals.publication import publish_variant, served_elsewhere
from slimqwen.records import store
from tests.evals.recipe_made import gated

pytestmark = pytest.mark.usefixtures("stamps")


@pytest.fixture
def judged(made):
    """A variant whose gate passed, with a compile cache in its checkpoint."""
    for name in COMPILE_CACHE:
        (made.weights / name).write_bytes(b"{}")
    gated(made)
    return made


def test_the_folder_is_the_judged_checkpoint_without_what_is_for_one_machine(judged, tmp_path):
    target = tmp_path / "out" / "small"
    files = {path.relative_to(target).as_posix() for path in publish_variant(judged, target, "apache-2.0")}
    assert checkpoint.digest(target) == checkpoint.digest(judged.weights)
    assert {"config.json", "model.safetensors", "tokenizer.json", "README.md", "SHA256SUMS"} <= files
    assert files.isdisjoint({*COMPILE_CACHE, MANIFEST})
    assert (target / "slimqwen" / "recipe.yaml").read_text() == (judged.folder / "recipe.yaml").read_text()
    assert [name for name in files if name.startswith("slimqwen/small_gate_")]


def test_the_checksums_are_those_of_every_other_file(judged, tmp_path):
    files = publish_variant(judged, tmp_path / "small", "apache-2.0")
    lines = (tmp_path / "small" / "SHA256SUMS").read_text().splitlines()
    stated = {name: digest for digest, name in (line.split("  ", 1) for line in lines)}
    found = {
        path.relative_to(tmp_path / "small").as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in files
        if path.name != "SHA256SUMS"
    }
    assert stated == found


def test_the_card_states_base_relation_and_the_licence_that_was_given(judged, tmp_path):
    publish_variant(judged, tmp_path / "small", "apache-2.0")
    card = ModelCard.load(tmp_path / "small" / "README.md")
    assert card.data.license == "apache-2.0"
    assert "**Licence.** apache-2.0." in card.content
    assert card.data.base_model == "tiny"
    assert card.data.base_model_relation == "finetune"  # this copy of tiny is not quantised
    assert "Without Slimqwen" in card.content


def test_a_base_without_licence_is_refused_until_one_is_stated(judged, tmp_path):
    with pytest.raises(EvalError, match=r"^tiny states no licence; .* --licence apache-2\.0$"):
        publish_variant(judged, tmp_path / "small")
    assert not (tmp_path / "small").exists()


def test_a_base_for_non_commercial_use_is_refused_until_one_is_stated(judged, tmp_path):
    tiny = judged.root / "weights" / "tiny"
    original = tiny.resolve()
    tiny.unlink()
    tiny.mkdir()
    carry_all(original, tiny)
    (tiny / "README.md").write_text(f"---\n{yaml.safe_dump({'license': 'cc-by-nc-4.0'})}---\n")
    with pytest.raises(EvalError, match=r"has the licence cc-by-nc-4\.0"):
        publish_variant(judged, tmp_path / "small")


def test_the_model_index_has_the_scores_of_the_gates_records_alone(judged, tmp_path):
    publish_variant(judged, tmp_path / "small", "apache-2.0")
    (result,) = ModelCard.load(tmp_path / "small" / "README.md").data.eval_results
    (path,) = judged.folder.glob("quality_*.json")
    ((task, score),) = store.read_record(path).tasks.items()
    assert (result.dataset_type, result.metric_type, result.metric_value) == (
        task,
        score.measure,
        score.value,
    )
    assert result.dataset_name == f"{task}, of Slimqwen's suite tinyworld"
    assert result.metric_args == {"standard_error": score.standard_error, "items": score.item_count}


def test_what_was_not_judged_and_what_no_recipe_made_is_refused(made, tmp_path):
    with pytest.raises(EvalError, match="no gate record fits small"):
        publish_variant(made, tmp_path / "small", "mit")
    (made.folder / "recipe.yaml").unlink()
    with pytest.raises(EvalError, match="no recipe made small"):
        publish_variant(made, tmp_path / "small", "mit")


def test_a_folder_that_exists_is_never_touched(judged, tmp_path):
    (tmp_path / "small").mkdir()
    with pytest.raises(SlimqwenError, match="exists already; name a folder that does not"):
        publish_variant(judged, tmp_path / "small", "mit")
    assert list((tmp_path / "small").iterdir()) == []


def test_the_line_for_a_server_without_slimqwen_keeps_the_context(judged, tmp_path):
    assert served_elsewhere(judged, tmp_path) == f"vllm serve {tmp_path} --max-model-len 256"
