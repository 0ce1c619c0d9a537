import hashlib
import json
import os
import threading

import pytest

from slimqwen.records import store

ITEMS = [{"task": "example_facts", "index": n, "item": str(n), "value": float(n % 2)} for n in range(4)]


@pytest.fixture
def times(monkeypatch):
    """Each write gets the next of these moments."""
    moments = iter(["2026-01-01T000000Z", "2026-01-02T000000Z", "2026-01-03T000000Z"])
    monkeypatch.setattr(store, "_stamp", lambda: next(moments))


@pytest.fixture
def one_moment(monkeypatch):
    monkeypatch.setattr(store, "_stamp", lambda: "2026-01-01T000000Z")


def test_a_record_comes_back_with_its_items(tmp_path, quality):
    path = store.write(tmp_path / "tiny", quality, ITEMS)
    record = store.read(path)
    assert {name: record[name] for name in quality} == quality
    assert store.read_items(path) == ITEMS
    assert sorted(file.name for file in path.parent.iterdir()) == [record["items"]["file"], path.name]


def test_an_invalid_record_leaves_nothing(tmp_path, quality):
    del quality["suite"]
    with pytest.raises(store.RecordError, match="suite"):
        store.write(tmp_path / "tiny", quality, ITEMS)
    assert not (tmp_path / "tiny").exists()


def test_a_figure_that_is_no_number_is_refused(tmp_path, quality):
    quality["tasks"]["example_facts"]["value"] = float("nan")
    with pytest.raises(store.RecordError, match="no number"):
        store.write(tmp_path, quality, ITEMS)
    assert list(tmp_path.iterdir()) == []


def test_a_record_of_an_older_form_is_read_and_not_written(tmp_path, quality):
    old = {key: value for key, value in quality.items() if key != "endpoint"} | {"schema": "quality/1"}
    with pytest.raises(store.RecordError, match="older schema"):
        store.write(tmp_path, old, ITEMS)
    assert list(tmp_path.iterdir()) == []


def test_what_is_validated_stays_as_it_is(quality):
    old = {key: value for key, value in quality.items() if key != "endpoint"} | {"schema": "quality/1"}
    old["items"] = {"file": "x.items.jsonl", "sha256": "ab" * 32, "count": 8}
    before = json.dumps(old)
    assert store.validate(old, "example")["endpoint"] == "completions"
    assert json.dumps(old) == before


@pytest.mark.usefixtures("one_moment")
def test_a_record_is_never_overwritten(tmp_path, quality):
    path = store.write(tmp_path, quality, ITEMS)
    before = {file: file.read_bytes() for file in tmp_path.iterdir()}
    with pytest.raises(store.RecordError, match="never overwritten"):
        store.write(tmp_path, {**quality, "limit": 3}, ITEMS[:3])
    assert {file: file.read_bytes() for file in tmp_path.iterdir()} == before
    assert store.read(path)["limit"] == 4


@pytest.mark.usefixtures("one_moment")
def test_of_two_writers_at_once_one_wins_whole(tmp_path, quality):
    outcomes = []

    def write(limit):
        try:
            outcomes.append(store.write(tmp_path, {**quality, "limit": limit}, ITEMS[:limit]))
        except store.RecordError as error:
            outcomes.append(error)

    writers = [threading.Thread(target=write, args=(limit,)) for limit in (2, 3, 4)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    written = [path for path in outcomes if not isinstance(path, Exception)]
    assert len(written) == 1
    assert len(store.read_items(written[0])) == store.read(written[0])["limit"]
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize("fails_at", [0, 1])
def test_a_write_that_fails_leaves_nothing(tmp_path, quality, monkeypatch, fails_at):
    real_link, calls = os.link, []

    def link(*paths):
        calls.append(paths)
        if len(calls) == fails_at + 1:
            raise OSError("no space left on device")
        real_link(*paths)

    monkeypatch.setattr(os, "link", link)
    with pytest.raises(OSError, match="no space"):
        store.write(tmp_path, quality, ITEMS)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("times")
def test_latest_is_the_newest_that_is_wanted(tmp_path, quality, latency):
    paths = [store.write(tmp_path, {**quality, "limit": limit}, ITEMS) for limit in (150, 6)]
    store.write(tmp_path, latency, ITEMS)
    assert store.latest(tmp_path, "quality") == paths[1]
    assert store.latest(tmp_path, "quality", lambda record: record["limit"] == 150) == paths[0]


def test_a_missing_record_is_told_with_its_command(tmp_path):
    with pytest.raises(store.MissingRecordError, match="make eval-latency VARIANT=tiny-awq"):
        store.latest(tmp_path / "tiny-awq", "latency")


@pytest.mark.parametrize(
    ("damage", "cause"),
    [
        (lambda path: path.write_text(path.read_text()[:-40]), "not JSON"),
        (lambda path: path.write_text("[]"), "not a JSON object"),
        (lambda path: path.write_bytes(b"\xff\xfe\x00"), "not JSON"),
        (lambda path: path.unlink(), "no such record"),
        (lambda path: path.write_text(json.dumps({"schema": "quality/9"})), "quality/9"),
        (lambda path: path.write_text("{" * 100_000), "not JSON"),
        (lambda path: path.write_text('{"schema": "quality/2", "limit": NaN}'), "NaN is no number"),
        (
            lambda path: path.write_text(path.read_text().replace('"suite": "', '"suite": "\\ud800', 1)),
            "what is no text",
        ),
    ],
)
def test_a_damaged_record_is_named_with_its_cause(tmp_path, quality, damage, cause):
    path = store.write(tmp_path / "tiny", quality, ITEMS)
    damage(path)
    with pytest.raises(store.RecordError, match=cause) as error:
        store.read(path)
    assert f"tiny/{path.name}" in str(error.value)


def test_items_that_were_changed_are_refused(tmp_path, quality):
    path = store.write(tmp_path, quality, ITEMS)
    items = path.with_name(store.read(path)["items"]["file"])
    items.write_text(items.read_text().replace('"value": 0.0', '"value": 1.0'))
    with pytest.raises(store.RecordError, match="not the items"):
        store.read_items(path)
    content = "no json\n"
    described = json.loads(path.read_text())
    described["items"] |= {"sha256": hashlib.sha256(content.encode()).hexdigest(), "count": 1}
    path.write_text(json.dumps(described))
    items.write_text(content)
    with pytest.raises(store.RecordError, match="not a JSON object a line"):
        store.read_items(path)
    items.unlink()
    with pytest.raises(store.RecordError, match="needs it"):
        store.read_items(path)
