"""From a name on a hub to a served variant; what a hub refuses, and what is left of a download, are one line."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from slimqwen import checkpoint, variant
from slimqwen.checkpoint.files import carry_all
from tests import hub_server
from tests.checkpoints import TINY
from tests.cli.conftest import run_on_one_line
from tests.cli.optimise_steps import Steps, make_root
from tests.hub_server import COMMIT, TOKEN, Hub


@pytest.fixture
def steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Steps:
    made = Steps(make_root(tmp_path / "repository", monkeypatch))
    made.install(monkeypatch)
    return made


@pytest.fixture
def hub(tmp_path: Path, steps: Steps, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub that has the small model as owner/name."""
    (tmp_path / "hub").mkdir()
    carry_all(TINY, tmp_path / "hub")
    yield from hub_server.running(tmp_path / "hub", monkeypatch)


def optimise(model: str, options: str = "--yes --evaluation tinyworld") -> tuple[int, str]:
    return run_on_one_line(f"optimise {model} {options}")


def test_a_name_on_a_hub_becomes_a_served_variant(hub: Hub, steps: Steps) -> None:
    code, said = optimise("owner/name")
    assert code == 0, said
    assert "serve: `slimqwen serve name-optimised-" in said
    base = variant.load("name")
    assert (base.settings["SOURCE"].value, base.settings["REVISION"].value) == ("owner/name", COMMIT)
    hub.requests.clear()
    assert optimise("owner/name")[0] == 0
    assert hub.requests == []


def test_a_gated_repository_names_its_terms_and_the_same_command(
    hub: Hub, steps: Steps, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.gated = True
    code, said = optimise("owner/name")
    assert code == 3, said
    assert f"error: owner/name is gated: accept its terms at {hub.endpoint}/owner/name, then set HF_" in said
    assert said.endswith("and run `slimqwen optimise owner/name`")
    assert "name" not in variant.names()
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert optimise("owner/name")[0] == 0


def test_a_repository_that_moved_is_found_under_its_former_name(hub: Hub, steps: Steps) -> None:
    hub.moved = "owner/former"
    assert optimise("owner/former")[0] == 0
    assert variant.load("former").settings["REVISION"].value == COMMIT


def test_a_repository_that_is_not_there_is_one_line(hub: Hub, steps: Steps) -> None:
    code, said = optimise("owner/other")
    assert code == 3, said
    assert f"{hub.endpoint} has no owner/other at main, or hides it; correct MODEL, or set HF_TOKEN" in said


def test_what_is_left_of_a_download_goes_on(hub: Hub, steps: Steps) -> None:
    half = steps.root / "weights" / ".download-name" / COMMIT / "model.safetensors"
    half.parent.mkdir(parents=True)
    half.write_bytes((hub.folder / half.name).read_bytes()[:100_000])
    assert optimise("owner/name")[0] == 0
    assert ("model.safetensors", "bytes=100000-") in hub.fetched()
    checkpoint.check_folder(steps.root / "weights" / "name", "")


def test_a_download_is_asked_for_with_its_size(hub: Hub, steps: Steps) -> None:
    code, said = optimise("owner/name", "--disk 0.001 --yes")
    assert (code, said) == (3, "error: owner/name has 0.01 GB, more than --disk 0.001; raise --disk")
    code, said = optimise("owner/name", "--evaluation tinyworld")
    assert (code, hub.fetched()) == (1, [])
    assert "name" not in variant.names()


def test_download_and_recipe_together_stay_within_the_disk(hub: Hub, steps: Steps) -> None:
    code, said = optimise("owner/name", "--disk 0.02 --yes --evaluation tinyworld")
    assert code == 3, said
    assert re.search(
        r"the recipe takes 0\.\d GB beside 0\.01 GB of download, more than --disk 0\.02; raise", said
    )
