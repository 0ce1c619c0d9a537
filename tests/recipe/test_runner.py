"""A stage runs once per content key; what it made is whole, shared and explained, whatever kills the run."""

import errno
import fcntl
import importlib.metadata
import itertools
import os
import platform
import random
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from slimqwen import checkpoint
from slimqwen.checkpoint import CorruptCheckpointError, Manifest, MissingCheckpointError
from slimqwen.checkpoint.files import bytes_on_disk, file_records
from slimqwen.identity import source
from slimqwen.recipe import runner
from slimqwen.recipe.recipe_file import RecipeError
from tests.recipe import fake_stages
from tests.recipe.drive import start_run
from tests.recipe.fake_stages import STAGES, RefusedError
from tests.recipe.workshop import Workshop, first_byte


def test_a_recipe_ends_in_a_relative_link_to_the_output_of_its_last_stage(workshop: Workshop) -> None:
    outcomes = workshop.run(workshop.recipe(workshop.add(1), workshop.add(2)))
    link = workshop.weights / "v"
    assert link.readlink() == Path("store") / outcomes[-1].folder.name
    assert first_byte(link) == 3
    assert [outcome.reused for outcome in outcomes] == [False, False]


def test_the_manifest_says_key_ingredients_files_time_and_memory(workshop: Workshop) -> None:
    [outcome] = workshop.run(workshop.recipe(workshop.add(7)))
    manifest = outcome.manifest
    assert manifest.key == outcome.folder.name
    assert manifest.ingredients["input"] == checkpoint.digest(workshop.base)
    assert manifest.ingredients["parameters.amount"] == "7"
    assert manifest.files == file_records(outcome.folder)
    assert manifest.facts == {"amount": 7}
    assert manifest.versions["python"] == platform.python_version()
    assert manifest.versions["pydantic"] == importlib.metadata.version("pydantic")
    assert 2**20 < manifest.peak_memory_bytes < 2**30
    assert manifest.wall_seconds > 0
    assert outcome.bytes_before == outcome.bytes_after == bytes_on_disk(workshop.base)


def test_what_a_stage_prints_goes_to_its_log(workshop: Workshop, capfd: pytest.CaptureFixture[str]) -> None:
    [outcome] = workshop.run(workshop.recipe(workshop.add(5)))
    assert "adding 5" in outcome.log.read_text()
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("until", [2, None])
def test_progress_names_the_stage_and_how_many_there_are(workshop: Workshop, until: int | None) -> None:
    messages: list[tuple[str, float, float]] = []
    recipe = workshop.recipe(workshop.add(1), workshop.add(2), workshop.add(3))
    workshop.run(recipe, stages=until, progress=lambda *message: messages.append(message))
    ended = [name for name, done, total in messages if "writing" in name and done == total]
    stages = until or 3
    assert ended == [f"add ({number} of {stages}): writing tensors" for number in range(1, stages + 1)]


def test_a_second_run_does_nothing(workshop: Workshop) -> None:
    recipe = workshop.recipe(workshop.add(1), workshop.add(2))
    first = workshop.run(recipe)
    second = workshop.run(recipe)
    assert [outcome.reused for outcome in second] == [True, True]
    assert [outcome.manifest for outcome in second] == [outcome.manifest for outcome in first]
    assert workshop.amounts_run() == [1, 2]


def test_a_changed_parameter_runs_its_stage_and_what_follows(workshop: Workshop) -> None:
    workshop.run(workshop.recipe(workshop.add(1), workshop.add(2), workshop.add(3)))
    workshop.run(workshop.recipe(workshop.add(1), workshop.add(5), workshop.add(3)))
    assert workshop.amounts_run() == [1, 2, 3, 5, 3]


def test_variants_share_the_stages_they_have_in_common(workshop: Workshop) -> None:
    one = workshop.run(workshop.recipe(workshop.add(1), workshop.add(2), variant="one"), "one")
    two = workshop.run(workshop.recipe(workshop.add(1), workshop.add(9), variant="two"), "two")
    assert two[0].folder == one[0].folder
    assert workshop.amounts_run() == [1, 2, 9]


