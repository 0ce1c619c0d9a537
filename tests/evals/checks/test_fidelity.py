"""The check fidelity: damage beyond what a stage of the recipe may change."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from slimqwen.evals.fidelity_figures import FidelitySettings
from slimqwen.evals.gate import Gate
from slimqwen.records import store
from slimqwen.variant import Variant
from tests.checkpoints import edited_tensors
from tests.evals.gate_checks import Checks, judge


def test_a_table_of_fidelity_has_limits_and_noise_ratios(one: Variant, checks: Checks) -> None:
    checks.noise_ratio = 1.5
    path = checks.fidelity(one, FidelitySettings.load("tinyworld", one.root))
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
    record = store.read_record(judge(one), Gate)
    assert record.verdict == ("fail" if plant else "pass")
    assert record.verdicts["fidelity"] == record.verdict
