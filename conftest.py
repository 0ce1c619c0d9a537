"""Starts pytest anew in a copy of the files that git tracks; tests/conftest.py has the fixtures."""

import pytest

from tests import tracked_copy


def pytest_addoption(pluginmanager: pytest.PytestPluginManager) -> None:
    """Runs as soon as this file is loaded: before tests/conftest.py is, and before xdist starts its workers."""
    config = pluginmanager.getplugin("pytestconfig")
    if not tracked_copy.is_here(config.rootpath):
        pluginmanager.getplugin("capturemanager").stop_global_capturing()
        tracked_copy.start_again(config.rootpath, config.invocation_params.args)
