"""What the gate asks, what it uses again, and what it makes of the answers; each witness has tests of its own."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from slimqwen import checkpoint, variant
from slimqwen.evaluation import acceptance, engine_matrix, fidelity, gate, quality
from slimqwen.evaluation.gate import GateError
from slimqwen.evaluation.verdict import Verdict, overall
from slimqwen.records import provenance, store
from slimqwen.report import tables
from slimqwen.serving import launch
from slimqwen.variant import Variant

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "tests" / "records" / "data"
LIMITS = {"kl_nats": 0.003, "bits_per_byte": 0.01}
MODES = {
    "draft_tokens": 0, "prefix_caching": False, "kv_cache_dtype": "auto", "chunked_prefill": True, "concurrency": 1,
    "graphs": "eager",
}  # fmt: skip


class Witnesses:
    """Stand-ins for the four measurements: they write whole records, as good or bad as told, and count."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str]] = []
        self.kl_nats = 0.001
        self.layer_error_ratio = 1.0
        self.accepted = 8
        self.right = 200
        self.state = "fine"

    def described(self, one: Variant, flags: dict[str, Any] | None = None) -> dict[str, Any]:
        command = launch.resolve(one)
        return provenance.describe(
            root=one.root, command=["x"], started=provenance.utc_now(),
            flags=command.flags if flags is None else flags,
            environment=command.environment, weights=one.weights,
            datasets=[one.root / "eval" / "devices.yaml"], seeds={}, server="started",
        )  # fmt: skip

    def example(self, kind: str, one: Variant, **changes: Any) -> dict[str, Any]:
        content: dict[str, Any] = json.loads((EXAMPLES / f"{kind}.json").read_text())
        return content | {"variant": one.name, "provenance": self.described(one)} | changes

    def fidelity(self, one: Variant, plan: str, **_: Any) -> Path:
        self.asked.append(("fidelity", one.name))
        names = (*LIMITS, "top1_disagreement", "regret_nats", "head_delta_mean", "head_delta_p99")
        figures = {name: {"value": self.kl_nats, "standard_error": 1e-5, "count": 9} for name in names}
        counts = dict.fromkeys(("texts", "texts_compared", "positions_compared", "joined_tokens"), 9)
        whole = {
            **figures,
            **counts,
            "head_delta_max": None,
            "joined_kl_nats": self.kl_nats,
            "baseline_bits_per_byte": 1.0,
        }
        verdict = Verdict.PASS if self.kl_nats < LIMITS["kl_nats"] else Verdict.FAIL
        ratio = self.layer_error_ratio
        layers = {
            "limit": 1.5, "verdict": Verdict.PASS if ratio <= 1.5 else Verdict.FAIL, "tokens": 9,
            "rows": [{"layer": 0, "error": 0.1, "rounded_error": 0.1, "ratio": 1.0},
                     {"layer": 1, "error": 0.1 * ratio, "rounded_error": 0.1, "ratio": ratio}],
        }  # fmt: skip
        record = {
            "schema": "fidelity/1", "variant": one.name, "baseline": "tiny", "plan": plan,
            "limits": {"of": "changed_weights", **LIMITS}, "modes": {"single": whole},
            "verdicts": {"single": dict.fromkeys((*LIMITS, "joined_kl_nats"), verdict)},
            "layers": layers, "verdict": overall([verdict, layers["verdict"]]),
            "stages": [], "provenance": self.described(one),
        }  # fmt: skip
        return store.write(one.folder, record, [{"text": 1}])

    def acceptance(self, one: Variant, plan: str, depths: list[int], **_: Any) -> Path:
        self.asked.append(("acceptance", one.name))
        accepted = self.accepted if one.name != "tiny" else 8
        items = [
            {"depth": depth, "class": "short", "temperature": 0.0, "group": group, "drafts": 10,
             "accepted_per_position": [accepted] * depth, "output_tokens": 9, "seconds": 1.0}
            for depth in depths for group in range(3)
        ]  # fmt: skip
        record = self.example(
            "acceptance", one, plan=plan, gate_depth=depths[0], depths=acceptance.summarise(items)
        )
        record["provenance"] = self.described(one, {"enforce-eager": True})
        return store.write(one.folder, record, items)

    def quality(self, one: Variant, suite: quality.Suite, *, limit: Any, **_: Any) -> Path:
        self.asked.append(("quality", one.name))
        right = self.right if one.name != "tiny" else 200
        example = self.example("quality", one, suite=suite.name, limit=limit, endpoint="completions")
        task = next(iter(example["tasks"]))
        items = [
            {"task": task, "item": str(n), "value": float(n < right), "weight": 1, "cluster": None}
            for n in range(400)
        ]
        return store.write(one.folder, example | {"tasks": {task: example["tasks"][task]}}, items)

    def engine(self, one: Variant, plan: str, **_: Any) -> Path:
        self.asked.append(("engine", one.name))
        counts = dict.fromkeys(
            ("items", "near_ties", "tokens_compared", "drafts", "accepted_drafts", "prefix_hits", "aborted"),
            1,
        )
        cell = {
            "modes": MODES, "served": True, "state": self.state, "reason": None if self.state == "fine" else "differs",
            **counts, "preemptions": None, "notes": [], "seconds": 1.0,
        }  # fmt: skip
        build = {
            "platform": "cpu", "device": "x", "vllm": "1", "architecture": "a", "quantization": "none",
        }  # fmt: skip
        record = {
            "schema": "engine/1", "variant": one.name, "plan": plan, "build": build, "near_tie_nats": 0.1,
            "cells": [cell], "provenance": self.described(one),
        }  # fmt: skip
        return store.write(one.folder, record, [{"cell": 1}])


