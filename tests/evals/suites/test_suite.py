"""Suites as their files state them."""

import json
from pathlib import Path

import pytest

from slimqwen.evals.suites.suite import Suite
from slimqwen.records.settings import SettingsError
from slimqwen.variant import repository_root


def test_the_suites_of_the_repository_are_readable():
    files = list((repository_root() / "eval" / "suites").glob("*.yaml"))
    assert files
    for file in files:
        suite = Suite.load(file.stem, repository_root())
        assert suite.tasks
        assert all(task.items_to_decide for task in suite.tasks)


def test_tasks_without_data_are_left_out_by_name(tmp_path: Path) -> None:
    (tmp_path / "eval/suites").mkdir(parents=True)
    (tmp_path / "eval/suites/general.yaml").write_text(
        (repository_root() / "eval/suites/general.yaml").read_text()
    )
    suite = Suite.load("general", tmp_path)

    assert [task.name for task in suite.tasks] == ["general_repeat", "general_loops"]
    assert suite.describe_left_out() == (
        "left out, for the data are not here: general_wikitext, general_blimp, general_cloze; `slimqwen download "
        "--suite general` fetches them, with --data FOLDER from a folder of yours"
    )


@pytest.mark.parametrize(
    ("later", "fault"),
    [
        ({"measure": "ended"}, "loops: measure ended needs responses_of"),
        ({"measure": "ended", "responses_of": "loops"}, "with the name of an earlier task"),
        ({"measure": "exact_match", "responses_of": "chats"}, "loops: measure ended needs responses_of"),
    ],
)
def test_a_task_that_scores_no_earlier_responses_is_refused(tmp_path, later, fault):
    folder = tmp_path / "eval" / "suites"
    folder.mkdir(parents=True)
    tasks = [{"task": "chats", "measure": "exact_match"}, {"task": "loops", **later}]
    content = {
        "chat_template": True,
        "sample": "first",
        "tasks": [t | {"non_inferiority_margin": 0.1} for t in tasks],
    }
    (folder / "odd.yaml").write_text(json.dumps(content))
    with pytest.raises(SettingsError, match=rf"eval/suites/odd\.yaml:1: .*{fault}"):
        Suite.load("odd", tmp_path)