def test_a_stage_whose_input_came_out_the_same_is_reused(workshop: Workshop) -> None:
    workshop.run(workshop.recipe(workshop.add(1), workshop.add(2)))
    outcomes = workshop.run(workshop.recipe(workshop.add(1, note="other words"), workshop.add(2)))
    assert [outcome.reused for outcome in outcomes] == [False, True]


def test_a_run_until_a_stage_makes_no_link(workshop: Workshop) -> None:
    recipe = workshop.recipe(workshop.add(1), "refuse")
    [outcome] = workshop.run(recipe, stages=1)
    assert outcome.folder.is_dir()
    assert not (workshop.weights / "v").is_symlink()


def test_a_checkpoint_that_lacks_a_cache_alone_is_linked_unless_the_link_answers_as_it_does(
    workshop: Workshop,
) -> None:
    link, bake = workshop.weights / "v", {"bake": {"archive": "x"}}
    [unbaked] = workshop.run(workshop.recipe(workshop.add(1), bake), stages=1)
    assert link.resolve() == unbaked.folder
    [_, baked] = workshop.run(workshop.recipe(workshop.add(1), bake))
    assert link.resolve() == baked.folder
    workshop.run(workshop.recipe(workshop.add(1), bake), stages=1)
    assert link.resolve() == baked.folder
    [changed] = workshop.run(workshop.recipe(workshop.add(2), bake), stages=1)
    assert link.resolve() == changed.folder


def test_a_name_taken_by_a_folder_is_left_alone(workshop: Workshop) -> None:
    (workshop.weights / "v").mkdir()
    with pytest.raises(RecipeError, match="weights/v"):
        workshop.run(workshop.recipe(workshop.add(1)))
    assert workshop.amounts_run() == []


def test_a_missing_base_leaves_nothing_behind(workshop: Workshop) -> None:
    recipe = workshop.recipe(workshop.add(1))

    def resolve(base: str) -> Path:
        raise MissingCheckpointError(f"no checkpoint in {base}; make it")

    before = workshop.visible()
    with pytest.raises(MissingCheckpointError, match="no checkpoint in base; make it"):
        runner.run_recipe(recipe, "v", workshop.weights, resolve)
    assert workshop.visible() == before
    assert not (workshop.weights / "store").exists()


# --- keys


