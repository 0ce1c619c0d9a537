"""Who is promoted, who is not and why, and the model card."""

import json
from pathlib import Path

import pytest
import torch
from huggingface_hub import ModelCard

from slimqwen import checkpoint, variant
from slimqwen.checkpoint import MissingCheckpointError, draft_head
from slimqwen.checkpoint.config import write_config
from slimqwen.checkpoint.files import bytes_on_disk, carry_all, file_records
from slimqwen.evals import EvalError, promotion
from slimqwen.evals.checks import GateSettings
from slimqwen.evals.quality import Quality
from slimqwen.evals.suites.suite import Suite
from slimqwen.records import provenance, store
from slimqwen.records.record import Finding
from slimqwen.records.reuse import changed_inputs
from slimqwen.serving.command import ServerCommand
from tests import record_files
from tests.checkpoints import edited_tensors, in_old_layout
from tests.evals.gate_checks import link_settings

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.usefixtures("stamps")
CHECKS = ("fidelity", "acceptance", "quality", "engine")
RECIPE = (
    "description: Four bits for the MLPs.\nbase: tiny\nstages:\n  - calibrate: {corpus: {path: tinyworld}}\n"
)


@pytest.fixture
def one(tmp_path, add_variant):
    """A variant whose checkpoint lies in the store, as a recipe leaves it."""
    add_variant("tiny", "VLLM_MODEL=weights/tiny\nVLLM_MAX_MODEL_LEN=256\n")
    config = add_variant("small", "BASE=tiny\nVLLM_MODEL=weights/small\n", baseline="tiny")
    (config.parent / "recipe.yaml").write_text(RECIPE)
    entry = tmp_path / "weights" / "store" / ("ab" * 32)
    entry.mkdir(parents=True)
    (tmp_path / "weights" / "tiny").symlink_to(ROOT / "weights" / "tiny")
    carry_all(ROOT / "weights" / "tiny", entry)
    checkpoint.Manifest(
        stage="calibrate",
        key=entry.name,
        ingredients={"input": "cd" * 32},
        files=file_records(entry),
        wall_seconds=1,
        peak_memory_bytes=1,
        versions={},
    ).write(entry)
    (tmp_path / "weights" / "small").symlink_to(Path("store") / entry.name)
    link_settings(tmp_path)
    return variant.load("small", tmp_path)


def described(one, settings=None):
    settings = settings or GateSettings.load("tinyworld", one.root)
    server = ServerCommand.resolve(one)
    files = settings.inputs(one.root)
    return provenance.describe(server, ["x"], provenance.utc_now(), datasets=files).as_json()


def gated(one, verdict="pass", data=None, **changes):
    """A gate record of a variant as it is now, and the quality record that it rests on, made with this data."""
    suite = Suite.load("tinyworld", one.root)
    (task,) = suite.tasks
    items = [{"task": task.name, "item": str(n), "value": 1.0, "weight": 1} for n in range(4)]
    block = described(one, suite) | ({} if data is None else {"datasets": data})
    quality = record_files.example("quality", variant=one.name, provenance=block, suite="tinyworld")
    settings = suite.settings_of(task)
    quality["tasks"] = {task.name: quality["tasks"]["example_facts"] | {"settings": settings}}
    evidence = record_files.write(one.folder, quality, items)
    record = {
        "schema": "gate/1",
        "variant": one.name,
        "baseline": "tiny",
        "plan": "tinyworld",
        "verdict": verdict,
        "verdicts": dict.fromkeys(CHECKS, "pass") | {"quality": verdict},
        "records": [f"{one.name}/{evidence.name}"],
        "provenance": described(one) | changes,
    }
    findings = [
        Finding(gate=gate, figure=gate, value=value, low=value, high=1.0, limit=0.0, verdict=each).as_json()
        for gate, value, each in (("acceptance", 0.99, "pass"), ("quality", 0.0, verdict))
    ]
    return record_files.write(one.folder, record, findings)


def claim(one, **fields):
    """Change fields of the variant's measurements.json."""
    file = one.folder / "measurements.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


def append(file, text):
    with file.open("a") as changed:
        changed.write(text)


def promoted_card(one):
    return ModelCard.load(promotion.promote_variant(one).card)


def state(root):
    return {
        path: path.read_bytes()
        for folder in ("experiments", "weights")
        for path in (root / folder).rglob("*")
        if path.is_file()
        and path.name != ".hashes.json"
        and not path.is_relative_to(root / "weights" / "tiny")
    }


