"""An own evaluation, eval/own/NAME/: texts, questions and limits of one's own."""

import dataclasses
import json
import re
import shutil
from pathlib import Path

import pytest

from slimqwen import variant
from slimqwen.evals import drafting, fidelity, gate, own_evaluation, quality
from slimqwen.evals.checks import GateSettings
from slimqwen.evals.checks import acceptance as acceptance_check
from slimqwen.evals.checks.quality import QualitySettings
from slimqwen.evals.drafting import AcceptanceSettings
from slimqwen.evals.fidelity_figures import FidelitySettings
from slimqwen.evals.invocation import Invocation
from slimqwen.evals.suites import own_questions
from slimqwen.evals.suites.suite import Suite
from slimqwen.records.settings import SettingsError
from slimqwen.serving.shared_server import SharedServer
from slimqwen.text.files import CorpusError
from slimqwen.text.prompts import documents

FACTS = [json.loads(line) for line in Path("eval/tasks/tinyworld/facts.jsonl").read_text().splitlines()[:8]]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A repository with the committed variants and an own evaluation named mine, without files yet."""
    repository = variant.repository_root()
    for name in ("experiments", "weights"):
        (tmp_path / name).symlink_to(repository / name)
    (tmp_path / "eval" / "own" / "mine").mkdir(parents=True)
    shutil.copy(repository / "eval" / "own.yaml", tmp_path / "eval")
    return tmp_path


def write_questions(root: Path, rows: list[dict[str, object]]) -> None:
    file = root / "eval" / "own" / "mine" / "questions.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def test_a_gate_without_a_file_is_the_policy_for_own_evaluations(root: Path) -> None:
    gate = GateSettings.load("mine", root)
    assert gate.of(FidelitySettings).texts == Path("eval/own/mine/texts.jsonl")
    assert gate.of(AcceptanceSettings).documents == "eval/own/mine/texts.jsonl"
    assert gate.of(QualitySettings).suite == "mine"
    assert gate.files(root) == [root / "eval" / "own.yaml"]
    assert FidelitySettings.load("mine", root) == gate.of(FidelitySettings)


@pytest.mark.parametrize("name", ["texts.txt", "texts.csv.gz", "texts.parquet", "texts.tsv"])
def test_texts_of_any_format_are_those_of_all_checks(root: Path, name: str) -> None:
    (root / OWN / name).touch()
    gate = GateSettings.load("mine", root)
    assert {root / OWN / name} == {
        section.inputs(root)[-1] for section in gate.sections if not isinstance(section, QualitySettings)
    }
    (root / OWN / "texts.json").touch()
    with pytest.raises(
        CorpusError, match=rf"has {name.replace('.', '[.]')}|keep the one that holds the texts"
    ):
        GateSettings.load("mine", root)
    (root / OWN / "texts.jsonl").touch()
    assert GateSettings.load("mine", root).of(FidelitySettings).texts == Path(OWN, "texts.jsonl")


def test_texts_of_a_txt_file_are_divided_by_empty_lines_for_every_check(root: Path) -> None:
    (root / OWN / "texts.txt").write_text("One,\ntwo.\n\n\nThree.\n")
    settings = GateSettings.load("mine", root)
    texts = settings.of(FidelitySettings).read_texts(root)
    assert [text.strip() for _, text in texts] == ["One,\ntwo.", "Three."]
    cut = documents(settings.of(AcceptanceSettings).documents, 0, root)
    assert sorted(cut) == ["One,\ntwo.", "Three."]


def test_a_field_of_gate_yaml_replaces_that_field_alone(root: Path) -> None:
    before = FidelitySettings.load("mine", root)
    own = root / "eval" / "own" / "mine" / "gate.yaml"
    own.write_text("fidelity: {limits: {kl_nats: 0.5}, batch: 2}\n")
    after = FidelitySettings.load("mine", root)
    assert (after.limits.kl_nats, after.batch) == (0.5, 2)
    assert after.limits.bits_per_byte == before.limits.bits_per_byte
    assert after.files(root) == [root / "eval" / "own.yaml", own]
    own.write_text("fidelity: {limits: {kl_nat: 0.5}}\n")
    with pytest.raises(
        SettingsError, match=r"eval/own/mine/gate\.yaml:1: unknown key 'kl_nat'; did you mean kl_nats\?"
    ):
        GateSettings.load("mine", root)


OWN = Path("eval/own/mine")
PASSAGES = Path("eval/texts/tinyworld_passages.jsonl").read_text().splitlines(keepends=True)[:750]
ASKED: list[dict[str, object]] = [{"prompt": "?", "answer": "a"}] * 2


def faults_of(root: Path, **lines: str) -> list[str]:
    """What is wrong with the evaluation mine of a variant of tiny with these lines of config.env."""
    judged = variant.load("tiny-awq", root).with_lines({"EVALUATION": "mine", **lines})
    return [fault.removeprefix(f"{root}/") for fault in own_evaluation.list_faults(judged, root / OWN)]


def test_an_evaluation_without_its_files_lacks_each_once(root: Path) -> None:
    assert faults_of(root) == [
        "eval/own/mine/texts.jsonl: cannot be read (No such file or directory); put a readable file there",
        "eval/own/mine/texts.jsonl is used up: 24 prompts of 32 tokens (short) lack 768 tokens, 24 prompts of 256 "
        "tokens (medium) lack 6,144 tokens, 24 prompts of 1024 tokens (long) lack 24,576 tokens, 31,488 in all; add "
        "texts or divide long ones, as no two prompts share one, or ask for fewer or shorter prompts",
        "eval/own/mine/questions.jsonl: cannot be read (No such file or directory); put the questions there",
    ]


def test_every_file_of_an_evaluation_is_checked_at_once(root: Path) -> None:
    write_questions(root, [{"prompt": "?"}, {"prompt": "?", "answer": True}])
    (root / OWN / "prompts.jsonl").write_text('{"prompt": "?"}\n{"text": "?"}\n{"prompt"}\n')
    (root / OWN / "texts.jsonl").write_text("".join(PASSAGES[:9]) + '{"txt": ""}\n' + "".join(PASSAGES[9:18]))
    first, second, third, lacking, fourth, fifth = faults_of(root, VLLM_MAX_MODEL_LEN="96")
    assert "prompts.jsonl, line 2: unusable prompt (" in first
    assert "prompts.jsonl, line 3: unusable prompt (not JSON" in second
    assert third.startswith("eval/own/mine/texts.jsonl, line 10: neither a text nor a chat")
    assert "questions.jsonl, line 1: answer: Field required" in fourth
    assert "questions.jsonl, line 2: answer: write it as text" in fifth
    # What is missing is counted behind the fault, too.
    (root / OWN / "texts.jsonl").write_text("".join(PASSAGES[:18]))
    assert lacking in faults_of(root, VLLM_MAX_MODEL_LEN="96")
    assert re.fullmatch(
        r"eval/own/mine/texts\.jsonl is used up: 24 prompts of 32 tokens \(.* tokens.*; add texts .*", lacking
    )


def test_a_sound_evaluation_has_no_fault(root: Path) -> None:
    write_questions(root, ASKED)
    (root / OWN / "texts.jsonl").write_text("".join(PASSAGES))
    assert faults_of(root) == []


def test_what_was_understood_of_each_file_is_a_line(root: Path) -> None:
    write_questions(root, [{"prompt": "1 + 1?", "answer": ["2", "two"]}] * 3)
    (root / OWN / "texts.txt").write_text("One.\n\nTwo,\ntwo.\n")
    (root / OWN / "prompts.json").write_text('["a", "b", "c", "d"]')
    lines = own_evaluation.describe(root / OWN)
    assert lines[0] == "eval/own/mine/texts.txt: 2 texts (.txt divided by empty lines)"
    assert lines[1] == (
        "eval/own/mine/questions.jsonl: 3 questions (3 exact), 3 with several right answers; planned are 1,446 to "
        "decide the score and 1,160 to decide whether responses run away"
    )
    assert lines[2:] == ["eval/own/mine/prompts.json: 4 prompts"]


def test_a_file_that_is_called_like_one_of_an_evaluation_but_not_read_is_named(root: Path) -> None:
    write_questions(root, ASKED)
    (root / OWN / "texts.jsonl").write_text("".join(PASSAGES))
    for name in ("suite.yml", "prompts.txt", "Prompts.json", "questions.csv.bak", "notes.txt"):
        (root / OWN / name).touch()
    unread = [fault.partition(": ")[::2] for fault in faults_of(root)]
    assert unread == [
        ("eval/own/mine/Prompts.json", "not read under this name; rename it to prompts.jsonl"),
        ("eval/own/mine/prompts.txt", "not read under this name; rename it to prompts.jsonl"),
        ("eval/own/mine/suite.yml", "not read under this name; rename it to suite.yaml"),
    ]


def test_each_fault_of_the_settings_is_named_at_its_line(root: Path) -> None:
    own = root / OWN / "gate.yaml"
    own.write_text("fidelity:\n  batches: 2\nengine:\n  lengths: 0\nacceptance: {prompts: 3}\n")
    assert faults_of(root) == [
        "eval/own/mine/gate.yaml:2: unknown key 'batches'; did you mean batch?",
        "eval/own/mine/gate.yaml:5: acceptance: 3 prompts cannot be divided into 6 groups; raise prompts or lower "
        "groups",
        "eval/own/mine/gate.yaml:4: engine.lengths: Input should be greater than or equal to 1, here is 0",
    ]


def test_too_few_texts_for_the_drafts_are_told_as_the_gate_tells_it(root: Path) -> None:
    write_questions(root, ASKED)
    (root / OWN / "texts.jsonl").write_text("".join(PASSAGES[:80]))
    settings, tiny = AcceptanceSettings.load("mine", root), variant.load("tiny", root)
    with pytest.raises(CorpusError, match=r"24 prompts of \d+ tokens \(\w+\) lack [\d,]+ tokens") as caught:
        drafting.cut_prompts(settings, tiny, tiny, 256 - settings.tokens)
    assert faults_of(root, VLLM_MAX_MODEL_LEN="256") == [str(caught.value)]
    assert faults_of(root, VLLM_MAX_MODEL_LEN="1024") != [str(caught.value)]
    assert faults_of(root, VLLM_MAX_MODEL_LEN="80") == []


@pytest.mark.parametrize("lacking", ["tokenizer.json", "MTP head", "baseline"])
def test_drafts_are_left_out_where_nothing_says_how_they_will_be(
    root: Path, lacking: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_questions(root, ASKED)
    (root / OWN / "texts.jsonl").write_text("".join(PASSAGES[:40]))
    assert len(faults_of(root)) == 1
    if lacking == "MTP head":
        monkeypatch.setattr(acceptance_check, "has_mtp_head", lambda folder: False)
    judged = variant.load("tiny-awq", root).with_lines({"EVALUATION": "mine"})
    if lacking == "tokenizer.json":
        (root / "weights").unlink()
    if lacking == "baseline":
        judged = dataclasses.replace(judged, baseline=None)
    assert own_evaluation.list_faults(judged, root / OWN) == []


def test_drafts_are_compared_at_the_depth_that_is_served(root: Path) -> None:
    settings = AcceptanceSettings.load("mine", root)
    deeper = {"VLLM_SPECULATIVE_CONFIG": '{"method": "mtp", "num_speculative_tokens": 3}'}
    drafting = variant.load("tiny-mtp4", root).with_lines(deeper)
    assert settings.depth_of(drafting) == settings.at_depth_of(drafting).gate_depth == 3
    assert settings.depth_of(variant.load("tiny", root)) == 4
    assert settings.model_copy(update={"gate_depth": 2}).depth_of(drafting) == 2


def test_a_name_that_is_neither_a_file_nor_a_folder_lists_both(root: Path) -> None:
    with pytest.raises(
        SettingsError,
        match=r"eval/gates/other\.yaml does not exist, nor does eval/own/other; choose one of: mine",
    ):
        GateSettings.load("other", root)


def test_a_suite_of_own_questions_takes_its_margin_from_suite_yaml(root: Path) -> None:
    (root / "eval" / "own" / "mine" / "suite.yaml").write_text(
        "non_inferiority_margin: 0.1\nthinking: false\n"
    )
    (task,) = Suite.load("mine", root).tasks
    assert (task.name, task.non_inferiority_margin, task.thinking) == ("mine_questions", 0.1, False)


def test_unusable_questions_are_named_before_a_server_starts(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_questions(root, [{"prompt": "?", "answer": "a"}, {"prompt": "?"}])
    monkeypatch.setattr(quality, "share_server", lambda *_, **__: pytest.fail("a server starts"))
    mtp4, suite = variant.load("tiny-mtp4", root), Suite.load("mine", root)
    with pytest.raises(CorpusError, match=r"questions\.jsonl, line 2: answer: Field required"):
        quality.measure_quality(mtp4, suite, None, Invocation([]))
    monkeypatch.setattr(fidelity, "measure_fidelity", lambda *_, **__: pytest.fail("a check runs"))
    (root / OWN / "texts.jsonl").write_text("".join(PASSAGES))
    with pytest.raises(CorpusError, match=r"questions\.jsonl, line 2: answer: Field required"):
        gate.measure_gate(mtp4, GateSettings.load("mine", root), command=[])


@pytest.mark.engine
def test_own_questions_are_asked_through_the_chat_template_and_scored(
    root: Path, served_tiny: SharedServer
) -> None:
    (root / "eval" / "own" / "mine" / "suite.yaml").write_text("{max_gen_toks: 12, thinking: false}\n")
    rows: list[dict[str, object]] = [{"prompt": fact["question"], "answer": fact["answer"]} for fact in FACTS]
    chat = [{"role": "user", "content": FACTS[0]["question"]}]
    rows += [{"messages": chat, "answer": FACTS[0]["answer"]}, {"messages": chat, "answer": "nowhere"}]
    write_questions(root, rows)
    suite = Suite.load("mine", root)
    server = dataclasses.replace(served_tiny, variant=variant.load("tiny", root))
    (run,) = own_questions.ask_questions(suite, server, limit=None)
    score = quality.score_task(run)
    values = [item.value for item in run.items]
    assert score.item_count == 10
    assert values[8] == values[0]  # the same question as a chat
    assert values[9] == 0
    assert sum(values) >= 4  # tiny knows 71 % of such facts
    assert score.settings == suite.settings_of(run.task)
    assert not (root / ".cache" / "own").exists()