@pytest.fixture
def edited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The module of a stage `edited`."""
    file = tmp_path / "modules" / "edited.py"
    file.parent.mkdir()
    file.write_text(Path(fake_stages.__file__).read_text())
    monkeypatch.syspath_prepend(file.parent)
    run = importlib.import_module(file.stem).add
    monkeypatch.setitem(STAGES, file.stem, replace(STAGES["add"], name=file.stem, run=run))
    yield file
    del sys.modules[file.stem]


@pytest.mark.parametrize(
    "ingredient", ["input", "parameters.limit", "data.file", "environment.X", "code.edited", "version.torch"]
)
def test_every_ingredient_changes_the_key(
    workshop: Workshop, edited: Path, monkeypatch: pytest.MonkeyPatch, ingredient: str
) -> None:
    data = workshop.root / "data.txt"
    data.write_text("data")
    parameters = {"amount": 1, "data": str(data)}
    real_version = source._version

    def forecast() -> runner.StageForecast:
        return workshop.status(workshop.recipe({"edited": parameters}))[0]

    before = workshop.run(workshop.recipe({"edited": parameters}))[0].manifest.key
    assert (forecast().key, forecast().reused) == (before, True)
    change = {
        "input": lambda: (workshop.base / "tokenizer.json").write_text("[]"),
        "parameters.limit": lambda: parameters.update(limit=254),
        "data.file": lambda: data.write_text("Data"),
        "environment.X": lambda: STAGES.update(edited=replace(STAGES["edited"], environment={"X": "1"})),
        "code.edited": lambda: edited.write_text(edited.read_text().replace("adding", "now adding")),
        "version.torch": lambda: monkeypatch.setattr(
            source, "_version", lambda name: "99" if name == "torch" else real_version(name)
        ),
    }
    change[ingredient]()
    after = forecast()
    assert (after.key != before, after.reused) == (True, False)
    assert [change.ingredient for change in after.changes] == [ingredient]
    assert ingredient in after.reason
    assert after.is_upgrade == ingredient.startswith(("code.", "version."))


def test_an_output_of_an_earlier_version_is_made_anew_and_said(workshop: Workshop) -> None:
    recipe = workshop.recipe(workshop.add(1))
    [outcome] = workshop.run(recipe)
    earlier = outcome.folder.with_name("e" * 64)
    outcome.folder.rename(earlier)
    manifest = Manifest.read(earlier)
    left = {name: value for name, value in manifest.ingredients.items() if name != "scheme"}
    manifest.model_copy(update={"ingredients": left, "key": earlier.name}).write(earlier)
    [forecast] = workshop.status(recipe)
    assert (forecast.reason, forecast.is_upgrade) == ("its output has a key of an earlier version", True)
    assert [each.outdated for each in workshop.run(recipe)] == [True]
    assert [each.outdated for each in workshop.run(recipe)] == [False]
    assert runner.clean_store(workshop.weights, keep=[]) > 0
    assert workshop.entries() == [outcome.folder.name]


def test_where_a_data_file_lies_does_not_change_the_key(workshop: Workshop) -> None:
    keys = set()
    for name in ("here.txt", "there.txt"):
        (workshop.root / name).write_text("the same")
        keys.add(workshop.status(workshop.recipe(workshop.add(1, data=str(workshop.root / name))))[0].key)
    assert len(keys) == 1


# --- status


def test_status_foretells_what_a_run_then_does(workshop: Workshop) -> None:
    recipe = workshop.recipe(workshop.add(1), workshop.add(2))
    before = workshop.status(recipe)
    assert [(forecast.reused, forecast.reason) for forecast in before] == [
        (False, "never run"),
        (False, "its input will be made first"),
    ]
    outcomes = workshop.run(recipe)
    after = workshop.status(recipe)
    assert [forecast.reused for forecast in after] == [True, True]
    assert [forecast.key for forecast in after] == [outcome.folder.name for outcome in outcomes]


def test_status_shows_the_change_against_the_nearest_entry(workshop: Workshop) -> None:
    workshop.run(workshop.recipe(workshop.add(1, limit=100)))
    workshop.run(workshop.recipe(workshop.add(2, limit=200)))
    [forecast] = workshop.status(workshop.recipe(workshop.add(3, limit=200)))
    assert forecast.changes == (runner.IngredientChange("parameters.amount", "2", "3"),)


# --- failures


def test_what_a_later_stage_says_of_the_base_is_said_before_an_earlier_one_works(workshop: Workshop) -> None:
    with pytest.raises(RecipeError, match=r"v\.yaml:1: refuse_unseen: the output of add has no wings"):
        workshop.run(workshop.recipe(workshop.add(1), "refuse_unseen"))
    assert workshop.amounts_run() == []


@pytest.mark.parametrize(
    ("stage", "error", "message"),
    [
        ("refuse", RefusedError, "the input has no wings; choose one with wings"),
        (
            "break_down",
            RecipeError,
            r"break_down failed: No space left on device; free some disk space; read more in its log",
        ),
        (
            "lack",
            RecipeError,
            "lack failed: .*No module named 'no_such_package'; run `make install`; read more in",
        ),
        ("die", RecipeError, r"die died \(SIGKILL, as when memory runs out\); read why in its log"),
        ("forget", CorruptCheckpointError, r'has no "architectures"; the stage forget is defective'),
    ],
)
def test_a_failed_stage_leaves_the_store_as_it_was(
    workshop: Workshop, stage: str, error: type[Exception], message: str
) -> None:
    workshop.run(workshop.recipe(workshop.add(1)))
    before = workshop.visible()
    with pytest.raises(error, match=message):
        workshop.run(workshop.recipe(workshop.add(1), stage))
    assert workshop.visible() == before
    assert list((workshop.weights / "store" / ".staging").iterdir()) == []


@pytest.mark.parametrize(("stage", "what"), [("endless_disk", "disk"), ("endless_memory", "memory")])
def test_a_stage_that_cannot_fit_is_refused_before_it_starts(
    workshop: Workshop, stage: str, what: str
) -> None:
    with pytest.raises(RecipeError, match=rf"{stage} needs about .* GiB of {what}"):
        workshop.run(workshop.recipe({stage: {"runs": str(workshop.runs)}}))
    assert workshop.amounts_run() == []


def test_a_damaged_store_entry_is_an_error_with_the_cure(workshop: Workshop) -> None:
    recipe = workshop.recipe(workshop.add(1))
    [outcome] = workshop.run(recipe)
    shard = outcome.folder / "model.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(
        CorruptCheckpointError, match=r"cut short.*; delete that folder and run the recipe again"
    ):
        workshop.run(recipe)


# --- clean


def test_cleaning_keeps_what_links_need_and_the_given_keys(workshop: Workshop) -> None:
    linked = workshop.run(workshop.recipe(workshop.add(1), workshop.add(2)))
    [kept] = workshop.run(workshop.recipe(workshop.add(3), variant="k"), "k")
    [dropped] = workshop.run(workshop.recipe(workshop.add(4), variant="d"), "d")
    for name in ("k", "d"):
        (workshop.weights / name).unlink()
    freed = runner.clean_store(workshop.weights, keep=[kept.folder.name, "no such key"])
    assert freed == dropped.bytes_after
    assert workshop.entries() == sorted(outcome.folder.name for outcome in (*linked, kept))
    assert not dropped.log.exists()


def test_cleaning_distinguishes_entries_of_one_digest(workshop: Workshop) -> None:
    """A stage may change nothing, and a compile cache does not enter the checkpoint digest."""
    stages = [workshop.add(1), workshop.add(0)]
    used = workshop.run(workshop.recipe(*stages, {"bake": {"archive": "this time"}}))
    [*_, dropped] = workshop.run(
        workshop.recipe(*stages, {"bake": {"archive": "another time"}}, variant="d"), "d"
    )
    (workshop.weights / "d").unlink()
    assert len({checkpoint.digest(outcome.folder) for outcome in (*used, dropped)}) == 1
    assert runner.clean_store(workshop.weights, keep=[]) == dropped.bytes_after
    assert workshop.entries() == sorted(outcome.folder.name for outcome in used)


def test_cleaning_waits_for_no_running_recipe(workshop: Workshop) -> None:
    workshop.run(workshop.recipe(workshop.add(1)))
    with (workshop.weights / "store" / ".lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_SH)
        with pytest.raises(RecipeError, match="a recipe is running"):
            runner.clean_store(workshop.weights, keep=[])


def test_a_file_system_without_symbolic_links_is_refused_before_the_first_stage(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    def symlink(*_: object, **__: object) -> None:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    recipe = workshop.recipe(workshop.add(1))
    with monkeypatch.context() as patched:
        patched.setattr(os, "symlink", symlink)
        with pytest.raises(RecipeError, match=r"takes no symbolic link .*; make that folder writable"):
            workshop.run(recipe)
    assert not (workshop.weights / "store").exists()


def test_cleaning_without_a_store_frees_nothing(tmp_path: Path) -> None:
    assert runner.clean_store(tmp_path, keep=[]) == 0


# --- several processes


def test_two_runs_at_once_make_each_stage_once(workshop: Workshop) -> None:
    for variant in ("one", "two"):
        workshop.recipe(workshop.add(1, seconds=0.5), workshop.add(2), variant=variant)
    processes = [start_run(workshop, variant) for variant in ("one", "two", "one")]
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 0, 0]
    assert sorted(workshop.amounts_run()) == [1, 2]
    assert first_byte(workshop.weights / "one") == first_byte(workshop.weights / "two") == 3


def test_a_run_killed_at_any_instant_resumes_to_the_same_bytes(tmp_path: Path) -> None:
    def fresh(name: str) -> Workshop:
        workshop = Workshop(tmp_path / name)
        workshop.recipe(*[workshop.add(amount, seconds=0.1) for amount in (1, 2)])
        return workshop

    def finish(workshop: Workshop) -> None:
        process = start_run(workshop, "v")
        process.join()
        assert process.exitcode == 0

    finish(fresh("warm-up"))
    whole = fresh("whole")
    started = time.monotonic()
    finish(whole)
    duration = time.monotonic() - started
    rng = random.Random(0)
    cut_short = 0
    attempts = itertools.count()
    while cut_short < 5:
        instant = next(attempts)
        assert instant < 60
        workshop = fresh(f"killed-{instant}")
        process = start_run(workshop, "v")
        time.sleep(rng.uniform(0.1, 1) * duration)
        process.kill()
        process.join()
        for key in workshop.entries():
            folder = workshop.weights / "store" / key
            assert Manifest.read(folder).files == file_records(folder)
        link = workshop.weights / "v"
        assert link.is_dir() or not os.path.lexists(link)
        cut_short += not link.is_dir()
        if link.is_dir():  # the first run was slower than those that follow it
            duration *= 0.8
        finish(workshop)
        assert checkpoint.digest(workshop.weights / "v") == checkpoint.digest(whole.weights / "v")
        assert [entry.name for entry in (workshop.weights / "store" / ".staging").iterdir()] == []


def test_a_stage_ends_with_the_run_that_wants_its_result(workshop: Workshop) -> None:
    workshop.recipe(workshop.add(1, seconds=600))
    process = start_run(workshop, "v")
    while not workshop.amounts_run():
        assert process.is_alive()
        time.sleep(0.02)
    [worker] = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    process.kill()
    process.join()
    deadline = time.monotonic() + 30
    while Path(f"/proc/{worker}").exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_the_recipe_key_is_that_of_what_the_recipe_says_whatever_bytes_came_of_it(workshop: Workshop) -> None:
    """`limit` plays another kind of CPU: a stage that leaves other bytes, so that the next stage has another key."""
    steps = workshop.add(2), workshop.add(3)
    first = workshop.run(workshop.recipe(*steps))
    entry = first[0].folder
    for file in entry.glob("*.safetensors"):
        file.write_bytes(file.read_bytes()[:-1] + b"\xff")
    first[0].manifest.model_copy(update={"files": file_records(entry)}).write(entry)
    other = workshop.run(workshop.recipe(*steps))
    assert other[1].manifest.key != first[1].manifest.key
    assert (
        other[1].manifest.recipe_key
        == first[1].manifest.recipe_key
        == checkpoint.recipe_key(workshop.weights / "v")
    )


def test_another_parameter_base_or_number_of_stages_is_another_recipe(workshop: Workshop) -> None:
    recipes = [
        workshop.recipe(workshop.add(2), workshop.add(3)),
        workshop.recipe(workshop.add(2), workshop.add(4)),
        workshop.recipe(workshop.add(3), workshop.add(2)),
        workshop.recipe(workshop.add(2)),
    ]
    keys = [workshop.run(recipe)[-1].manifest.recipe_key for recipe in recipes]
    assert len({*keys}) == len(keys)


def test_a_checkpoint_that_was_changed_by_hand_has_no_recipe(workshop: Workshop) -> None:
    [made] = workshop.run(workshop.recipe(workshop.add(2)))
    (made.folder / "tokenizer.json").write_text('{"of": "mine"}')
    assert checkpoint.recipe_key(made.folder) is None
