import errno
import hashlib
import json
import os
import threading
from datetime import UTC, datetime

import pytest

from slimqwen import variant
from slimqwen.bench.start_up import StartUp
from slimqwen.evals.quality import Quality
from slimqwen.records import store
from tests.record_files import host_load, record_of, write

ITEMS = [{"task": "example_facts", "index": n, "item": str(n), "value": float(n % 2)} for n in range(4)]
ROOT = variant.repository_root()


@pytest.fixture
def one_moment(monkeypatch):
    monkeypatch.setattr(store, "_stamp", lambda: "2026-01-01T000000Z")


@pytest.fixture
def result():
    """Changes -> a record without items."""
    template = store.read_record(store.latest(ROOT / "experiments" / "tiny-best", StartUp))

    def make(**changes):
        return template.model_copy(update={"variant": "tiny", **changes})

    return make


def test_a_record_beside_items_is_named_by_its_kind_and_the_utc_time_of_writing(tmp_path, quality):
    before = datetime.now(UTC).replace(microsecond=0)
    path = write(tmp_path / "tiny", quality, ITEMS)
    kind, _, stamp = path.stem.partition("_")
    assert kind == "quality"
    assert before <= datetime.strptime(f"{stamp}+0000", "%Y-%m-%dT%H%M%SZ%z") <= datetime.now(UTC)


def test_a_record_comes_back_with_its_items(tmp_path, quality):
    path = write(tmp_path / "experiments" / "tiny", quality, ITEMS)
    record = store.read_record(path, Quality)
    assert {name: value for name, value in record.as_json().items() if name != "items"} == quality
    assert store.read_items(path) == ITEMS
    assert sorted(file.name for file in path.parent.iterdir()) == [record.items.file, path.name]


@pytest.mark.parametrize("items", [[], [{"value": float("nan")}]])
def test_items_that_are_none_or_no_json_leave_nothing(tmp_path, quality, items):
    with pytest.raises((store.RecordError, ValueError), match=r"no items|JSON compliant"):
        write(tmp_path / "tiny", quality, items)
    assert not (tmp_path / "tiny").exists()


def test_a_record_that_breaks_its_schema_is_not_written(tmp_path, quality):
    broken = record_of(quality).model_copy(update={"suite": ""})
    with pytest.raises(store.RecordError, match="suite"):
        store.write_record(tmp_path / "tiny", broken, ITEMS)
    assert not (tmp_path / "tiny").exists()


@pytest.fixture(params=["hard links", "no hard links"])
def file_system(request, monkeypatch):
    def link(*_):
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    if request.param == "no hard links":
        monkeypatch.setattr(os, "link", link)


@pytest.mark.usefixtures("one_moment", "file_system")
def test_a_record_is_never_overwritten(tmp_path, quality):
    path = write(tmp_path, quality, ITEMS)
    before = {file: file.read_bytes() for file in tmp_path.iterdir()}
    with pytest.raises(store.RecordError, match="never overwritten"):
        write(tmp_path, {**quality, "limit": 3}, ITEMS[:3])
    assert {file: file.read_bytes() for file in tmp_path.iterdir()} == before
    assert store.read_record(path, Quality).limit == 4


