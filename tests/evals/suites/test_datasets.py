"""Datasets come whole, at one commit, and every refusal is one line that names the cure."""

import hashlib
import json
import threading
import zipfile
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from slimqwen.errors import SlimqwenError
from slimqwen.evals import EvalError
from slimqwen.evals.suites import datasets
from slimqwen.evals.suites.datasets import HubDataset
from slimqwen.hub import HubError
from tests import hub_server
from tests.hub_server import COMMIT, Hub

OTHER = "f" * 40
WANTED = HubDataset(
    repository="owner/name", folder=Path("data/items"), files=("data/test.parquet", "rules.jsonl")
)


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub with one dataset: a file stored with LFS, one that is not, one that nobody needs."""
    folder = tmp_path / "repository"
    (folder / "data").mkdir(parents=True)
    (folder / "data" / "test.parquet").write_bytes(bytes(range(256)) * 40)
    (folder / "rules.jsonl").write_text('{"rule": "no comma"}\n')
    (folder / "README.md").write_text("not needed\n")
    yield from hub_server.running(folder, monkeypatch)


def refusal(kind: type[SlimqwenError], message: str, root: Path, wanted: HubDataset = WANTED) -> None:
    with pytest.raises(kind, match=message):
        datasets.fetch_dataset(wanted, root)


def test_a_dataset_is_fetched_at_one_commit_with_a_manifest(served: Hub, tmp_path: Path) -> None:
    """What interrupts, damages or forbids a download is shown by tests/test_hub.py: the code is the same."""
    heard: list[tuple[str, float, float]] = []
    line = datasets.fetch_dataset(WANTED, tmp_path, lambda *step: heard.append(step))

    assert line == (
        f"data/items is complete, as the hub lists it: owner/name at {COMMIT}, 0.0 MB; "
        f"to pin it: `revision: {COMMIT}` in its file of eval/"
    )
    folder = tmp_path / "data/items"
    assert sorted(file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file()) == [
        "data/test.parquet",
        "manifest.json",
        "rules.jsonl",
    ]
    for name in WANTED.files:
        assert (folder / name).read_bytes() == (served.folder / name).read_bytes()
    assert [path.name for path in (tmp_path / "data").iterdir()] == ["items"]
    sizes = sum((folder / name).stat().st_size for name in WANTED.files)
    assert ("downloading owner/name", sizes, sizes) in heard
    facts = json.loads((folder / "manifest.json").read_text())
    assert facts["files"]["rules.jsonl"] == hashlib.sha256((folder / "rules.jsonl").read_bytes()).hexdigest()


def test_a_second_run_asks_nobody_and_hashes(served: Hub, tmp_path: Path) -> None:
    datasets.fetch_dataset(WANTED, tmp_path)
    served.requests.clear()
    again = datasets.fetch_dataset(WANTED, tmp_path)
    assert again.startswith(f"data/items is present, every file as it was fetched: owner/name at {COMMIT}")
    assert served.requests == []

    (tmp_path / "data/items/rules.jsonl").write_text('{"rule": "no commas"}\n')
    changed = r"^data/items/rules.jsonl was changed or .*; delete data/items and run `slimqwen download --suite core`$"
    refusal(EvalError, changed, tmp_path)
    with pytest.raises(EvalError, match=changed):
        datasets.require_datasets([WANTED], (), tmp_path)


def test_a_pinned_commit_is_the_one_that_is_asked_for_and_kept(served: Hub, tmp_path: Path) -> None:
    pinned = WANTED.model_copy(update={"revision": COMMIT})
    assert "to pin it" not in datasets.fetch_dataset(pinned, tmp_path)
    assert served.requests[0][1].endswith(f"/revision/{COMMIT}")
    other = WANTED.model_copy(update={"revision": OTHER})
    kept = f"is owner/name at {COMMIT}, but the suite needs owner/name at {OTHER}; delete"
    refusal(EvalError, kept, tmp_path, other)
    elsewhere = other.model_copy(update={"folder": Path("data/elsewhere")})
    refusal(HubError, f"has no owner/name at {OTHER}, .*correct its file of eval/", tmp_path, elsewhere)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"files": ("train.csv",)}, "owner/name has no train.csv; correct"),
        (
            {"repository": "owner/other"},
            "has no owner/other at main, or hides it; .*HF_TOKEN",
        ),
    ],
)
@pytest.mark.usefixtures("served")
def test_what_the_hub_does_not_have_is_named(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    refusal(HubError, message, tmp_path, WANTED.model_copy(update=changes))


def test_what_is_missing_is_named_all_at_once(tmp_path: Path) -> None:
    with pytest.raises(
        EvalError, match=r"^missing data: data/items, data/nltk/punkt_tab; `slimqwen download --s"
    ):
        datasets.require_datasets([WANTED], ["punkt_tab"], tmp_path)


def test_nltk_resources_are_fetched_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nltk.pathsec.ENFORCE", False)  # it refuses loopback addresses
    site = tmp_path / "site"
    site.mkdir()
    with zipfile.ZipFile(site / "words.zip", "w") as archive:
        archive.writestr("words/english", "salt\n")
    content = (site / "words.zip").read_bytes()

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(site)))
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_address[1]}"
    monkeypatch.setattr("nltk.downloader.Downloader.DEFAULT_URL", f"{address}/index.xml")
    (site / "index.xml").write_text(
        f'<nltk_data><packages><package id="words" name="words" subdir="tokenizers" unzip="1" unzipped_size="5" '
        f'size="{len(content)}" checksum="{hashlib.md5(content).hexdigest()}" url="{address}/words.zip"/>'
        "</packages></nltk_data>"
    )
    try:
        (got,) = datasets.fetch_nltk(["words"], tmp_path)
        with pytest.raises(
            HubError, match=r"nltk's resource verbs cannot be fetched from .*`slimqwen download --s"
        ):
            datasets.fetch_nltk(["verbs"], tmp_path)
    finally:
        server.shutdown()
        server.server_close()
    assert got == tmp_path / "data/nltk/tokenizers/words.zip"
    assert (tmp_path / "data/nltk/tokenizers/words/english").read_text() == "salt\n"
    # The server is gone: what is there is not asked for again.
    assert datasets.fetch_nltk(["words"], tmp_path) == [got]
    assert datasets.require_datasets((), ["words"], tmp_path) == [got]


LOCAL = WANTED.model_copy(update={"local_files": ("test.jsonl",), "optional": True})


def test_data_of_a_folder_take_the_place_of_the_hub_s(tmp_path: Path) -> None:
    (tmp_path / "test.jsonl").write_text("{}\n")
    lines = datasets.take_datasets([LOCAL], tmp_path, tmp_path)

    assert lines == [f"data/items is complete: test.jsonl of {tmp_path}"]
    assert datasets.take_datasets([LOCAL], tmp_path, tmp_path) == ["data/items is present"]
    datasets.require_datasets([LOCAL], (), tmp_path)
    (tmp_path / "data/items/test.jsonl").write_text("changed\n")
    with pytest.raises(EvalError, match=r"data/items/test.jsonl was changed or deleted"):
        datasets.require_datasets([LOCAL], (), tmp_path)


def test_a_folder_without_any_of_the_data_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        EvalError, match=r"data/items is not taken: no test.jsonl in .*; name a folder that holds them"
    ):
        datasets.take_datasets([LOCAL], tmp_path, tmp_path)


def test_only_data_that_a_suite_can_do_without_may_be_missing(tmp_path: Path) -> None:
    datasets.require_datasets([LOCAL], (), tmp_path)
    with pytest.raises(EvalError, match="missing data: data/items"):
        datasets.require_datasets([WANTED], (), tmp_path)


def test_files_of_the_hub_may_be_named_by_a_pattern(served: Hub, tmp_path: Path) -> None:
    wanted = WANTED.model_copy(update={"files": ("*/*.parquet",)})
    datasets.fetch_dataset(wanted, tmp_path)

    assert (tmp_path / "data/items/data/test.parquet").is_file()
    assert not (tmp_path / "data/items/rules.jsonl").exists()
