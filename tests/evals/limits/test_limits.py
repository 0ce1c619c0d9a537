"""Limits follow from noise by rules that a reader can check, and land in files that the gate reads."""

import json
import math
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pandas
import pytest

from slimqwen import variant
from slimqwen.evals import EvalError, acceptance, fidelity, gate
from slimqwen.evals.drafting import AcceptanceSettings
from slimqwen.evals.engine import length_sweep, modes
from slimqwen.evals.engine.isolation import Engines
from slimqwen.evals.engine.scenarios import Answer, EngineSettings
from slimqwen.evals.fidelity_figures import FIGURE_NAMES, FidelitySettings, Figures, TextComparison, summarise
from slimqwen.evals.gate import GateSettings
from slimqwen.evals.limits import files, measurement, noise, record
from slimqwen.evals.limits.noise import RepeatNoise
from slimqwen.evals.limits.record import Limit, LimitsRecord
from slimqwen.evals.limits.settings import LimitsSettings, make_texts
from slimqwen.records import store
from slimqwen.records.settings import SettingsError
from slimqwen.stats.intervals import Ratio
from slimqwen.variant import Variant
from tests import record_files

ROOT = Path(__file__).parents[3]
SETTINGS = LimitsSettings.load("tinyworld", ROOT)
CORE = LimitsSettings.load("core", ROOT)
ROWS = [{"question": f"Which is {n}?\n\nSay.", "options": [f"a{n}", f"b{n}"]} for n in range(6000)]


def write_data_set(root: Path, rows: Sequence[dict[str, Any]]) -> None:
    file = root / CORE.texts_from.file
    file.parent.mkdir(parents=True, exist_ok=True)
    pandas.DataFrame(rows).to_parquet(file)


def texts(*scales: float) -> list[TextComparison]:
    """Comparisons of texts whose every figure is about their `scale`."""
    return [
        TextComparison(
            name=str(number),
            mode="single",
            bytes=100,
            compared=1000,
            kl_nats=1000 * scale,
            disagreements=round(1000 * scale),
            regret_nats=1000 * scale,
            baseline_bits=100.0,
            variant_bits=100.0 + 100 * scale,
            head_deltas=[scale] * 10,
        )
        for number, scale in enumerate(scales)
    ]


def figures(scale: float) -> Figures:
    return summarise(texts(0.9 * scale, 1.1 * scale))["single"]


def test_unchanged_weights_may_differ_by_a_multiple_of_the_largest_noise() -> None:
    repeats = [figures(scale) for scale in (0.010, 0.011, 0.010, 0.0105, 0.010)]
    limits = {
        each.figure: each for each in record.same_weights(SETTINGS, repeats, {"same_weights.kl_nats": 0.03})
    }
    assert list(limits) == [f"same_weights.{figure}" for figure in FIGURE_NAMES]
    kl = limits["same_weights.kl_nats"]
    assert kl.noise == pytest.approx(0.011)
    assert kl.limit == pytest.approx(0.033)
    assert kl.low < 0.033 < kl.high
    assert kl.reproduced
    assert limits["same_weights.regret_nats"].reproduced is None


def test_the_joined_text_counts_because_the_gate_holds_it_against_the_same_limit() -> None:
    repeats = [
        figures(0.01).model_copy(update={"joined_kl_nats": joined})
        for joined in (None, 0.01, 0.02, 0.01, 0.01)
    ]
    limits = {each.figure: each for each in record.same_weights(SETTINGS, repeats, {})}
    assert limits["same_weights.kl_nats"].noise == 0.02
    assert limits["same_weights.kl_nats"].limit == pytest.approx(0.06)
    assert limits["same_weights.regret_nats"].noise == pytest.approx(0.01)


def test_repeats_that_scatter_raise_the_limit_above_the_multiple() -> None:
    calm, wild = (
        record.same_weights(SETTINGS, [figures(scale) for scale in scales], {})[0]
        for scales in ((0.01, 0.01, 0.01, 0.01, 0.01), (0.001, 0.003, 0.01, 0.002, 0.005))
    )
    assert calm.limit == pytest.approx(0.03)
    assert wild.limit > 0.03
    assert wild.limit <= 1.1 * wild.high


def test_changed_weights_may_cost_a_multiple_of_rounding_and_the_suites_margin() -> None:
    limits = {each.figure: each for each in record.changed_weights(SETTINGS, figures(0.02), 0.01, {})}
    assert limits["changed_weights.kl_nats"].limit == pytest.approx(0.04)
    assert limits["changed_weights.bits_per_byte"].limit == 0.01
    without = {each.figure: each for each in record.changed_weights(SETTINGS, figures(0.02), None, {})}
    assert without["changed_weights.bits_per_byte"].limit == pytest.approx(0.04)


def test_noise_can_only_lower_the_least_share_of_the_acceptance_length() -> None:
    still = [Ratio(1.0, 0.995, 1.005)] * 5
    assert record.least_share(SETTINGS, still, 0.97).limit == 0.97
    assert record.least_share(SETTINGS, still, 0.97).reproduced
    loud = [Ratio(1.0, low, 1.01) for low in (0.98, 0.95, 0.99, 0.97, 0.96)]
    lowered = record.least_share(SETTINGS, loud, 0.97)
    assert lowered.limit < 0.95
    assert not lowered.reproduced


