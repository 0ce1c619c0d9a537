"""What git says of a checkout, and what it never does for it."""

import os
import subprocess

import pytest

from slimqwen.records.git import git_state


def test_a_fresh_record_does_not_make_the_tree_dirty(repository):
    clean = git_state(repository)
    assert len(clean.commit) == 40
    (repository / "experiments" / "tiny").mkdir(parents=True)
    (repository / "experiments" / "tiny" / "quality_2026-01-01T000000Z.json").write_text("{}")
    (repository / "experiments" / "tiny" / "quality_2026-01-01T000000Z.items.jsonl").write_text("{}")
    (repository / "README.md").write_text("a table")
    assert clean.dirty is False
    assert git_state(repository) == clean


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a checkout to another user")
def test_a_checkout_of_another_user_has_its_commit(repository):
    mine = git_state(repository)
    os.chown(repository, 54321, 54321)
    os.chown(repository / ".git", 54321, 54321)
    assert git_state(repository) == mine


@pytest.mark.parametrize("change", ["code.py", "new.py", "experiments/tiny/config.env"])
def test_changed_code_makes_the_tree_dirty(repository, change):
    (repository / change).parent.mkdir(parents=True, exist_ok=True)
    (repository / change).write_text("2\n")
    assert git_state(repository).dirty is True


UNKNOWN = {"commit": None, "dirty": None}


def test_outside_a_checkout_the_commit_is_unknown(tmp_path):
    assert git_state(tmp_path).as_json() == UNKNOWN


def test_without_git_the_commit_is_unknown(repository, monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    assert git_state(repository).as_json() == UNKNOWN


def test_a_copy_inside_another_repository_has_not_its_commit(repository):
    (repository / "archive").mkdir()
    assert git_state(repository / "archive").as_json() == UNKNOWN


@pytest.mark.parametrize("variable", ["GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_OBJECT_DIRECTORY"])
def test_a_hook_of_another_repository_changes_nothing(repository, monkeypatch, variable):
    own = git_state(repository)
    monkeypatch.setenv(variable, "/another/repository")
    assert git_state(repository) == own


def test_a_linked_worktree_has_the_commit_that_it_shows(repository, tmp_path_factory):
    linked = tmp_path_factory.mktemp("linked") / "worktree"
    subprocess.run(["git", "-C", repository, "worktree", "add", linked], check=True, capture_output=True)
    assert git_state(linked) == git_state(repository)


@pytest.mark.parametrize("setting", ["core.fsmonitor", "core.hooksPath"])
def test_a_program_that_the_repository_names_is_not_run(repository, tmp_path_factory, setting):
    folder = tmp_path_factory.mktemp("programs")
    for name in ("program", "post-index-change"):
        (folder / name).write_text(f"#!/bin/sh\ntouch {folder}/ran\n")
        (folder / name).chmod(0o755)
    value = folder / "program" if setting == "core.fsmonitor" else folder
    subprocess.run(["git", "-C", repository, "config", setting, value], check=True)
    (repository / "code.py").touch()
    assert git_state(repository).commit
    assert not (folder / "ran").exists()
    subprocess.run(["git", "-C", repository, "status"], check=True, capture_output=True)
    assert (folder / "ran").exists()  # a plain git runs it
