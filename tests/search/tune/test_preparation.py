"""Arms that are refused before a server starts."""

import pytest

from slimqwen import variant
from slimqwen.plan import start
from slimqwen.search.tune import preparation
from slimqwen.search.tune.arms import Arm
from slimqwen.serving.checks import Trouble
from slimqwen.serving.command import ServerCommand
from slimqwen.serving.errors import ServingError


def test_without_a_plan_an_arm_is_refused_for_the_known_trouble_of_its_flags(monkeypatch):
    trouble = Trouble("would give other tokens", "no drafts", "a record")
    monkeypatch.setattr(start, "match_flag_trouble", lambda command: start.StartTrouble((trouble,), ()))
    command = ServerCommand.resolve(variant.load("tiny"), platform="cpu")
    with pytest.raises(ServingError, match="would give other tokens"):
        preparation._refuse(Arm(None), None, command)