def test_a_near_tie_covers_nearly_all_shifts_of_the_gap() -> None:
    shifts = [0.01] * 990 + [0.04] * 10
    limit = record.near_tie(SETTINGS, shifts, 0.05)
    assert limit.limit == 0.04
    assert not limit.reproduced


@pytest.mark.parametrize(
    ("value", "rounded"), [(0.0, 0.0), (1.01e-4, 1.1e-4), (0.033, 0.033), (0.0333, 0.034), (12.3, 13.0)]
)
def test_limits_are_rounded_outwards_to_two_digits(value: float, rounded: float) -> None:
    assert record.rounded_up(value) == pytest.approx(rounded)


def test_gaps_are_compared_where_tokens_can_tie_up_to_the_first_difference() -> None:
    def answer(tokens, *positions):
        logs = [{token: math.log(share) for token, share in position.items()} for position in positions]
        return Answer(tuple(tokens), tuple(logs), 0)

    reference = answer(
        [1, 1, 1, 1], {1: 0.6, 2: 0.3}, {1: 0.99, 2: 0.001}, {1: 0.5, 2: 0.4}, {1: 0.6, 2: 0.3}
    )
    other = answer([1, 1, 2, 1], {1: 0.5, 2: 0.4}, {1: 0.9, 2: 0.1}, {1: 0.4, 2: 0.5}, {1: 0.1, 2: 0.8})
    shifts = noise.gap_shifts(reference, other)
    assert shifts == pytest.approx(
        [math.log(0.6 / 0.3) - math.log(0.5 / 0.4), math.log(0.5 / 0.4) - math.log(0.4 / 0.5)]
    )
    unlisted = answer([1], {1: 0.9, 3: 0.1})
    assert noise.gap_shifts(answer([1], {1: 0.6, 2: 0.3}), unlisted) == []


@pytest.fixture
def core(tmp_path: Path, add_variant: Callable[..., Path]) -> Variant:
    """A baseline of the evaluation core, in a repository without its limits."""
    shutil.copytree(ROOT / "eval", tmp_path / "eval")
    for kind in (GateSettings, FidelitySettings, AcceptanceSettings, EngineSettings):
        (tmp_path / "eval" / kind.folder / "core.yaml").unlink(missing_ok=True)
    add_variant("base", "VLLM_MODEL=weights/tiny\nEVALUATION=core\nVLLM_MAX_MODEL_LEN=512\n")
    add_variant("small", "BASE=base\n", baseline="base")
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights" / "tiny").symlink_to(ROOT / "weights" / "tiny")
    return variant.load("small", tmp_path)


def test_without_limits_each_check_names_the_command_that_measures_them(core: Variant) -> None:
    checks = {
        "gates": lambda: gate.measure(core, "core", command=["x"]),
        "fidelity": lambda: fidelity.measure(core, "core", command=["x"], stages=False),
        "acceptance": lambda: acceptance.measure(core, "core", [4], command=["x"]),
        "engine": lambda: modes.measure(core, "core", command=["x"]),
        "length_sweep": lambda: length_sweep.measure(core, "core", command=["x"]),
    }
    for folder, check in checks.items():
        with pytest.raises(SettingsError) as caught:
            check()
        assert str(caught.value) == (
            f"eval/{folder}/core.yaml does not exist; `slimqwen limits --variant base` measures its limits "
            "and writes it"
        )


def test_limits_of_a_variant_are_those_of_its_baseline(core: Variant) -> None:
    with pytest.raises(EvalError, match="a baseline and small has one; `slimqwen limits --variant base`"):
        measurement.measure(core, command=["x"])


