"""Who is promoted, who is not and why, and that the card changes no checkpoint."""

import json
from pathlib import Path

import pytest

from slimqwen import checkpoint, variant
from slimqwen.checkpoint import MissingCheckpointError
from slimqwen.checkpoint.files import bytes_on_disk, carry_all
from slimqwen.evals import EvalError, promotion
from slimqwen.evals.quality import Quality
from slimqwen.records import provenance, store
from slimqwen.records.reuse import changed_inputs
from slimqwen.serving.command import ServerCommand
from tests import record_files
from tests.evals.recipe_made import CHECKS, described, gated

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.usefixtures("stamps")


def claim(one, **fields):
    """Change fields of the variant's measurements.json."""
    file = one.folder / "measurements.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


def append(file, text):
    with file.open("a") as changed:
        changed.write(text)


def state(root):
    return {
        path: path.read_bytes()
        for folder in ("experiments", "weights")
        for path in (root / folder).rglob("*")
        if path.is_file()
        and path.name != ".hashes.json"
        and not path.is_relative_to(root / "weights" / "tiny")
    }


def test_a_variant_whose_gate_passed_is_promoted_with_the_records_of_its_checkpoint(made):
    present = gated(made)
    other = described(made)["checkpoint"] | {"digest": "ef" * 32}
    earlier = gated(made, checkpoint=other)
    claim(made, records=[earlier.name, present.name])
    gate = gated(made)
    promoted = promotion.promote_variant(made)
    claimed = store.read_measurements(made.folder)
    assert promoted.changed
    assert promoted.gate == gate
    assert (claimed.status, claimed.verdict) == ("promoted", "pass")
    scores = store.records(made.folder, Quality)[0]
    assert claimed.records == tuple(sorted([present.name, gate.name, scores.name]))
    assert claimed.hypothesis == made.hypothesis


def test_speed_that_is_claimed_has_to_be_proven_by_a_timing(made):
    gated(made)
    before = state(made.root)
    with pytest.raises(EvalError, match="small claims speed: not timed; or take `speed` out of `claims`"):
        promotion.promote_variant(made, {"speed": "not timed"})
    assert state(made.root) == before
    claim(made, claims=["quality"])
    assert promotion.promote_variant(made, {"memory": "not measured"}).changed


def test_a_card_is_no_part_of_the_checkpoint(made, tmp_path):
    before = checkpoint.digest(made.weights), bytes_on_disk(made.weights)
    gate = gated(made)
    card = promotion.promote_variant(made).card
    assert card.is_file()
    assert (checkpoint.digest(made.weights), bytes_on_disk(made.weights)) == before
    assert checkpoint.verify(made.weights, "cure").stage == "calibrate"
    assert not changed_inputs(store.read_record(gate).provenance, ServerCommand.resolve(made))
    further = tmp_path / "further"
    further.mkdir()
    carry_all(made.weights, further)
    assert not (further / card.name).exists()


def test_a_second_promotion_changes_nothing(made):
    gated(made)
    promotion.promote_variant(made)
    before = state(made.root)
    assert not promotion.promote_variant(made).changed
    assert state(made.root) == before


def test_a_promotion_that_was_cut_off_is_finished(made, monkeypatch):
    gated(made)
    publish = store.publish

    def publish_card_alone(path, content, **how):
        if path.name == "measurements.json":
            raise KeyboardInterrupt
        publish(path, content, **how)

    with monkeypatch.context() as patch:
        patch.setattr(store, "publish", publish_card_alone)
        with pytest.raises(KeyboardInterrupt):
            promotion.promote_variant(made)
    assert promotion.promote_variant(made).changed
    assert store.read_measurements(made.folder).status == "promoted"


