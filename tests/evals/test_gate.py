"""The gate: which checks it runs, which records it uses again, and its verdict; each check has tests of its own."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from slimqwen import variant
from slimqwen.checkpoint.files import carry_all
from slimqwen.evals import EvalError, acceptance, engine, fidelity, gate, gate_checks, quality
from slimqwen.evals.gate import Gate
from slimqwen.evals.gate_checks import GateSettings
from slimqwen.evals.suites.suite import Suite
from slimqwen.records import store
from slimqwen.records.settings import SettingsError
from slimqwen.text import prompts
from slimqwen.text.corpus import resolve_text
from slimqwen.text.files import CorpusError
from slimqwen.variant import Variant
from tests.checkpoints import edited_tensors
from tests.evals.gate_checks import Checks, link_settings

ROOT = Path(__file__).parents[2]


@pytest.fixture
def checks(monkeypatch: pytest.MonkeyPatch, stamps: None) -> Checks:
    made = Checks()
    for module in (fidelity, acceptance, quality):
        name = module.__name__.rpartition(".")[2]
        monkeypatch.setattr(module, f"measure_{name}", getattr(made, name))
    monkeypatch.setattr(engine, "measure_engine", made.engine)
    return made


@pytest.fixture
def one(tmp_path: Path, add_variant: Callable[..., Path]) -> Variant:
    add_variant("tiny", "VLLM_MODEL=weights/tiny\nVLLM_MAX_MODEL_LEN=256\n")
    add_variant("small", "BASE=tiny\nVLLM_MODEL=weights/small\n", baseline="tiny")
    (tmp_path / "weights" / "small").mkdir(parents=True)
    (tmp_path / "weights" / "tiny").symlink_to(ROOT / "weights" / "tiny")
    carry_all(ROOT / "weights" / "tiny", tmp_path / "weights" / "small")
    link_settings(tmp_path)
    return variant.load("small", tmp_path)


def test_four_checks_make_one_verdict_and_one_page(one: Variant, checks: Checks) -> None:
    path = gate.measure_gate(one, "tinyworld", command=["x"])
    record = store.read_record(path, Gate)
    assert record.verdict == "pass"
    assert record.verdicts == dict.fromkeys(("fidelity", "acceptance", "quality", "engine"), "pass")
    assert checks.asked == [
        ("fidelity", "small"), ("acceptance", "tiny"), ("acceptance", "small"),
        ("quality", "tiny"), ("quality", "small"), ("engine", "small"),
    ]  # fmt: skip
    assert len(record.records) == 6
    assert all((one.root / "experiments" / name).is_file() for name in record.records)
    page = record.tables(path)[0]
    assert page.title == "Gate of small against tiny: pass"
    assert {row[0] for row in page.rows} == set(record.verdicts)


def test_a_table_of_fidelity_has_limits_and_noise_ratios(one: Variant, checks: Checks) -> None:
    checks.noise_ratio = 1.5
    path = checks.fidelity(one, "tinyworld")
    record = store.read_record(path)
    (table,) = record.tables(path)
    assert table.rows[0] == ("KL, nats a token", "single", "0.00100 ± 0.00001", "0.003", "pass")
    assert table.rows[6] == (
        "KL of all texts joined into one, nats a token",
        "single",
        "0.00100",
        "0.003",
        "pass",
    )
    assert table.rows[7:] == (("noise ratio: KL, nats a token", "served", "1.50 [1.50, 1.50]", "2", "pass"),)
    assert table.notes[0] == "9 positions of 9 of 9 texts; bits per byte of all texts."
    served = {"served": record.modes["single"].model_copy(update={"top_k": 20})}
    verdicts = {"served": record.verdicts["single"]}
    both = record.model_copy(
        update={"modes": {**record.modes, **served}, "verdicts": {**record.verdicts, **verdicts}}
    )
    assert [note for note in both.tables(path)[0].notes if "HTTP" in note] == [
        "served: over HTTP; KL over the likeliest 20 tokens, with all other tokens as one bucket."
    ]


@pytest.mark.parametrize(("count", "verdict"), [(0, "pass"), (3, "inconclusive"), (20, "fail")])
def test_responses_that_run_away_are_judged_beside_right_answers(
    one: Variant, checks: Checks, monkeypatch: pytest.MonkeyPatch, count: int, verdict: str
) -> None:
    limits = GateSettings.load("tinyworld", one.root).responses.model_copy(update={"runaway_share": 0.012})
    whole = GateSettings.load("tinyworld", one.root).model_copy(update={"responses": limits})
    monkeypatch.setattr(GateSettings, "load", lambda *_: whole)
    checks.runaways = count
    path = gate.measure_gate(one, "tinyworld", command=["x"])
    record = store.read_record(path, Gate)
    assert (record.verdicts["quality"], record.verdict) == (verdict, verdict)
    (row,) = [row for row in record.tables(path)[0].rows if "run away" in row[1]]
    assert row[-1] == verdict
    planned = f"{row[1]}: "
    assert any(note.startswith(planned) for note in record.tables(path)[0].notes) == (
        verdict == "inconclusive"
    )


def swap_two_rows(tensors: dict[str, Any]) -> None:
    rows = tensors["model.embed_tokens.weight"]
    rows[[300, 301]] = rows[[301, 300]]


def weaken_one_head(tensors: dict[str, Any]) -> None:
    name = next(
        name for name in tensors if name.endswith("self_attn.o_proj.weight") and not name.startswith("mtp.")
    )
    tensors[name][:, :64] *= 0.9


@pytest.mark.parametrize("plant", [None, swap_two_rows, weaken_one_head, "rope_theta"])
def test_damage_that_every_measurement_misses_fails_the_gate_where_no_stage_may_touch_it(
    one: Variant, checks: Checks, plant: Callable[[dict[str, Any]], None] | str | None
) -> None:
    """The stand-ins of the four measurements pass, as a real one may for a change this small."""
    recipe = "description: A test.\nbase: tiny\nstages: [{quantise_lm_head: {group_size: 32}}]\n"
    (one.folder / "recipe.yaml").write_text(recipe)
    weights = one.weights
    for file in weights.iterdir():
        if file.is_symlink() or file.stat().st_nlink > 1:  # `carry_all` links what it can
            content = file.read_bytes()
            file.unlink()
            file.write_bytes(content)
    if callable(plant):
        with edited_tensors(weights) as tensors:
            plant(tensors)
    elif plant:
        config = json.loads((weights / "config.json").read_text())
        config["rope_parameters"][plant] *= 1.5
        (weights / "config.json").write_text(json.dumps(config))
    record = store.read_record(
        gate.measure_gate(variant.load("small", one.root), "tinyworld", command=["x"]), Gate
    )
    assert record.verdict == ("fail" if plant else "pass")
    assert record.verdicts["fidelity"] == record.verdict


def test_only_the_served_engine_decides(one: Variant, checks: Checks) -> None:
    path = gate.measure_gate(one, "tinyworld", command=["x"])
    row = store.read_record(path, Gate).tables(path)[0].rows[-1]
    assert row == ("engine", "wrong responses of the served engine, of 9", "0", "-", "0", "pass")


@pytest.mark.parametrize(
    ("damage", "check", "verdict"),
    [
        ({"kl_nats": 0.5}, "fidelity", "fail"),
        ({"noise_ratio": 2.1}, "fidelity", "fail"),
        ({"accepted": 4}, "acceptance", "fail"),
        ({"right": 100}, "quality", "fail"),
        ({"right": 192}, "quality", "inconclusive"),
        ({"engine_is": "wrong"}, "engine", "fail"),
        ({"engine_is": "dead"}, "engine", "fail"),
        ({"engine_is": "idle"}, "engine", "inconclusive"),
    ],
)
def test_one_check_decides(
    one: Variant, checks: Checks, damage: dict[str, Any], check: str, verdict: str
) -> None:
    vars(checks).update(damage)
    record = store.read_record(gate.measure_gate(one, "tinyworld", command=["x"]), Gate)
    assert record.verdict == verdict
    assert {name: each for name, each in record.verdicts.items() if each != "pass"} == {check: verdict}


def test_the_page_says_how_many_items_were_planned_to_decide(one: Variant, checks: Checks) -> None:
    checks.right = 192
    path = gate.measure_gate(one, "tinyworld", command=["x"])
    (finding,) = (each for each in store.read_items(path) if each.get("items_needed"))
    (task,) = Suite.load("tinyworld", one.root).tasks
    planned = task.items_to_decide
    assert (finding["verdict"], finding["items_needed"]) == ("inconclusive", planned)
    notes = store.read_record(path, Gate).tables(path)[0].notes
    assert f"{finding['figure']}: {planned:,} items were planned to decide." in notes


def test_the_p_value_of_a_gate_is_that_of_its_weakest_figure(one: Variant, checks: Checks) -> None:
    path = gate.measure_gate(one, "tinyworld", command=["x"])
    p_values = [item["p_value"] for item in store.read_items(path) if item.get("p_value") is not None]
    assert 0 < gate.gate_p_value(path) == max(p_values) < 0.025
    checks.engine_is = "wrong"
    settings = one.folder / "config.env"
    settings.write_text(settings.read_text() + "VLLM_MAX_NUM_SEQS=3\n")
    failed = gate.measure_gate(variant.load("small", one.root), "tinyworld", command=["x"])
    assert gate.gate_p_value(failed) == 1


def test_limits_that_change_after_a_verdict_are_named(one: Variant, checks: Checks) -> None:
    first = store.read_record(gate.measure_gate(one, "tinyworld", command=["x"]), Gate)
    assert (first.changed_limits, first.caution) == ((), "")
    checks.margin = 0.08
    settings = one.folder.parent / "tiny" / "config.env"  # small inherits it: both sides are measured again
    settings.write_text(settings.read_text() + "VLLM_MAX_NUM_SEQS=3\n")
    path = gate.measure_gate(variant.load("small", one.root), "tinyworld", command=["x"])
    second = store.read_record(path, Gate)
    (change,) = second.changed_limits
    assert change.endswith(": 0.04 at first, 0.08 now")
    assert any(change in note for note in second.tables(path)[0].notes)


def test_where_a_sample_cannot_tell_the_gate_goes_on_with_all_items(one: Variant, checks: Checks) -> None:
    checks.right = 192
    record = store.read_record(gate.measure_gate(one, "tinyworld", command=["x"]), Gate)
    assert [name for check, name in checks.asked if check == "quality"] == ["tiny", "small", "tiny", "small"]
    scores = [path for path in record.evidence(one.root / "experiments") if path.name.startswith("quality_")]
    assert [store.read_record(path, quality.Quality).limit for path in scores] == [None, None]
    checks.asked.clear()
    gate.measure_gate(one, "tinyworld", command=["x"])
    assert checks.asked == []


def test_where_the_sample_was_of_all_items_none_is_asked_again(one: Variant, checks: Checks) -> None:
    checks.right, checks.available = 192, 400
    record = store.read_record(gate.measure_gate(one, "tinyworld", command=["x"]), Gate)
    assert record.verdicts["quality"] == "inconclusive"
    assert [name for check, name in checks.asked if check == "quality"] == ["tiny", "small"]


def test_where_a_sample_fails_the_other_items_are_not_asked(one: Variant, checks: Checks) -> None:
    checks.right = 100
    gate.measure_gate(one, "tinyworld", command=["x"])
    assert [name for check, name in checks.asked if check == "quality"] == ["tiny", "small"]


def test_what_holds_is_not_measured_again(one: Variant, checks: Checks) -> None:
    gate.measure_gate(one, "tinyworld", command=["x"])
    checks.asked.clear()
    gate.measure_gate(one, "tinyworld", command=["x"])
    assert checks.asked == []
    config = one.weights / "config.json"
    config.write_text(config.read_text() + "\n")
    gate.measure_gate(one, "tinyworld", command=["x"])
    assert checks.asked == [(name, "small") for name in ("fidelity", "acceptance", "quality", "engine")]
    checks.asked.clear()
    settings = one.folder / "config.env"
    settings.write_text(settings.read_text() + "VLLM_MAX_NUM_SEQS=3\n")
    gate.measure_gate(variant.load("small", one.root), "tinyworld", command=["x"])
    # Acceptance is of the weights; how many requests are served at once is for the other three.
    assert checks.asked == [("fidelity", "small"), ("quality", "small"), ("engine", "small")]


def test_a_sample_by_other_assumptions_is_taken_anew(
    one: Variant, checks: Checks, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate.measure_gate(one, "tinyworld", command=["x"])
    checks.asked.clear()
    load = Suite.load

    def stricter(name: str, root: Path) -> Suite:
        suite = load(name, root)
        (task,) = store.read_record(store.latest(one.folder, quality.Quality), quality.Quality).tasks
        renamed = suite.tasks[0].model_copy(update={"name": task, "assumed_discordance": 0.05})
        return suite.model_copy(update={"tasks": [renamed]})

    monkeypatch.setattr(Suite, "load", staticmethod(stricter))
    gate.measure_gate(one, "tinyworld", command=["x"])
    assert checks.asked == [("quality", "tiny"), ("quality", "small")]


def test_all_items_speak_before_a_sample_where_both_have_them(one: Variant, checks: Checks) -> None:
    suite = Suite.load("tinyworld", one.root)
    whole = [checks.quality(side, suite, limit=None) for side in (variant.load("tiny", one.root), one)]
    record = store.read_record(gate.measure_gate(one, "tinyworld", command=["x"]))
    assert {f"{path.parent.name}/{path.name}" for path in whole} <= set(record.records)
    assert [asked for asked in checks.asked if asked[0] == "quality"] == [
        ("quality", "tiny"),
        ("quality", "small"),
    ]


def test_checkpoints_without_an_mtp_head_have_no_drafts_to_compare(
    one: Variant, checks: Checks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gate_checks, "has_mtp_head", lambda folder: False)
    path = gate.measure_gate(one, "tinyworld", command=["x"])
    record = store.read_record(path, Gate)
    assert (record.verdict, record.verdicts["acceptance"]) == ("pass", "pass")
    assert "acceptance" not in dict(checks.asked)
    assert any("nothing is drafted" in row[1] for row in record.tables(path)[0].rows)


def test_a_text_too_short_for_the_prompts_is_found_before_any_check(
    one: Variant, checks: Checks, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = GateSettings.load("tinyworld", one.root)
    acceptance_settings = settings.acceptance.model_copy(update={"prompts": 100_000})
    monkeypatch.setattr(
        GateSettings, "load", lambda *_: settings.model_copy(update={"acceptance": acceptance_settings})
    )
    with pytest.raises(CorpusError, match=r"tinyworld_passages is used up: 100000 prompts of 32 tokens"):
        gate.measure_gate(one, "tinyworld", command=["x"])
    assert checks.asked == []


def test_every_suite_has_a_gate_of_its_name() -> None:
    """`gate` judges a variant by the settings that EVALUATION names, which names its suite too."""
    for name in (path.stem for path in (ROOT / "eval" / "suites").glob("*.yaml")):
        settings = GateSettings.load(name, ROOT)
        assert settings.quality == name
        assert len(settings.fidelity.read_texts(ROOT)) > 20
        assert resolve_text(settings.engine.text, ROOT).is_file()
        assert len(list(prompts.documents(settings.acceptance.documents, 0, ROOT))) > 20


def test_a_variant_without_a_baseline_is_refused(one: Variant) -> None:
    with pytest.raises(EvalError, match="tiny has no baseline"):
        gate.measure_gate(variant.load("tiny", one.root), "tinyworld", command=["x"])
    with pytest.raises(SettingsError, match=r"eval/gates/nope.yaml"):
        gate.measure_gate(one, "nope", command=["x"])