@pytest.fixture
def witnesses(monkeypatch: pytest.MonkeyPatch) -> Witnesses:
    made = Witnesses()
    # Two records of a kind and second would have one name.
    stamps = iter(f"2026-01-01T00{n // 60:02}{n % 60:02}Z" for n in range(600))
    monkeypatch.setattr(store, "_stamp", lambda: next(stamps))
    for module in (fidelity, acceptance, quality):
        monkeypatch.setattr(module, "measure", getattr(made, module.__name__.rpartition(".")[2]))
    monkeypatch.setattr(engine_matrix, "measure", made.engine)
    return made


@pytest.fixture
def one(tmp_path: Path, add_variant: Callable[..., Path]) -> Variant:
    add_variant("tiny", "VLLM_MODEL=weights/tiny\nVLLM_MAX_MODEL_LEN=256\n")
    add_variant("small", "BASE=tiny\nVLLM_MODEL=weights/small\n", baseline="tiny")
    (tmp_path / "weights" / "small").mkdir(parents=True)
    (tmp_path / "weights" / "tiny").symlink_to(ROOT / "weights" / "tiny")
    checkpoint.carry_all(ROOT / "weights" / "tiny", tmp_path / "weights" / "small")
    (tmp_path / "eval").symlink_to(ROOT / "eval")
    return variant.load("small", tmp_path)


def test_four_witnesses_make_one_verdict_and_one_page(one: Variant, witnesses: Witnesses) -> None:
    path = gate.run(one, "tinyworld", command=["x"])
    record = store.read(path)
    assert record["verdict"] == "pass"
    assert record["verdicts"] == dict.fromkeys(("fidelity", "acceptance", "quality", "engine"), "pass")
    assert witnesses.asked == [
        ("fidelity", "small"), ("acceptance", "tiny"), ("acceptance", "small"),
        ("quality", "tiny"), ("quality", "small"), ("engine", "small"),
    ]  # fmt: skip
    assert len(record["records"]) == 6
    assert all((one.root / "experiments" / name).is_file() for name in record["records"])
    page = tables.gate_table(path)
    assert page.title == "Gate of small against tiny: pass"
    assert {row[0] for row in page.rows} == set(record["verdicts"])


@pytest.mark.parametrize(
    ("damage", "witness", "verdict"),
    [
        ({"kl_nats": 0.5}, "fidelity", "fail"),
        ({"layer_error_ratio": 1.6}, "fidelity", "fail"),
        ({"accepted": 4}, "acceptance", "fail"),
        ({"right": 100}, "quality", "fail"),
        ({"right": 192}, "quality", "inconclusive"),
        ({"state": "unsafe"}, "engine", "fail"),
        ({"state": "not available"}, "engine", "inconclusive"),
    ],
)
def test_one_witness_decides(
    one: Variant, witnesses: Witnesses, damage: dict[str, Any], witness: str, verdict: str
) -> None:
    vars(witnesses).update(damage)
    record = store.read(gate.run(one, "tinyworld", command=["x"]))
    assert record["verdict"] == verdict
    assert {name: each for name, each in record["verdicts"].items() if each != "pass"} == {witness: verdict}


def test_a_page_that_cannot_tell_on_a_sample_says_how_to_go_on(one: Variant, witnesses: Witnesses) -> None:
    witnesses.right = 192
    page = tables.gate_table(gate.run(one, "tinyworld", command=["x"]))
    said = [note for note in page.notes if "eval-quality-full" in note]
    assert len(said) == 1
    assert "VARIANT=tiny`" in said[0]
    assert "VARIANT=small`" in said[0]
    suite = quality.load_suite("tinyworld", one.root)
    for side in (variant.load("tiny", one.root), one):
        witnesses.quality(side, suite, limit=None)
    page = tables.gate_table(gate.run(one, "tinyworld", command=["x"]))
    assert page.title.endswith("inconclusive")
    assert not [note for note in page.notes if "eval-quality-full" in note]


def test_what_holds_is_not_measured_again(one: Variant, witnesses: Witnesses) -> None:
    gate.run(one, "tinyworld", command=["x"])
    witnesses.asked.clear()
    gate.run(one, "tinyworld", command=["x"])
    assert witnesses.asked == []
    config = one.weights / "config.json"
    config.write_text(config.read_text() + "\n")
    gate.run(one, "tinyworld", command=["x"])
    assert witnesses.asked == [(name, "small") for name in ("fidelity", "acceptance", "quality", "engine")]
    witnesses.asked.clear()
    settings = one.folder / "config.env"
    settings.write_text(settings.read_text() + "VLLM_MAX_NUM_SEQS=3\n")
    gate.run(variant.load("small", one.root), "tinyworld", command=["x"])
    # Acceptance is of the weights; how many requests are served at once is for the other three.
    assert witnesses.asked == [("fidelity", "small"), ("quality", "small"), ("engine", "small")]


def test_all_items_speak_before_a_sample_where_both_have_them(one: Variant, witnesses: Witnesses) -> None:
    suite = quality.load_suite("tinyworld", one.root)
    whole = [witnesses.quality(side, suite, limit=None) for side in (variant.load("tiny", one.root), one)]
    record = store.read(gate.run(one, "tinyworld", command=["x"]))
    assert {f"{path.parent.name}/{path.name}" for path in whole} <= set(record["records"])
    assert [asked for asked in witnesses.asked if asked[0] == "quality"] == [
        ("quality", "tiny"),
        ("quality", "small"),
    ]


def test_a_variant_without_a_baseline_is_refused(one: Variant) -> None:
    with pytest.raises(GateError, match="tiny has no baseline"):
        gate.run(variant.load("tiny", one.root), "tinyworld", command=["x"])
    with pytest.raises(GateError, match=r"eval/gates/nope.yaml"):
        gate.run(one, "nope", command=["x"])