@pytest.mark.usefixtures("one_moment", "file_system")
def test_of_two_writers_at_once_one_wins_whole(tmp_path, quality):
    outcomes = []

    def attempt(limit):
        try:
            outcomes.append(write(tmp_path, {**quality, "limit": limit}, ITEMS[:limit]))
        except store.RecordError as error:
            outcomes.append(error)

    writers = [threading.Thread(target=attempt, args=(limit,)) for limit in (2, 3, 4)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    [path] = [path for path in outcomes if not isinstance(path, Exception)]
    assert len(store.read_items(path)) == store.read_record(path, Quality).limit
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize("fails_at", [0, 1])
def test_a_record_that_cannot_be_written_is_kept_elsewhere_and_leaves_nothing_here(
    tmp_path, quality, monkeypatch, fails_at
):
    real_fsync, calls = os.fsync, []

    def fsync(descriptor):
        calls.append(descriptor)
        if len(calls) == fails_at + 1:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real_fsync(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    folder = tmp_path / "tiny"
    with pytest.raises(store.RecordError, match=r"tiny cannot be written \(No space left") as refusal:
        write(folder, quality, ITEMS)
    assert list(folder.iterdir()) == []
    [kept] = tmp_path.glob("slimqwen-record-*")
    assert str(kept) in str(refusal.value)
    [path] = kept.glob("*.json")
    assert store.read_items(path) == ITEMS


@pytest.mark.usefixtures("stamps")
def test_latest_is_the_newest_that_fits(tmp_path, quality, latency):
    paths = [write(tmp_path, {**quality, "limit": limit}, ITEMS) for limit in (150, 6)]
    write(tmp_path, latency, ITEMS)
    assert store.latest(tmp_path, Quality) == paths[1]
    assert store.latest(tmp_path, Quality, lambda record: record.limit == 150) == paths[0]


@pytest.mark.usefixtures("stamps")
def test_no_record_of_a_busy_host_or_of_a_split_stands_for_a_variant(tmp_path, quality):
    path = write(tmp_path, quality, ITEMS)
    write(tmp_path, quality | {"split": {"side": "proof", "proof_share": 0.5}}, ITEMS)
    quality["provenance"]["host_load"] = host_load(busy=True)
    write(tmp_path, quality, ITEMS)
    assert len(list(store.records(tmp_path, Quality))) == 3
    assert store.latest(tmp_path, Quality) == path


def test_a_missing_record_names_its_command(tmp_path):
    with pytest.raises(store.MissingRecordError, match="`slimqwen eval quality --variant tiny-awq`"):
        store.latest(tmp_path / "tiny-awq", Quality)
    with pytest.raises(store.MissingRecordError, match="`slimqwen bench startup --variant tiny-awq`"):
        store.latest(tmp_path / "tiny-awq", StartUp)


@pytest.mark.usefixtures("stamps")
def test_a_record_without_items_is_one_file_and_the_newest_is_the_latest(tmp_path, result):
    first, second = (store.write_record(tmp_path, result()) for _ in range(2))
    assert [path.name for path in sorted(tmp_path.iterdir())] == [
        "start_up_2026-01-01T000000Z.json",
        "start_up_2026-01-02T000000Z.json",
    ]
    assert store.latest(tmp_path, StartUp) == second
    assert store.records(tmp_path, StartUp) == [second, first]


@pytest.mark.usefixtures("stamps")
@pytest.mark.parametrize(
    ("old", "new"),
    [("start_up/2", "start_up/1"), ("start_up/2", "start_up/3"), ("provenance/3", "provenance/2")],
)
def test_a_record_in_another_version_of_its_schema_hides_itself_alone(tmp_path, result, old, new):
    first, second = (store.write_record(tmp_path, result()) for _ in range(2))
    second.write_text(second.read_text().replace(f'"{old}"', f'"{new}"'))
    assert store.latest(tmp_path, StartUp) == first
    with pytest.raises(store.RecordError, match=new.partition("/")[2]):
        store.read_record(second)


@pytest.mark.usefixtures("stamps")
def test_a_damaged_record_is_not_passed_over(tmp_path, result):
    _, second = (store.write_record(tmp_path, result()) for _ in range(2))
    second.write_text(second.read_text()[:100])
    with pytest.raises(store.RecordError, match="not JSON"):
        store.latest(tmp_path, StartUp)


def test_a_record_of_another_kind_is_refused(tmp_path, result):
    path = store.write_record(tmp_path, result())
    with pytest.raises(store.RecordError, match="start_up/2 is not a record of kind quality"):
        store.read_record(path, Quality)
    with pytest.raises(store.RecordError, match="without items"):
        store.read_items(path)


@pytest.mark.parametrize(
    ("damage", "cause"),
    [
        (lambda path: path.write_text(path.read_text()[:-40]), "not JSON"),
        (lambda path: path.write_text("[]"), "not a JSON object"),
        (lambda path: path.write_text("{}"), "schema None"),
        (lambda path: path.write_bytes(b"\xff\xfe\x00"), "not JSON"),
        (lambda path: path.unlink(), "no such record"),
        (lambda path: path.write_text(json.dumps({"schema": "quality/9"})), "quality/9"),
        (lambda path: path.write_text("{" * 100_000), "not JSON"),
        (lambda path: path.write_text('{"schema": "quality/3", "limit": NaN}'), "NaN is not a number"),
        (
            lambda path: path.write_text(path.read_text().replace('"suite": "', '"suite": "\\ud800', 1)),
            "not Unicode",
        ),
    ],
)
def test_a_damaged_record_is_named_with_its_cause(tmp_path, quality, damage, cause):
    path = write(tmp_path / "tiny", quality, ITEMS)
    damage(path)
    with pytest.raises(store.RecordError, match=cause) as error:
        store.read_record(path)
    assert f"tiny/{path.name}" in str(error.value)


def test_measurements_and_records_do_not_stand_for_each_other(tmp_path, quality, example):
    claims = tmp_path / "measurements.json"
    claims.write_text(json.dumps(example("measurements")))
    assert store.read_measurements(tmp_path).schema_ == example("measurements")["schema"]
    with pytest.raises(store.RecordError, match=r"measurements/1 is not a record; name another"):
        store.read_record(claims)
    with pytest.raises(store.RecordError, match="is not a record of kind quality"):
        store.read_record(claims, Quality)
    write(tmp_path, quality, ITEMS).replace(claims)
    with pytest.raises(store.RecordError, match="a record of kind quality, not measurements"):
        store.read_measurements(tmp_path)


def test_a_record_of_a_variant_has_items_and_a_schema_that_is_known_here(quality):
    with pytest.raises(store.RecordError, match="here: items: missing"):
        store.validate(quality, "here")
    items = {"file": "x.items.jsonl", "sha256": "ab" * 32, "count": 4}
    for version in (2, 4):
        with pytest.raises(
            store.RecordError, match=f"schema 'quality/{version}', this checkout has quality/3; measure"
        ):
            store.validate(quality | {"schema": f"quality/{version}", "items": items}, "here")
    with pytest.raises(store.RecordError, match=r"unknown schema 'tea/1', this checkout knows .*quality"):
        store.validate(quality | {"schema": "tea/1"}, "here")


def test_a_file_appears_whole_readable_by_all_and_replaces_another_only_if_told(tmp_path):
    path = tmp_path / "a.json"
    store.publish(path, b"first")
    assert path.stat().st_mode & 0o777 == 0o644
    with pytest.raises(store.RecordExistsError):
        store.publish(path, b"second")
    assert path.read_bytes() == b"first"
    store.publish(path, b"third", replace=True)
    assert path.read_bytes() == b"third"
    assert list(tmp_path.iterdir()) == [path]


def test_the_file_of_a_record_has_one_value_a_line_and_one_space_a_level_as_the_committed_ones(result):
    committed = store.latest(ROOT / "experiments" / "tiny-best", StartUp).read_text(encoding="utf-8")
    for text in (committed, store.serialise(result(), "here")):
        assert text == json.dumps(json.loads(text), indent=1, ensure_ascii=False) + "\n"


def test_a_message_names_a_file_as_every_machine_does():
    for folder in (ROOT, ROOT.parent, ROOT / "build" / "clone"):
        assert store.short_path(folder / "experiments" / "tiny" / "x.json") == "experiments/tiny/x.json"


def test_items_that_were_changed_are_refused(tmp_path, quality):
    path = write(tmp_path, quality, ITEMS)
    items = path.with_name(store.read_record(path).items.file)
    items.write_text(items.read_text().replace('"value": 0.0', '"value": 1.0'))
    with pytest.raises(store.RecordError, match="not the items"):
        store.read_items(path)
    content = "no json\n"
    described = json.loads(path.read_text())
    described["items"] |= {"sha256": hashlib.sha256(content.encode()).hexdigest(), "count": 1}
    path.write_text(json.dumps(described))
    items.write_text(content)
    with pytest.raises(store.RecordError, match="not JSON"):
        store.read_items(path)
    items.unlink()
    with pytest.raises(store.RecordError, match="restore this file, which"):
        store.read_items(path)


@pytest.mark.usefixtures("stamps")
def test_items_have_one_text_whatever_the_order_of_their_fields(tmp_path, quality):
    turned = [dict(reversed(item.items())) for item in ITEMS]
    one, other = (store.read_record(write(tmp_path, quality, items)).items for items in (ITEMS, turned))
    assert one.sha256 == other.sha256


def test_texts_stay_readable_in_a_file(tmp_path, quality):
    made = quality["provenance"] | {"command": "slimqwen süß"}
    path = write(tmp_path, quality | {"provenance": made}, [{"answer": "süß"}])
    for file in (path, path.with_name(store.read_record(path).items.file)):
        assert "süß" in file.read_text(encoding="utf-8")
