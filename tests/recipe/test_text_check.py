"""A stage's text is checked before the stages before it work for hours."""

from pathlib import Path
from typing import Any

import pytest

from slimqwen.recipe import recipe_file
from slimqwen.recipe.inspection import inspect_steps
from tests.recipe.inspected import CHAT, faults_of, outline_of_tiny, write_lines


@pytest.mark.parametrize(
    ("rows", "stage", "message"),
    [
        (
            [{"prompt": "a"}],
            "calibrate",
            'line 1: neither a text nor a chat; give {"text": …} or {"messages"',
        ),
        ([{"text": "a"}], "calibrate", "has 14 bytes, too few for 16384 tokens"),
        ([{"prompt": "a"}, {"text": "b"}, CHAT], "sample_outputs", "has 3 documents, but 1120 are needed"),
        ([{"text": " "}], "prune_vocab", "has 0 documents, but at least one is needed"),
    ],
)
def test_what_shows_of_a_text_before_its_stage_reads_it(
    tmp_path: Path, rows: list[object], stage: str, message: str
) -> None:
    write_lines(tmp_path / "t.jsonl", *rows)
    field = "prompts" if stage == "sample_outputs" else "corpus"
    size = ", size: 64" if stage == "prune_vocab" else ""
    [fault] = faults_of(tmp_path, f"  - {stage}: {{{field}: {{path: t.jsonl}}{size}}}\n")
    assert fault.startswith(f"4: {stage}: ")
    assert message in fault


def test_chats_need_a_template(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text("{}")
    write_lines(tmp_path / "t.jsonl", CHAT)
    stages = "  - prune_vocab: {size: 64, corpus: {path: t.jsonl}}\n"
    assert faults_of(tmp_path, stages) == []
    [fault] = faults_of(tmp_path, stages, outline_of_tiny(folder=tmp_path))
    assert "t.jsonl has chats" in fault


@pytest.mark.parametrize(
    "tooled",
    [
        {"tools": [{"type": "function", "function": {"name": "f"}}]},
        {"messages": [*CHAT["messages"], {"role": "tool", "content": "1"}]},
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]}]},
    ],
)
def test_chats_with_tools_need_a_template_that_renders_them(tmp_path: Path, tooled: dict[str, Any]) -> None:
    write_lines(tmp_path / "t.jsonl", CHAT, {**CHAT, **tooled}, {**CHAT, **tooled})
    stages = "  - prune_vocab: {size: 64, corpus: {path: t.jsonl}}\n"
    [fault] = faults_of(tmp_path, stages)
    assert "t.jsonl, line 2: a chat with tools (2 such chats), which" in fault
    assert "weights/tiny/chat_template.jinja does not render" in fault
    (tmp_path / "tokenizer_config.json").write_text("{}")
    (tmp_path / "chat_template.jinja").write_text("{{ tools }}{{ messages }}")
    assert faults_of(tmp_path, stages, outline_of_tiny(folder=tmp_path)) == []


@pytest.mark.parametrize(
    "entry", ["calibrate", "quantise_lm_head: {rounding: gptq}", "sample_outputs: {texts: 16}"]
)
def test_a_text_that_is_not_named_is_no_fault(tmp_path: Path, entry: str) -> None:
    assert faults_of(tmp_path, f"  - {entry}\n") == []


def test_a_public_mix_that_is_not_fetched_is_a_fault_with_its_command_or_a_line(tmp_path: Path) -> None:
    file = tmp_path / "recipe.yaml"
    file.write_text(
        "description: d\nbase: tiny\nstages:\n  - prune_vocab: {size: 64, corpus: {path: general}}\n"
    )
    steps, to_fetch = recipe_file.parse_recipe(file).steps, list[str]()
    [fault] = inspect_steps(steps, outline_of_tiny(), tmp_path / "store")[0]
    assert fault.endswith("`slimqwen download --corpus general --variant tiny` fetches it")
    assert inspect_steps(steps, outline_of_tiny(), tmp_path / "store", to_fetch)[0] == ()
    assert to_fetch == [fault]


def test_a_text_that_is_not_read_may_be_left_out_or_to_be_filled_in(tmp_path: Path) -> None:
    for entry in ("quantise_lm_head: {corpus: {path: }}", "calibrate: {targets: [mtp], corpus: {path: }}"):
        assert faults_of(tmp_path, f"  - {entry}\n") == []
    assert faults_of(tmp_path, "  - calibrate: {targets: [mtp]}\n") == []