def test_the_committed_checkpoint_and_others_that_no_recipe_made_get_no_card(made, add_variant):
    add_variant("flags", "BASE=tiny\nVLLM_MAX_NUM_SEQS=7\n", baseline="tiny")
    flags = variant.load("flags", made.root)
    gated(flags)
    before = sorted((ROOT / "weights" / "tiny").iterdir())
    promoted = promotion.promote_variant(flags)
    assert promoted.changed
    assert promoted.card is None
    assert sorted((ROOT / "weights" / "tiny").iterdir()) == before
    assert store.read_measurements(flags.folder).status == "promoted"
    assert not promotion.promote_variant(variant.load("flags", made.root)).changed


def refused(one, message):
    before = state(one.root)
    with pytest.raises(EvalError, match=message):
        promotion.promote_variant(one)
    assert state(one.root) == before


OTHER_DATA = {"eval/gates/tinyworld.yaml": "0" * 64}
CITED = r"small/quality_\S+, which small/gate_\S+ cites, "


@pytest.mark.parametrize(
    ("prepare", "message"),
    [
        (lambda one: None, r"no gate record fits small in its present state; run `slimqwen gate --variant small`"),
        (lambda one: gated(one, "fail"), r"says fail \(quality: fail; small/gate_\S+\).*gate --variant small"),
        (lambda one: gated(one, "inconclusive"), r"says inconclusive \(quality: inconclusive; small/gate_\S+\)"),
        (lambda one: gated(one, packages={"vllm": "0.1"}), "has other package versions"),
        (lambda one: gated(one, datasets=OTHER_DATA), r"the newest, gate_\S+, has other data files\)"),
        (lambda one: gated(one, data=OTHER_DATA), CITED + "was measured with other data files; run"),
        (lambda one: (gated(one), store.records(one.folder, Quality)[0].unlink()), CITED + "is missing; run"),
        (lambda one: (gated(one), append(one.weights / "config.json", "\n")), "newest, gate_.* has other checkpoint"),
        (lambda one: (gated(one), append(one.folder / "config.env", "VLLM_MAX_NUM_SEQS=3\n")), "has other flags"),
        (lambda one: (gated(one), claim(one, status="rejected")), "small was rejected"),
    ],
)  # fmt: skip
def test_what_is_not_promoted_is_told_why(made, prepare, message):
    prepare(made)
    refused(variant.load("small", made.root), message)


def test_a_later_failure_stands_against_an_earlier_pass(made):
    gated(made)
    gated(made, "fail")
    refused(made, "says fail")
    gated(made)
    assert promotion.promote_variant(made).changed


def test_a_pass_elsewhere_counts(made):
    hardware = provenance.hardware().as_json() | {"memory_bytes": 1}
    gated(made, hardware=hardware, git={"commit": "c" * 40, "dirty": False})
    assert promotion.promote_variant(made).changed


def test_a_failure_of_another_checkpoint_does_not_stand_against_this_one(made):
    gated(made)
    other = described(made)["checkpoint"] | {"digest": "ef" * 32}
    gated(made, "fail", checkpoint=other)
    assert promotion.promote_variant(made).changed


def test_a_baseline_is_not_promoted(made):
    refused(variant.load("tiny", made.root), "tiny is a baseline")


def test_a_missing_checkpoint_names_what_makes_it(made):
    gated(made)
    made.weights.unlink()
    with pytest.raises(MissingCheckpointError, match="small"):
        promotion.promote_variant(made)


@pytest.mark.parametrize("side", ["search", "proof"])
def test_a_gate_on_one_side_of_the_split_promotes_nobody(made, side):
    whole = gated(made, verdict="fail")
    record = json.loads(whole.read_text())
    items = store.read_items(whole)
    split = {"side": side, "proof_share": 0.75}
    passed = {**record, "verdict": "pass", "verdicts": dict.fromkeys(CHECKS, "pass"), "split": split}
    part = record_files.write(made.folder, passed, items)
    assert part.name > whole.name
    refused(made, f"the newest gate record of small in its present state says fail .*{whole.name}")
    whole.unlink()
    refused(made, "no gate record fits small in its present state; ")
