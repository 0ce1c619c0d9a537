"""What MODEL names: variants, folders, config.json, shapes and repositories of the hub."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants

from slimqwen import variant
from slimqwen.checkpoint import CorruptCheckpointError, read_config
from slimqwen.checkpoint.tensors import list_tensors
from slimqwen.fit.memory import ServerSettings, size_checkpoint
from slimqwen.fit.optimised import list_optimised
from slimqwen.fit.subject import SubjectError, find_subject
from slimqwen.hub import HubError
from slimqwen.models.families import FamilyError
from tests import hub_server
from tests.hub_server import Hub
from tests.zoo.published_forms import PUBLISHED_FORMS

ROOT = variant.repository_root()
TINY = ROOT / "weights" / "tiny"


def test_a_variant_is_its_checkpoint_or_the_shape_that_it_will_have():
    here = find_subject("tiny", ROOT)
    assert here.variant == variant.load("tiny", ROOT)
    assert here.tensors == {name: (info.dtype, info.shape) for name, info in list_tensors(TINY).items()}
    assert here.settings["VLLM_MODEL"] == "weights/tiny"
    planned = find_subject("qwen3.5-4b-best", ROOT)
    assert planned.source.endswith("qwen3.5-4b-best/recipe.yaml")
    assert planned.tensors["mtp.draft_head.weight_packed"][1] == (32768, 2560 // 8)


def test_a_folder_is_its_tensors_and_a_config_json_what_it_promises(tmp_path: Path):
    folder = PUBLISHED_FORMS["multimodal-w4a16"].build(tmp_path / "checkpoint")
    stored = list_tensors(folder)
    subject = find_subject(str(folder), ROOT)
    assert subject.tensors == {
        name: (info.dtype, info.shape) for name, info in stored.items() if "visual" not in name
    }
    assert subject.other_bytes == sum(
        info.end - info.start for name, info in stored.items() if "visual" in name
    )
    alone = find_subject(str(folder / "config.json"), ROOT)
    assert alone.tensors.keys() == subject.tensors.keys()
    assert alone.describe_format() == (
        "compressed-tensors, 4-bit int",
        "all (but calibrate only on what is not packed)",
    )
    assert alone.describe_mtp() == "present, 16 bits, by config.json alone"


def test_the_experts_of_a_folder_are_counted_under_the_first(tmp_path: Path):
    folder = PUBLISHED_FORMS["qwen3.5-moe-w4a16"].build(tmp_path / "checkpoint")
    subject = find_subject(str(folder), ROOT)
    assert subject.tensors["model.layers.0.mlp.experts.0.up_proj.weight_packed"] == ("I32", (4, 64, 16))
    assert not any(".experts.1." in name for name in subject.tensors)


@pytest.mark.parametrize(
    ("published", "said"),
    [
        ("text", "present, 16 bits"),
        ("w4a16-mtp", "present, quantised"),
        ("fp8-blocks", "present, quantised"),
        ("gptq-act-order", "present, quantised"),
        ("mtp-lost", "lost: config.json promises an MTP head, the checkpoint has none"),
        ("no-mtp", "none"),
        ("qwen3", "none"),
    ],
)
def test_the_mtp_head_is_described_as_it_is(published: str, said: str, tmp_path: Path):
    folder = PUBLISHED_FORMS[published].build(tmp_path / "checkpoint")
    assert find_subject(str(folder), ROOT).describe_mtp() == said


@pytest.mark.parametrize(
    ("published", "form", "stages"),
    [
        ("text", "bfloat16", "all"),
        ("qwen3.5-moe", "bfloat16", "all but calibrate"),
        ("fp8-blocks", "fp8", "bake_cache, prune_vocab"),
        ("awq", "awq, 4-bit", "bake_cache, prune_vocab"),
        (
            "mixed",
            "compressed-tensors, 4-bit int, 8-bit float",
            "all (but calibrate only on what is not packed)",
        ),
    ],
)
def test_the_format_says_which_stages_take_it(published: str, form: str, stages: str, tmp_path: Path):
    found, taken = find_subject(str(PUBLISHED_FORMS[published].build(tmp_path / "x")), ROOT).describe_format()
    assert (found, taken[: len(stages)]) == (form, stages)


def test_a_name_of_nothing_lists_the_shapes():
    with pytest.raises(
        SubjectError, match=r"qwen4 is not a variant, .*; the shapes are cyankiwi, llama-3.1-8b, "
    ):
        find_subject("qwen4", ROOT)


def test_another_family_and_a_damaged_folder_are_one_line(tmp_path: Path):
    shutil.copytree(TINY, tmp_path / "other")
    config = tmp_path / "other" / "config.json"
    config.write_text(json.dumps({**read_config(tmp_path / "other"), "architectures": ["GemmaForCausalLM"]}))
    for model in (tmp_path / "other", config):
        with pytest.raises(FamilyError, match="GemmaForCausalLM"):
            find_subject(str(model), ROOT)
    config.write_text("[")
    with pytest.raises(CorruptCheckpointError, match="is not JSON"):
        find_subject(str(tmp_path / "other"), ROOT)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub with a checkpoint in three shards and an index."""
    folder = PUBLISHED_FORMS["multimodal-fp8"].build(tmp_path / "repository")
    yield from hub_server.running(folder, monkeypatch)