def test_a_variant_whose_gate_passed_is_promoted_with_the_records_of_its_checkpoint(one):
    present = gated(one)
    other = described(one)["checkpoint"] | {"digest": "ef" * 32}
    earlier = gated(one, checkpoint=other)
    claim(one, records=[earlier.name, present.name])
    gate = gated(one)
    promoted = promotion.promote_variant(one)
    claimed = store.read_measurements(one.folder)
    assert promoted.changed
    assert promoted.gate == gate
    assert (claimed.status, claimed.verdict) == ("promoted", "pass")
    scores = store.records(one.folder, Quality)[0]
    assert claimed.records == tuple(sorted([present.name, gate.name, scores.name]))
    assert claimed.hypothesis == one.hypothesis


def test_speed_that_is_claimed_has_to_be_proven_by_a_timing(one):
    gated(one)
    before = state(one.root)
    with pytest.raises(EvalError, match="small claims speed: not timed; or take `speed` out of `claims`"):
        promotion.promote_variant(one, {"speed": "not timed"})
    assert state(one.root) == before
    claim(one, claims=["quality"])
    assert promotion.promote_variant(one, {"memory": "not measured"}).changed


def test_the_card_has_the_hubs_metadata_and_the_table_of_the_gate(one):
    gated(one)
    card = promoted_card(one)
    data = card.data
    assert (data.base_model, data.library_name, data.license) == ("tiny", "transformers", "unknown")
    assert data.base_model_relation == "finetune"
    assert {"slimqwen", "vllm", "qwen3_5_text"} == set(data.tags)
    assert data.model_name == "small"
    for text in (
        "Four bits for the MLPs.",
        one.hypothesis,
        "Gate of small against tiny: pass",
        "max-model-len: 256",
    ):
        assert text in card.text
    assert checkpoint.digest(one.weights) in card.text
    assert f"{bytes_on_disk(one.weights) / 1e6:.1f} MB" in card.text
    assert provenance.CPU_NOTE in card.text
    assert str(one.root) not in card.content


def test_a_quantised_checkpoint_says_how(one):
    quantisation = {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True}
    write_config(one.weights, checkpoint.read_config(one.weights) | {"quantization_config": quantisation})
    gated(one)
    data = promoted_card(one).data
    assert data.base_model_relation == "quantized"
    assert "gptq" in data.tags


def test_a_base_from_the_hub_is_named_as_there(one, add_variant, tmp_path):
    add_variant("copy", "SOURCE=Owner/Model\nVLLM_MODEL=weights/copy\n")
    (one.folder / "recipe.yaml").write_text(RECIPE.replace("base: tiny", "base: copy"))
    gated(one)
    data = promoted_card(one).data
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
    one, tmp_path, files, base_model, licence, said
):
    (tmp_path / "weights" / "tiny").unlink()
    base = tmp_path / "weights" / "tiny"
    base.mkdir()
    carry_all(ROOT / "weights" / "tiny", base)
    for name, text in files.items():
        for folder in (base, *([one.weights] if name != "README.md" else [])):  # as a stage carries it
            (folder / name).write_text(text)
    gated(one)
    card = promoted_card(one)
    stated = {key: value for key, value in card.data.to_dict().items() if key.startswith("license")}
    assert (card.data.base_model, stated) == (base_model, licence)
    assert said in card.text


def test_a_relative_link_to_the_licence_of_a_base_on_the_hub_leads_to_its_repository(
    one, add_variant, tmp_path
):
    add_variant("copy", "SOURCE=Owner/Model\nVLLM_MODEL=weights/copy\n")
    (tmp_path / "weights" / "copy").mkdir()
    (tmp_path / "weights" / "copy" / "README.md").write_text(BASES_CARD.replace("Owner", "Other"))
    (one.folder / "recipe.yaml").write_text(RECIPE.replace("base: tiny", "base: Owner/Model"))
    gated(one)
    data = promoted_card(one).data
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
def test_the_card_says_what_vllm_does_without_the_plugin(one, change, old, said):
    with edited_tensors(one.weights) as tensors:
        changed = change(tensors)
        tensors.clear()
        tensors.update(changed)
    if change is head_apart:
        write_config(one.weights, draft_head.announced(checkpoint.read_config(one.weights), 64))
    if old:
        in_old_layout(one.weights)
    gated(one)
    assert said in promoted_card(one).text


def test_a_card_is_no_part_of_the_checkpoint(one, tmp_path):
    before = checkpoint.digest(one.weights), bytes_on_disk(one.weights)
    gate = gated(one)
    card = promotion.promote_variant(one).card
    assert card.is_file()
    assert (checkpoint.digest(one.weights), bytes_on_disk(one.weights)) == before
    assert checkpoint.verify(one.weights, "cure").stage == "calibrate"
    assert not changed_inputs(store.read_record(gate).provenance, ServerCommand.resolve(one))
    further = tmp_path / "further"
    further.mkdir()
    carry_all(one.weights, further)
    assert not (further / card.name).exists()


