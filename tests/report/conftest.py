import hashlib
import itertools
import json
import os
import shutil
from pathlib import Path

import pytest

from slimqwen import variant
from slimqwen.records import store
from tests.record_files import example, record_of
from tests.records.conftest import latency, quality  # noqa: F401  (fixtures)
from tests.report.two_variants import repository  # noqa: F401  (a fixture)

ROOT = variant.repository_root()

LATENCY = Path(__file__).parent / "templates" / "latency_2026-11-23T151649Z.json"
"""Six rounds in turns: how much of a gain its intervals can tell depends on the record."""

COPIED = ("quality", "latency", "fidelity", "acceptance", "engine")
"""Kinds of records in experiments/ that a repository is made of here: real ones, under other names."""


def digest(name):
    """Of the checkpoint that all records of a variant here are of."""
    return hashlib.sha256(name.encode()).hexdigest()


@pytest.fixture(scope="session")
def templates():
    """`LATENCY`, and the newest committed record of each other kind, with its items; copies are of one machine."""
    newest = {}
    for kind in COPIED:
        paths = [
            path for path in sorted(ROOT.glob(f"experiments/tiny*/{kind}_*.json")) if "items" not in path.name
        ]
        if kind == "quality":
            # All items of a suite take half a megabyte a record.
            paths = [path for path in paths if isinstance(store.read_record(path).limit, int)] or paths
        if kind == "latency":
            paths = [LATENCY]
        newest[kind] = paths[-1], store.read_record(paths[-1])
    return newest


@pytest.fixture
def add_record(tmp_path, templates):
    """Write a copy of a real record of another variant into the repository at tmp_path; returns its path.

    Args: variant, kind; stamp of the file name; edit changes the record, edit_items each item.
    """

    def add(name, kind, stamp="2026-01-01T000000Z", edit=lambda record: None, edit_items=None):
        source, template = templates[kind]
        record = json.loads(store.serialise(template, "template"))
        record["variant"] = name
        if "baseline" in record:
            record["baseline"] = "base"
        folder = tmp_path / "experiments" / name
        folder.mkdir(parents=True, exist_ok=True)
        items = source.with_name(template.items.file)
        mine = folder / f"{kind}_{stamp}.items.jsonl"
        record["provenance"]["checkpoint"] |= {"digest": digest(name), "recipe_key": None}
        record["provenance"]["hardware"] = templates["latency"][1].provenance.hardware.as_json()
        edit(record)
        if edit_items is None:
            # Links instead of copies: two thousand records would fill the disk.
            os.link(_local(items, tmp_path), mine)
        else:
            rows = [json.loads(line) for line in items.read_text().splitlines()]
            rows = [edit_items(row) for row in rows]
            mine.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
            record["items"]["sha256"] = hashlib.sha256(mine.read_bytes()).hexdigest()
            record["items"]["count"] = len(rows)
        record["items"]["file"] = mine.name
        path = folder / f"{kind}_{stamp}.json"
        path.write_text(json.dumps(record))
        return path

    return add


@pytest.fixture
def add_start_up(tmp_path, templates):
    """Write a start-up record of a variant a copy of a real one."""
    template = record_of(example("start_up"))

    def add(name, edit=lambda record: None):
        record = json.loads(store.serialise(template, "template")) | {"variant": name}
        record["provenance"]["checkpoint"]["digest"] = digest(name)
        record["provenance"]["hardware"] = templates["latency"][1].provenance.hardware.as_json()
        edit(record)
        path = (
            tmp_path
            / "experiments"
            / name
            / f"start_up_{record['provenance']['ended'].replace(':', '')}.json"
        )
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(record))
        return path

    return add


@pytest.fixture
def claim(tmp_path):
    """Change fields of a variant's measurements.json."""

    def change(name, **fields):
        file = tmp_path / "experiments" / name / "measurements.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))

    return change


@pytest.fixture
def pair(add_variant, add_record, claim):
    """Write a baseline and a variant that answers the same in a share of its time."""

    def make(factor=0.5, edit=lambda record: None, workload="classes"):
        add_variant("base", "EVALUATION=tinyworld\nVLLM_MODEL=weights/base\n")
        add_variant("quick", "BASE=base\nVLLM_MODEL=weights/quick\n", baseline="base")
        claim("quick", status="measured", verdict="pass")

        def shorten(record):
            for row in record["classes"].values():
                row["e2el_ms"]["median"] *= factor
            edit(record)

        numbers = itertools.count()

        def shorten_each(item):
            noise = 1 + 0.02 * (-1) ** item.get("round", 0) + 0.02 * (-1) ** next(numbers)
            return item | {"e2el_ms": item["e2el_ms"] * factor * noise}

        def widen(record):
            # So few items would leave an equal variant undecided.
            for row in record["tasks"].values():
                row["non_inferiority_margin"] = 0.5

        for name in ("base", "quick"):
            add_record(name, "quality", edit=widen)
        add_record("base", "latency", edit=lambda record: record.update(workload=workload))
        add_record("quick", "latency", edit=shorten, edit_items=shorten_each)

    return make


def _local(items, root):
    """The items in root's file system, where they can be linked to."""
    copy = root / ".items" / items.name
    if not copy.exists():
        copy.parent.mkdir(exist_ok=True)
        shutil.copy(items, copy)
    return copy