def test_of_a_repository_only_config_and_index_are_fetched(hub: Hub):
    subject = find_subject(hub_server.REPOSITORY, ROOT)
    assert {name for name, _ in hub.fetched()} == {"config.json", "model.safetensors.index.json"}
    whole = find_subject(str(hub.folder), ROOT)
    # Norms of this published form are in 16 bits, where those of the published models are in 32.
    assert {name: shape for name, (_, shape) in subject.tensors.items()} == {
        name: shape for name, (_, shape) in whole.tensors.items()
    }
    assert subject.other_bytes == pytest.approx(whole.other_bytes, rel=0.05)
    assert subject.describe_mtp() == "present, quantised"
    assert subject.describe_format()[0] == "fp8"


def test_a_renamed_head_is_found_by_the_index(hub: Hub):
    index = hub.folder / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"] = {
        f"model.{name}" if name.startswith("mtp.") else name: file
        for name, file in content["weight_map"].items()
    }
    index.write_text(json.dumps(content))
    said = find_subject(hub_server.REPOSITORY, ROOT).describe_mtp()
    assert said.startswith("renamed (model.mtp.fc.weight)")


def test_a_repository_of_one_file_is_described_by_its_config(hub: Hub):
    (hub.folder / "model.safetensors.index.json").unlink()
    subject = find_subject(hub_server.REPOSITORY, ROOT)
    assert subject.other_names is None
    assert "no safetensors index" in subject.source
    assert subject.has_mtp


def test_repositories_without_a_checkpoint_for_vllm_are_one_line(hub: Hub):
    (hub.folder / "config.json").unlink()
    with pytest.raises(HubError, match=r"owner/name has no config\.json; name"):
        find_subject(hub_server.REPOSITORY, ROOT)
    for file in hub.folder.glob("*.safetensors"):
        file.rename(file.with_suffix(".gguf"))
    with pytest.raises(HubError, match="owner/name has GGUF files; name the repository of its safetensors"):
        find_subject(hub_server.REPOSITORY, ROOT)


def test_a_gated_repository_and_a_missing_network_are_one_line(hub: Hub, monkeypatch: pytest.MonkeyPatch):
    hub.gated = True
    with pytest.raises(
        HubError, match=r"owner/name is gated: accept its terms at .* run `slimqwen fit owner/name`"
    ):
        find_subject(hub_server.REPOSITORY, ROOT)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(HubError, match="forbids asking the hub"):
        find_subject(hub_server.REPOSITORY, ROOT)


def test_a_folder_with_the_name_of_an_owner_does_not_hide_the_hub(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "owner" / "nome").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert find_subject(hub_server.REPOSITORY, ROOT).source.endswith("index of owner/name")
    with pytest.raises(
        SubjectError,
        match=r"no nime in the folder owner; did you mean owner/nome\?; on the hub: .* has no owner/nime at main",
    ):
        find_subject("owner/nime", ROOT)
    hub.requests.clear()
    with pytest.raises(SubjectError, match=r"there is no owner/nime|no nime in the folder owner"):
        find_subject("./owner/nime", ROOT)
    assert hub.requests == []


def test_a_folder_without_weights_is_what_its_config_json_promises(tmp_path: Path):
    shutil.copy(TINY / "config.json", tmp_path)
    subject = find_subject(str(tmp_path), ROOT)
    assert (subject.source, subject.has_mtp) == ("config.json alone", True)


def test_the_quantisation_beside_config_json_counts(tmp_path: Path):
    form = {
        "quant_algo": "NVFP4",
        "kv_cache_quant_algo": "FP8",
        "group_size": 16,
        "exclude_modules": ["lm_head", "mtp*"],
    }
    shutil.copy(TINY / "config.json", tmp_path)
    (tmp_path / "hf_quant_config.json").write_text(json.dumps({"quantization": form}))
    subject = find_subject(str(tmp_path), ROOT)
    assert subject.describe_format()[0] == "modelopt NVFP4"
    assert subject.tensors["model.layers.0.mlp.up_proj.weight"][0] == "U8"
    assert subject.tensors["mtp.layers.0.mlp.up_proj.weight"][0] == "BF16"
    (step, *_) = list_optimised(subject)
    settings = ServerSettings.of(subject, None, None)
    assert size_checkpoint(step, settings).model.attention_precision == "fp8"


@pytest.mark.parametrize(
    ("file", "content", "said"),
    [
        ("model-Q4_K_M.gguf", "", "has weights in GGUF"),
        ("pytorch_model.bin", "", "has weights in PyTorch's own format"),
        (
            "config.json",
            '{"quantization": {"bits": 4, "group_size": 64}}',
            "is a checkpoint of 4 bits in MLX's format",
        ),
    ],
)
def test_a_checkpoint_of_another_engine_is_named(tmp_path: Path, file: str, content: str, said: str):
    config = json.loads((TINY / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | json.loads(content or "{}")))
    if not content:
        (tmp_path / file).touch()
    for model in (tmp_path, tmp_path / file):
        with pytest.raises(SubjectError, match=f"{said}.*; name the checkpoint that it was made from"):
            find_subject(str(model), ROOT)


def test_one_file_of_a_checkpoint_names_its_folder():
    with pytest.raises(SubjectError, match=r"is one file of a checkpoint; name its folder, .*weights/tiny"):
        find_subject(str(next(TINY.glob("*.safetensors"))), ROOT)
