"""The commands of docs/your-model.md run as they stand, on a multimodal checkpoint and chats of its own."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from slimqwen.variant import repository_root
from tests.zoo.published_forms import PUBLISHED_FORMS

ROOT = repository_root()
TOO_LONG = {"texts": 64, "held_out": 16, "steps": 10, "validate_every": 5}
"""Parameters of the recipe that a test makes smaller after the document's own commands have filled it in."""


def commands() -> list[str]:
    """The lines of the code blocks, in their order."""
    text = (ROOT / "docs" / "your-model.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    return [line for block in blocks for line in block.splitlines()]


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A copy of the repository with a model folder and chats: what the document asks for."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout
    for name in listed.decode().split("\0"):
        if name and (ROOT / name).is_file():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, tmp_path / name)
    PUBLISHED_FORMS["multimodal"].build(tmp_path / "weights" / "mymodel")
    (tmp_path / "corpora").mkdir()
    rows = (ROOT / "eval" / "texts" / "tinyworld.jsonl").read_text(encoding="utf-8").splitlines()[:1200]
    with (tmp_path / "corpora" / "mymodel.jsonl").open("w", encoding="utf-8", newline="") as file:
        for number, row in enumerate(rows):
            text = json.loads(row)["text"]
            asked, said = f"{number} {text[: len(text) // 2]}", text[len(text) // 2 :]
            messages = [{"role": "user", "content": asked}, {"role": "assistant", "content": said}]
            file.write(json.dumps({"messages": messages}, ensure_ascii=False) + "\r\n")
    own, tasks = tmp_path / "eval" / "own" / "mymodel", ROOT / "eval" / "tasks" / "tinyworld"
    own.mkdir(parents=True)
    passages = (
        (ROOT / "eval" / "texts" / "tinyworld_passages.jsonl")
        .read_text(encoding="utf-8")
        .splitlines(keepends=True)
    )
    (own / "texts.jsonl").write_text(
        "".join(passages[: len(passages) // 8]), encoding="utf-8"
    )  # about 35,000 tokens
    asked = [
        json.loads(line) for line in (tasks / "twohop.jsonl").read_text(encoding="utf-8").splitlines()[:50]
    ]
    questions = [
        {"messages": [{"role": "user", "content": each["question"]}], "answer": each["answer"]}
        for each in asked
    ]
    prompts = [{"prompt": each["prompt"]} for each in asked[:12]]
    for name, rows_of_file in (("questions", questions), ("prompts", prompts)):
        (own / f"{name}.jsonl").write_text("".join(f"{json.dumps(each)}\n" for each in rows_of_file))
    return tmp_path


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_the_way_from_a_model_folder_to_serve_this_one(clone: Path) -> None:
    (clone / "bin").mkdir()
    run = clone / "bin" / "slimqwen"
    run.write_text(f'#!/bin/sh\nexec {sys.executable} -m slimqwen.cli "$@"\n')
    run.chmod(0o755)
    paths = {"PATH": f"{clone / 'bin'}{os.pathsep}{os.environ['PATH']}", "PYTHONPATH": str(clone)}
    said: dict[str, str] = {}
    for command in commands():
        ended = subprocess.run(
            command, shell=True, cwd=clone, env={**os.environ, **paths}, capture_output=True, text=True
        )
        said[command] = ended.stdout + ended.stderr
        is_verdict = command.startswith("slimqwen gate") and ended.returncode in (0, 1, 2)
        assert ended.returncode == 0 or is_verdict, f"{command}: {said[command][-2000:]}"
        if command.startswith("slimqwen variant new --name mine"):
            recipe = clone / "experiments" / "mine" / "recipe.yaml"
            text = recipe.read_text(encoding="utf-8")
            for name, value in TOO_LONG.items():
                text = re.sub(rf"^( +{name}:) \d+$", rf"\1 {value}", text, flags=re.MULTILINE)
            recipe.write_text(text, encoding="utf-8")
    outputs = "\n".join(said.values())
    for expected in (
        "multimodal, of which the language model is served",
        "head kept; acceptance length",
        "by arithmetic",
    ):
        assert expected in outputs
    assert re.search(r"\b(pass|fail|inconclusive)\b", said["slimqwen gate mine"])


def test_the_document_goes_from_a_checkpoint_to_a_comparison() -> None:
    verbs = [command.split()[1] for command in commands() if command.startswith("slimqwen")]
    assert verbs == ["variant", "serve", "variant", "recipe", "recipe", "gate", "bench", "compare"]