def test_a_second_promotion_changes_nothing(one):
    gated(one)
    promotion.promote_variant(one)
    before = state(one.root)
    assert not promotion.promote_variant(one).changed
    assert state(one.root) == before


def test_a_promotion_that_was_cut_off_is_finished(one, monkeypatch):
    gated(one)
    publish = store.publish

    def publish_card_alone(path, content, **how):
        if path.name == "measurements.json":
            raise KeyboardInterrupt
        publish(path, content, **how)

    with monkeypatch.context() as patch:
        patch.setattr(store, "publish", publish_card_alone)
        with pytest.raises(KeyboardInterrupt):
            promotion.promote_variant(one)
    assert promotion.promote_variant(one).changed
    assert store.read_measurements(one.folder).status == "promoted"


def test_the_committed_checkpoint_and_others_that_no_recipe_made_get_no_card(one, add_variant):
    add_variant("flags", "BASE=tiny\nVLLM_MAX_NUM_SEQS=7\n", baseline="tiny")
    flags = variant.load("flags", one.root)
    gated(flags)
    before = sorted((ROOT / "weights" / "tiny").iterdir())
    promoted = promotion.promote_variant(flags)
    assert promoted.changed
    assert promoted.card is None
    assert sorted((ROOT / "weights" / "tiny").iterdir()) == before
    assert store.read_measurements(flags.folder).status == "promoted"
    assert not promotion.promote_variant(variant.load("flags", one.root)).changed


def refused(one, message):
    before = state(one.root)
    with pytest.raises(EvalError, match=message):
        promotion.promote_variant(one)
    assert state(one.root) == before


OTHER_DATA = {"eval/gates/tinyworld.yaml": "0" * 64}
CITED = r"small/quality_\S+, which small/gate_\S+ cites, is "


@pytest.mark.parametrize(
    ("prepare", "message"),
    [
        (lambda one: None, r"no gate record fits small in its present state; `slimqwen gate --variant small`"),
        (lambda one: gated(one, "fail"), r"says fail \(quality: fail; small/gate_\S+\).*gate --variant small"),
        (lambda one: gated(one, "inconclusive"), r"says inconclusive \(quality: inconclusive; small/gate_\S+\)"),
        (lambda one: gated(one, packages={"vllm": "0.1"}), "has other package versions"),
        (lambda one: gated(one, datasets=OTHER_DATA), r"the newest, gate_\S+, has other data files\)"),
        (lambda one: gated(one, data=OTHER_DATA), CITED + "of other data files; run"),
        (lambda one: (gated(one), store.records(one.folder, Quality)[0].unlink()), CITED + "missing; run"),
        (lambda one: (gated(one), append(one.weights / "config.json", "\n")), "newest, gate_.* has other checkpoint"),
        (lambda one: (gated(one), append(one.folder / "config.env", "VLLM_MAX_NUM_SEQS=3\n")), "has other flags"),
        (lambda one: (gated(one), claim(one, status="rejected")), "small was rejected"),
    ],
)  # fmt: skip
def test_what_is_not_promoted_is_told_why(one, prepare, message):
    prepare(one)
    refused(variant.load("small", one.root), message)


def test_a_later_failure_stands_against_an_earlier_pass(one):
    gated(one)
    gated(one, "fail")
    refused(one, "says fail")
    gated(one)
    assert promotion.promote_variant(one).changed


def test_a_pass_elsewhere_counts(one):
    hardware = provenance.hardware().as_json() | {"memory_bytes": 1}
    gated(one, hardware=hardware, git={"commit": "c" * 40, "dirty": False})
    assert promotion.promote_variant(one).changed


def test_a_failure_of_another_checkpoint_does_not_stand_against_this_one(one):
    gated(one)
    other = described(one)["checkpoint"] | {"digest": "ef" * 32}
    gated(one, "fail", checkpoint=other)
    assert promotion.promote_variant(one).changed


def test_a_baseline_is_not_promoted(one):
    refused(variant.load("tiny", one.root), "tiny is a baseline")


def test_a_missing_checkpoint_names_what_makes_it(one):
    gated(one)
    one.weights.unlink()
    with pytest.raises(MissingCheckpointError, match="small"):
        promotion.promote_variant(one)


@pytest.mark.parametrize("side", ["search", "proof"])
def test_a_gate_on_one_side_of_the_split_promotes_nobody(one, side):
    whole = gated(one, verdict="fail")
    record = json.loads(whole.read_text())
    items = store.read_items(whole)
    split = {"side": side, "proof_share": 0.75}
    passed = {**record, "verdict": "pass", "verdicts": dict.fromkeys(CHECKS, "pass"), "split": split}
    part = record_files.write(one.folder, passed, items)
    assert part.name > whole.name
    refused(one, f"the newest gate record of small in its present state says fail .*{whole.name}")
    whole.unlink()
    refused(one, "no gate record fits small in its present state; ")