def test_an_interrupted_measurement_goes_on_and_leaves_a_model_that_the_gate_can_judge(
    core: Variant, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The whole procedure for the evaluation core, with stand-ins for the engines alone."""
    root = core.root
    write_data_set(root, ROWS)
    began: list[str] = []

    def run(_: Any, function: Any, *__: Any, **___: Any) -> Any:
        began.append(function.__name__)
        if len(began) == 4:
            raise KeyboardInterrupt
        if function is noise.measure_repeat:
            drafts = record_files.draft_items(*[[8, 7, 6, 5]] * 6)
            return RepeatNoise(texts(0.01, 0.01), drafts, [0.01, 0.05], 9, 1)
        return texts(0.02, 0.02) if function is measurement.compare_rounded else noise.Reference({}, {})

    monkeypatch.setattr(Engines, "run", run)
    base = variant.load("base", root)
    with pytest.raises(KeyboardInterrupt):
        measurement.measure(base, command=["slimqwen", "limits"])
    assert not list(root.glob("results/limits_*"))
    path, written = measurement.measure(base, command=["slimqwen", "limits"])
    assert began == [
        "answer_by_reference", "measure_repeat", "measure_repeat", "measure_repeat", "answer_by_reference",
        *["measure_repeat"] * 4, "compare_rounded",
    ]  # fmt: skip
    assert len(written.written) == 5
    made = store.read(path, LimitsRecord)
    assert [each.repeat for each in made.repeats] == [
        each.name for each in CORE.repeats if each.platform is None
    ]
    assert made.rounded > 0
    assert "data/core/texts.jsonl" in made.provenance.datasets
    assert FidelitySettings.of_variant(core, "core").limits.same_weights.kl_nats == pytest.approx(0.03)
    assert GateSettings.of_variant(core, "core").record == f"results/{path.name}"
    assert not list((root / ".cache" / "limits").iterdir())


def limits_record(**changes) -> LimitsRecord:
    made = [
        *record.same_weights(SETTINGS, [figures(0.01)] * 5, {}),
        *record.changed_weights(SETTINGS, figures(0.02), None, {}),
        record.least_share(SETTINGS, [Ratio(1.0, 0.99, 1.01)] * 5, None),
        record.near_tie(SETTINGS, [0.01, 0.05], None),
    ]
    summary = {
        "repeat": "x", "flags": {}, "kl_nats": 0.01, "acceptance_length": 3.0, "answers": 4, "differing": 0,
        "largest_gap_shift_nats": 0.05,
    }  # fmt: skip
    fields = {
        "variant": "base", "evaluation": "core", "repeats": [summary] * 5, "rounded": 3, "limits": made, "depth": 4,
        "gap_share": 0.999, "positions": 2, "provenance": record_files.example("acceptance")["provenance"],
    }  # fmt: skip
    return LimitsRecord.model_validate(fields | changes)


def test_the_written_files_hold_the_limits_and_name_their_record(core: Variant) -> None:
    root = core.root
    made = limits_record()
    path = root / "results" / "limits_base_2026-01-01T000000Z.json"
    written, kept = files.write(CORE, made, path, root)
    assert {file.relative_to(root).as_posix() for file in written} == {
        f"eval/{folder}/core.yaml" for folder in ("gates", "fidelity", "acceptance", "engine", "length_sweep")
    }
    assert kept == []
    gates = GateSettings.load("core", root)
    assert (gates.fidelity, gates.quality, gates.record) == (
        "core", "core", "results/limits_base_2026-01-01T000000Z.json",
    )  # fmt: skip
    loaded = FidelitySettings.load("core", root)
    assert loaded.texts == Path("data/core/texts.jsonl")
    assert loaded.limits.same_weights.kl_nats == pytest.approx(0.03)
    assert AcceptanceSettings.load("core", root).documents == "data/core/documents.txt"
    assert EngineSettings.load("core", root).near_tie_nats == 0.05
    assert files.committed("core", root)["least_share"] == 0.97
    # A second measurement replaces what the first one wrote.
    later = path.with_name("limits_base_2026-01-02T000000Z.json")
    assert len(files.write(CORE, made, later, root).written) == 5
    assert GateSettings.load("core", root).record.endswith("2026-01-02T000000Z.json")


def test_limits_written_by_hand_stay(core: Variant) -> None:
    before = {file: file.read_bytes() for file in (core.root / "eval").rglob("tinyworld.yaml")}
    path = core.root / "results" / "limits_base_2026-01-01T000000Z.json"
    written, kept = files.write(SETTINGS, limits_record(evaluation="tinyworld"), path, core.root)
    assert written == []
    assert len(kept) == 5
    assert before == {file: file.read_bytes() for file in before}


def test_the_record_says_which_committed_limits_it_reproduces(tmp_path: Path) -> None:
    fields = {"file": "fidelity", "limit": 0.03, "low": 0.02, "high": 0.04, "noise": 0.01, "rule": "r"}
    committed = {"a": 0.025, "b": 0.05}
    made = limits_record(
        limits=[Limit(figure=name, committed=value, **fields) for name, value in committed.items()]
    )
    assert [row[-1] for row in made.tables(tmp_path / "x.json")[0].rows] == ["yes", "no"]


def test_texts_come_from_the_suites_data_set_alike_on_every_machine(tmp_path: Path) -> None:
    with pytest.raises(EvalError, match="`make datasets` fetches it"):
        make_texts(CORE, tmp_path)
    write_data_set(tmp_path, ROWS)
    make_texts(CORE, tmp_path)
    texts = [json.loads(line) for line in (tmp_path / CORE.texts).read_text().splitlines()]
    documents = (tmp_path / CORE.documents).read_text().strip().split("\n\n")
    assert (len(texts), len(documents)) == (64, 4000)
    assert not {text["text"] for text in texts} & set(documents)
    assert texts[0]["text"].count("\n") == 3
    first = (tmp_path / CORE.documents).read_bytes()
    (tmp_path / CORE.documents).unlink()
    write_data_set(tmp_path, ROWS[::-1])
    make_texts(CORE, tmp_path)
    assert (tmp_path / CORE.documents).read_bytes() == first
    write_data_set(tmp_path, ROWS[:9])
    (tmp_path / CORE.texts).unlink()
    with pytest.raises(EvalError, match="has 9 different texts"):
        make_texts(CORE, tmp_path)
