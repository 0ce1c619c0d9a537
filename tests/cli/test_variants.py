"""`variant new`: a baseline of a checkpoint, and a variant of it whose recipe can be run as it is written."""

import json
import shutil
import subprocess
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from slimqwen import variant
from slimqwen.cli import console, variants
from slimqwen.cli.app import app
from slimqwen.errors import SlimqwenError
from slimqwen.hub import HubError
from slimqwen.recipe.recipe_file import RecipeError
from slimqwen.recipe.registry import STAGES
from slimqwen.report import markdown
from slimqwen.text.files import CorpusError
from slimqwen.variant import Variant
from tests import hub_server
from tests.cli.conftest import said_by
from tests.evals.recipe_made import gated, made  # noqa: F401  (a fixture)
from tests.models.gguf_files import original_tokenizer, write_gguf
from tests.models.test_drafter import drafter
from tests.zoo.published_forms import PUBLISHED_FORMS


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with a multimodal checkpoint in weights/mymodel and no variant."""
    dict(STAGES)  # imports them before the repository is another: their defaults name its texts
    (tmp_path / "experiments").mkdir()
    PUBLISHED_FORMS["multimodal"].build(tmp_path / "weights" / "mymodel")
    monkeypatch.setattr(variant, "repository_root", lambda: tmp_path)
    monkeypatch.setattr(variant.variant, "repository_root", lambda: tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_folder_becomes_a_baseline_and_its_variant_asks_for_no_text(
    root: Path,
) -> None:
    assert "multimodal, of which the language model is served" in said_by(
        "variant new --name base --checkpoint weights/mymodel"
    )
    base = variant.load("base", root)
    assert (base.baseline, base.weights) == (None, root / "weights" / "mymodel")
    assert base.settings["VLLM_LANGUAGE_MODEL_ONLY"].value == "1"
    assert base.settings["EVALUATION"].value == "core"
    said = said_by("variant new --name mine --base base --stage calibrate --stage sample_outputs")
    assert "next: `slimqwen recipe run --variant mine --dry-run`" in said
    mine = variant.load("mine", root)
    assert mine.baseline == "base"
    assert "base with calibrate, sample_outputs is faster" in mine.hypothesis
    stages = [
        line.split()[0]
        for line in said_by("recipe run --variant mine --dry-run").splitlines()
        if " run " in line
    ]
    assert stages[:3] == ["write_text", "calibrate", "sample_outputs"]
    (root / "mine.txt").write_text("A text.\n")
    said_by("variant new --name own --base base --stage calibrate --corpus mine.txt")
    assert "corpus: ../../mine.txt\n" in (root / "experiments" / "own" / "recipe.yaml").read_text()
    said = said_by("variant new --name plain --base base --stage trim_draft_vocab")
    assert "next: `slimqwen recipe run --variant plain --dry-run`" in said


@pytest.mark.parametrize("how", ["--dry-run", ""])
@pytest.mark.parametrize("base", ["bas", "owner/name"])
def test_a_base_that_is_not_there_is_named_with_file_and_line(root: Path, how: str, base: str) -> None:
    said_by("variant new --name base --checkpoint weights/mymodel")
    said_by("variant new --name mine --base base --stage quantise_lm_head")
    file = root / "experiments" / "mine" / "recipe.yaml"
    file.write_text(file.read_text().replace("base: base", f"base: {base}"))
    line = 1 + next(n for n, text in enumerate(file.read_text().splitlines()) if text.startswith("base:"))
    with pytest.raises(RecipeError, match=rf"mine/recipe\.yaml:{line}: base: .*{base}"):
        said_by(f"recipe run --variant mine {how}")


@pytest.mark.parametrize("how", ["--dry-run", ""])
def test_what_will_judge_a_variant_is_checked_with_its_recipe(root: Path, how: str) -> None:
    own = root / "eval" / "own" / "judge"
    own.mkdir(parents=True)
    (own / "prompts.jsonl").write_text('{"prompt": "Well?"}\n')
    (own / "workload.yaml").write_text("output_tokens: 1\n")
    shutil.copy(Path(__file__).parents[2] / "eval" / "own.yaml", root / "eval")
    said_by("variant new --name base --checkpoint weights/mymodel")
    with pytest.raises(
        CorpusError, match=r"judge/questions\.jsonl: cannot be read .*; put the questions there"
    ):
        said_by("variant new --name mine --base base --stage calibrate --evaluation judge")
    (own / "questions.jsonl").write_text(2 * '{"prompt": "Well?", "answer": "Yes."}\n')
    said_by("variant new --name mine --base base --stage calibrate --evaluation judge")
    (own / "questions.jsonl").unlink()
    started = time.process_time()
    with pytest.raises(RecipeError) as caught:
        said_by(f"recipe run --variant mine {how}")
    assert time.process_time() - started < 3
    prompts, texts, lacking, questions, lengths = caught.value.faults
    assert "eval/own/judge/texts.jsonl: cannot be read" in texts
    assert lacking.startswith(
        "eval/own/judge/texts.jsonl is used up: 24 prompts of 32 tokens (short) lack 768 tokens"
    )
    assert "eval/own/judge/questions.jsonl: cannot be read" in questions
    assert prompts.endswith(
        "eval/own/judge/prompts.jsonl: 1 prompts are too few for an interval; write 2 or more"
    )
    assert (
        lengths
        == "eval/own/judge/workload.yaml:1: output_tokens: Input should be greater than or equal to 2, here is 1"
    )
    assert not (root / "weights" / "store").exists()


def test_a_dry_run_names_memory_disk_and_time_of_each_stage(
    root: Path,
) -> None:
    said_by("variant new --name base --checkpoint weights/mymodel")
    said_by("variant new --name mine --base base --stage quantise_lm_head")
    (root / "weights" / "mymodel" / "tokenizer.json").unlink()
    said = said_by("recipe run --variant mine --dry-run")
    [row] = [line for line in said.splitlines() if line.startswith("quantise_lm_head")]
    assert row.split()[:9] == ["quantise_lm_head", "run", "0.8", "GB", "0.01", "GB", "10", "s", "by"]


@pytest.mark.parametrize(
    "given",
    ["", "--base base --checkpoint weights/mymodel", "--checkpoint weights/mymodel --stage calibrate"],
)
def test_a_new_variant_is_of_a_checkpoint_or_of_a_base(root: Path, given: str) -> None:
    result = CliRunner().invoke(app, ["variant", "new", "--name", "new", *given.split()])
    assert result.exit_code == 2
    assert not (root / "experiments" / "new").exists()


@pytest.mark.parametrize(
    ("given", "fault"),
    [
        ("weights/mymodl", r"no checkpoint in .*/weights/mymodl; give the folder of a checkpoint"),
        (
            "weights/mymodel --evaluation other",
            r"eval/suites/other\.yaml does not exist, nor does eval/own/other; choose one of: own, or",
        ),
    ],
)
def test_what_is_not_there_is_named_before_anything_is_written_or_a_hub_is_asked(
    root: Path, given: str, fault: str
) -> None:
    (root / "eval" / "own" / "own").mkdir(parents=True)
    with pytest.raises(SlimqwenError, match=fault):
        said_by(f"variant new --name new --checkpoint {given}")
    assert not (root / "experiments" / "new").exists()


def test_a_hub_name_is_downloaded_first_and_the_same_command_continues(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def refuse(repository: object, target: Path, progress: object) -> None:
        asked.append((repository, target))
        raise HubError("no network; connect to one")

    monkeypatch.setattr("slimqwen.hub.download_copy", refuse)
    with pytest.raises(HubError):
        variants.create_baseline("new", f"owner/name@{'0' * 40}", "It is.", "core")
    [(repository, target)] = asked
    assert (repository.name, repository.revision) == ("owner/name", "0" * 40)
    assert repository.command == f"`slimqwen variant new --name new --checkpoint owner/name@{'0' * 40}`"
    assert target == root / "weights" / "new"
    assert not (root / "experiments" / "new").exists()


def test_a_gguf_file_becomes_a_baseline_that_carries_its_loss(root: Path) -> None:
    published = PUBLISHED_FORMS["qwen2"].build(root / "published")
    write_gguf(published, root / "m.gguf", original_tokenizer("qwen2"), "qwen2", "Q4_0", general__name="Some")
    said = said_by("variant new --name base --checkpoint m.gguf")
    origin = "m.gguf (Q4_0 (15)) in 16 bits, with the loss of its own quantisation; original: Some"
    assert f"made of: {origin}" in " ".join(said.split())
    base = variant.load("base", root)
    assert base.weights == root / "weights" / "base"
    assert base.hypothesis.startswith(f"The weights of {origin}: what every variant")
    with pytest.raises(SlimqwenError, match="weights/mymodel exists already; move it away"):
        said_by("variant new --name mymodel --checkpoint m.gguf")


def git(root: Path, *words: str) -> str:
    command = ["git", "-C", str(root), "-c", "user.name=x", "-c", "user.email=x@example.org", *words]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


@pytest.fixture
def checkout(made: Variant, monkeypatch: pytest.MonkeyPatch) -> Path:  # noqa: F811
    """A checkout that ships the variant tiny and lists it in a page, with an own variant `small` beside it."""
    root = made.root
    dict(STAGES)
    (root / "docs").mkdir()
    (root / "docs" / "variants.md").write_text("<!-- table:variants -->\n<!-- end -->\n")
    shutil.copy(Path(__file__).parents[2] / ".gitignore", root)
    git(root, "init", "--initial-branch=main")
    git(root, "add", ".gitignore", "docs", "eval", "experiments/tiny")
    markdown.update_tables(root)
    git(root, "add", "docs")
    git(root, "commit", "-m", "shipped")
    monkeypatch.setattr(variant, "repository_root", lambda: root)
    monkeypatch.setattr(variant.variant, "repository_root", lambda: root)
    monkeypatch.chdir(root)
    return root


@pytest.mark.usefixtures("stamps")
def test_no_verb_of_a_user_changes_a_tracked_file(checkout: Path) -> None:
    said_by("variant new --name flags --base tiny")
    said_by("variant new --name mine --base tiny --stage trim_draft_vocab")
    said_by("variant new --name base --checkpoint weights/tiny")
    gated(variant.load("small", checkout))
    assert "small was promoted" in said_by("variant promote --variant small")
    assert "no fault" in said_by("report --check")
    said_by("report --output report")
    own = [f"?? experiments/{name}/" for name in ("base", "flags", "mine", "small")]
    assert git(checkout, "status", "--porcelain").splitlines() == own
    assert "not measured" in (checkout / "experiments" / "mine" / "README.md").read_text().lower()
    listed, shown = (checkout / "docs" / "variants.md").read_text(), said_by("variant list")
    assert ("| tiny |" in listed, "| mine |" in listed, "mine" in shown) == (True, False, True)


@pytest.mark.usefixtures("stamps")
def test_an_own_variant_under_git_is_listed_and_its_page_checked(checkout: Path) -> None:
    said_by("variant new --name mine --base tiny")
    git(checkout, "add", "experiments/mine")
    markdown.update_tables(checkout)
    assert "| mine |" in (checkout / "docs" / "variants.md").read_text()
    page = checkout / "experiments" / "mine" / "README.md"
    page.write_text(page.read_text().replace("Not measured", "Measured", 1))
    with console.console.capture() as shown:
        assert CliRunner().invoke(app, ["report", "--check"]).exit_code == 1
    assert "experiments/mine/README.md" in shown.get()


def test_a_drafter_of_another_maker_is_fetched_and_served(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said_by("variant new --name base --checkpoint weights/mymodel")
    there = drafter(root / "hub", "DFlashDraftModel")
    for _ in hub_server.running(there, monkeypatch):
        said = said_by("variant new --name mine --base base --drafter owner/name")
    assert "weights/mine-drafter, vLLM's method dflash" in said
    assert (root / "weights" / "mine-drafter" / "model.safetensors").is_file()
    speculation = json.loads(variant.load("mine", root).settings["VLLM_SPECULATIVE_CONFIG"].value)
    assert (speculation["method"], speculation["model"]) == ("dflash", "weights/mine-drafter")
