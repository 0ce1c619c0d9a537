"""The workspace: where it is found, what it takes from the installation, and what `slimqwen init` writes."""

import contextlib
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from slimqwen import checkpoint, variant, workspace
from slimqwen.checkpoint import hashes
from slimqwen.evals.suites import lm_eval_run
from slimqwen.evals.suites.suite import Suite
from slimqwen.plan import devices, shapes
from slimqwen.records import provenance
from slimqwen.records.collection import collect
from slimqwen.records.git import git_state
from slimqwen.workspace import HOME, MARKER, WorkspaceError, create_workspace, installation_root

CHECKOUT = installation_root()


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty workspace, and the working folder in it."""
    monkeypatch.delenv(HOME, raising=False)
    create_workspace(tmp_path / "own")
    monkeypatch.chdir(tmp_path / "own" / "corpora")
    return tmp_path / "own"


def test_the_nearest_folder_above_is_the_workspace_then_the_variable_then_the_checkout(
    own, tmp_path, monkeypatch
):
    assert variant.repository_root() == own
    monkeypatch.chdir(tmp_path)
    assert variant.repository_root() == CHECKOUT
    monkeypatch.setenv(HOME, str(own))
    assert variant.repository_root() == own
    monkeypatch.chdir(CHECKOUT / "experiments")
    monkeypatch.delenv(HOME)
    assert variant.repository_root() == CHECKOUT


def test_verbs_that_only_read_need_no_workspace_beside_an_installed_package(own, tmp_path, monkeypatch):
    monkeypatch.setattr(workspace, "installation_root", lambda: Path("/x/slimqwen/shipped"))
    assert workspace.root_to_read() == own
    monkeypatch.chdir(tmp_path)
    assert workspace.root_to_read() == Path("/x/slimqwen/shipped")
    with pytest.raises(WorkspaceError, match="; run `slimqwen init FOLDER` to make one"):
        variant.repository_root()


def test_a_checkout_inside_a_workspace_is_its_own_workspace(own, monkeypatch):
    monkeypatch.setattr(workspace, "installation_root", lambda: own / "clone")
    (own / "clone" / "eval").mkdir(parents=True)
    monkeypatch.chdir(own / "clone" / "eval")
    assert variant.repository_root() == own / "clone"


def test_a_removed_working_folder_is_in_no_workspace(own, monkeypatch):
    gone = own / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert variant.repository_root() == CHECKOUT


def test_a_variable_that_names_no_workspace_is_refused_and_its_cure_works(own, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(HOME, str(tmp_path / "other"))
    with pytest.raises(WorkspaceError, match=r"is no workspace; run `slimqwen init .*other` to make it one"):
        variant.repository_root()
    create_workspace(tmp_path / "other")
    assert variant.repository_root() == tmp_path / "other"


@pytest.mark.skipif(os.geteuid() != 0, reason="gives a file to another user")
def test_another_users_workspace_is_used_only_where_it_is_named(own, monkeypatch):
    os.chown(own / MARKER, 12345, 12345)
    with pytest.raises(WorkspaceError, match=r"another user \(uid 12345\)"):
        variant.repository_root()
    monkeypatch.chdir("/")
    monkeypatch.setenv(HOME, str(own))
    assert variant.repository_root() == own


@pytest.mark.skipif(os.geteuid() != 0, reason="gives a file to another user")
def test_the_cure_for_another_users_workspace_works_from_inside_it(own, monkeypatch):
    os.chown(own / MARKER, 12345, 12345)
    monkeypatch.setenv(HOME, str(own))
    assert variant.repository_root() == own


def test_what_a_workspace_lacks_comes_from_the_installation(own):
    assert variant.load("tiny-best", own).settings["EVALUATION"].value == "tinyworld"
    assert variant.load("tiny", own).weights == CHECKOUT / "weights" / "tiny"
    assert variant.load("tiny", own).folder == own / "experiments" / "tiny"
    assert "a10g" in devices.read_gpus(own)
    assert shapes.published_shape(own, "qwen3.5-4b") is not None
    suite = Suite.load("tinyworld", own)
    assert suite.inputs(own) == Suite.load("tinyworld", CHECKOUT).inputs(CHECKOUT)


def test_what_a_workspace_has_comes_first(own):
    (own / "experiments" / "tiny").mkdir()
    (own / "experiments" / "tiny" / "config.env").write_text("VLLM_MODEL=weights/mine\n")
    assert variant.load("tiny", own).weights == own / "weights" / "mine"
    assert variant.load("tiny", own).hypothesis == variant.load("tiny", CHECKOUT).hypothesis
    (own / "eval" / "suites").mkdir()
    shutil.copy(CHECKOUT / "eval" / "suites" / "tinyworld.yaml", own / "eval" / "suites" / "mine.yaml")
    assert Suite.load("mine", own).name == "mine"


def test_an_unmarked_folder_takes_nothing_from_the_installation(tmp_path):
    (tmp_path / "experiments").mkdir()
    assert variant.names(tmp_path) == []
    with pytest.raises(variant.ConfigError, match="there is no variant 'tiny'"):
        variant.load("tiny", tmp_path)


def test_only_variants_with_a_folder_here_are_listed(own):
    assert variant.local_names(own) == []
    assert "tiny-best" in variant.names(own)
    (own / "experiments" / "tiny").mkdir()
    assert variant.local_names(own) == ["tiny"]
    records = collect(own)
    assert (list(records.measurements), records.problems) == (["tiny"], ())
    assert records.measurements["tiny"].records == ()


def test_own_variants_are_those_of_the_workspace(own):
    (own / "experiments" / "mine").mkdir()
    (own / "experiments" / "mine" / "config.env").write_text("BASE=tiny\n")
    (own / "experiments" / "tiny").mkdir()
    assert provenance.own_variants(own) == {"mine"}
    assert provenance.shipped_variants(own) == []


def test_a_record_names_files_from_the_top_of_either_and_both_commits(own):
    shipped, mine = CHECKOUT / "eval" / "gates" / "tinyworld.yaml", own / "corpora" / "mine.jsonl"
    assert provenance.portable([str(shipped), str(mine), "/etc/passwd"], own) == [
        "eval/gates/tinyworld.yaml",
        "corpora/mine.jsonl",
        ".../passwd",
    ]
    block = provenance.circumstances(own, ["slimqwen", "gate"], provenance.utc_now())
    assert block.git == git_state(CHECKOUT)
    assert block.workspace is not None
    assert block.workspace.commit is None
    git = ["git", "-C", str(own), "-c", "user.name=a", "-c", "user.email=a@b"]
    for arguments in (["init", "-q"], ["add", "."], ["commit", "-qm", "first"]):
        subprocess.run([*git, *arguments], check=True)
    block = provenance.circumstances(own, ["slimqwen", "gate"], provenance.utc_now())
    head = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout
    assert block.workspace is not None
    assert (block.workspace.commit, block.workspace.dirty) == (head.strip(), False)
    assert provenance.circumstances(CHECKOUT, ["slimqwen"], provenance.utc_now()).workspace is None


def test_a_workspace_keeps_what_the_folder_has(tmp_path):
    (tmp_path / "README.md").write_text("mine\n")
    written = create_workspace(tmp_path)
    assert (tmp_path / "README.md").read_text() == "mine\n"
    assert tmp_path / "README.md" not in written
    with pytest.raises(WorkspaceError, match=r"is a workspace already$|is a workspace already; "):
        create_workspace(tmp_path)
    with pytest.raises(WorkspaceError, match=r"lies in .*, which is a workspace already"):
        create_workspace(tmp_path / "inner")
    assert not (tmp_path / "inner").exists()


def test_git_would_commit_what_a_person_wrote_and_nothing_else(own):
    subprocess.run(["git", "init", "-q", str(own)], check=True)
    for made in (
        "weights/store/x/a",
        "logs/a.log",
        ".cache/a",
        "report/index.html",
        "experiments/mine/config.env",
    ):
        (own / made).parent.mkdir(parents=True, exist_ok=True)
        (own / made).write_text("x\n")
    shown = subprocess.run(
        ["git", "-C", str(own), "status", "--porcelain", "-uall"], capture_output=True, text=True, check=True
    ).stdout
    assert {line[3:] for line in shown.splitlines()} == {
        ".gitattributes", ".gitignore", ".slimqwen", "Makefile", "README.md", "corpora/.gitkeep", "eval/own/.gitkeep",
        "experiments/.gitkeep", "experiments/mine/config.env",
    }  # fmt: skip


def test_the_makefile_has_the_verbs_of_the_checkouts_and_nothing_of_its_environment(own):
    text = (own / "Makefile").read_text()
    assert ".venv" not in text
    assert "READY" not in text
    targets = set(re.findall(r"^([a-z-]+):", text, re.MULTILINE))
    assert {"serve", "recipe", "gate", "eval-quality", "eval-latency", "report", "optimise"} <= targets
    assert targets.isdisjoint({"install", "test", "lint", "pack", "package"})
    command = ["make", "-n", "--no-print-directory", "gate", "VARIANT=mine"]
    planned = subprocess.run(command, cwd=own, capture_output=True, text=True, check=True).stdout
    assert planned.strip() == "slimqwen gate --variant mine"


def test_an_installed_package_is_repaired_by_its_own_command(monkeypatch):
    assert workspace.name_installer("x; run `make install`") == "x; run `make install`"
    monkeypatch.setattr(workspace, "installation_root", lambda: Path("/x/slimqwen/shipped"))
    assert workspace.name_installer("x; run `make install`") == "x; run `slimqwen install`"
    assert (
        workspace.name_installer("`make install PLATFORM=cuda` or") == "`slimqwen install --platform cuda` or"
    )
    assert workspace.name_installer("`make install EXTRAS=ray`") == "`slimqwen install --extras ray`"


def test_tasks_whose_data_the_workspace_lacks_read_that_of_the_installation(own):
    suite = Suite.load("tinyworld", own)
    config = {"dataset_kwargs": {"data_files": {"test": "eval/tasks/tinyworld/facts.jsonl"}, "field": "a"}}
    here = str(CHECKOUT / "eval" / "tasks" / "tinyworld" / "facts.jsonl")
    assert lm_eval_run._locate_data(config, own) == {
        "dataset_kwargs": {"data_files": {"test": here}, "field": "a"}
    }
    assert lm_eval_run._locate_data(config, CHECKOUT) == {}
    assert lm_eval_run._locate_data({}, own) == {}
    with contextlib.chdir(own):
        manager = lm_eval_run._task_manager(suite, own)
        (task, *_) = suite.tasks
        loaded = lm_eval_run._load_tasks(manager, suite, task, own)
    (only,) = loaded.values()
    assert len(only.eval_docs) == 1000


def test_hashes_of_what_is_installed_are_kept_in_the_users_cache(tmp_path, monkeypatch):
    shipped = tmp_path / "slimqwen" / "shipped"
    monkeypatch.setattr(workspace, "installation_root", lambda: shipped)
    monkeypatch.setattr(hashes, "installation_root", lambda: shipped)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    weights = shipped / "weights" / "tiny"
    shutil.copytree(CHECKOUT / "weights" / "tiny", weights)
    before = sorted(path.name for path in weights.iterdir())
    checkpoint.digest(weights)
    assert sorted(path.name for path in weights.iterdir()) == before
    assert list((tmp_path / "cache").rglob("*.json"))
