"""A copy of a hub repository is whole or not visible, goes on where it stopped, and every refusal is one line."""

import fcntl
import os
import shutil
import socket
import threading
import time
from collections import namedtuple
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import huggingface_hub
import pytest
from huggingface_hub import constants
from huggingface_hub.errors import HfHubHTTPError

from slimqwen import checkpoint, hub, variant
from slimqwen.checkpoint import CorruptCheckpointError, Manifest
from slimqwen.checkpoint.config import write_config
from slimqwen.checkpoint.files import file_records
from slimqwen.checkpoint.tensors import NewTensor, write_tensors
from slimqwen.errors import SlimqwenError
from slimqwen.hub import HubError
from tests import hub_server
from tests.hub_server import COMMIT, Hub
from tests.models.gguf_files import original_tokenizer, write_gguf
from tests.zoo.published_forms import PUBLISHED_FORMS

ROOT = Path(__file__).parents[1]
BIG = 400_000
CHUNK = 50_000
KEPT = ["chat_template.jinja", "config.json", "merges.txt", "model.safetensors", "tokenizer.json"]
KEPT += ["README.md", "tokenizer_config.json", "additional_chat_templates/tool_use.jinja"]
OTHER = "f" * 40


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub with one small checkpoint among files that nobody needs."""
    folder = tmp_path / "repository"
    (folder / "onnx").mkdir(parents=True)
    (folder / "additional_chat_templates").mkdir()
    write_config(folder, {"architectures": ["Qwen3_5ForCausalLM"]})
    for name in (
        "tokenizer.json",
        "tokenizer_config.json",
        "onnx/config.json",
        ".hidden.json",
        "manifest.json",
    ):
        (folder / name).write_text("{}")
    texts = ("merges.txt", "chat_template.jinja", "README.md", "pytorch_model.bin", "x.gguf", "x.png")
    for name in (*texts, "additional_chat_templates/tool_use.jinja", "additional_chat_templates/notes.md"):
        (folder / name).write_text(f"{name}\n")
    content = os.urandom(BIG)
    write_tensors(folder / "model.safetensors", {"a": NewTensor("U8", (len(content),), lambda: [content])})
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", CHUNK)
    yield from hub_server.running(folder, monkeypatch)


@pytest.fixture
def copy(add_variant: Callable[..., Path], tmp_path: Path) -> variant.Variant:
    """A variant whose base is a copy of the served repository."""
    add_variant("base", "VLLM_MODEL=weights/base\nSOURCE=owner/name\n")
    add_variant("child", "BASE=base\nVLLM_MODEL=weights/child\n")
    return variant.load("child", tmp_path)


def pinned(tmp_path: Path, revision: str) -> variant.Variant:
    file = tmp_path / "experiments/base/config.env"
    file.write_text(f"VLLM_MODEL=weights/base\nSOURCE=owner/name\nREVISION={revision}\n")
    return variant.load("child", tmp_path)


def left_in(weights: Path) -> list[str]:
    """The files under weights/, however deep."""
    return sorted(path.relative_to(weights).as_posix() for path in weights.rglob("*") if path.is_file())


def seen(weights: Path) -> list[str]:
    return sorted(path.name for path in weights.iterdir())


def refuse(copy: variant.Variant, message: str, kind: type[SlimqwenError] = HubError) -> None:
    with pytest.raises(kind, match=message):
        hub.download_checkpoint(copy)


def stop_at(position: int) -> Callable[[str, float, float], None]:
    """A listener at which the user presses Ctrl-C."""

    def listen(activity: str, done: float, total: float) -> None:
        if done >= position:
            raise KeyboardInterrupt

    return listen


def test_the_files_of_a_checkpoint_are_downloaded_with_progress_in_bytes(
    served: Hub, copy: variant.Variant, tmp_path: Path
) -> None:
    messages: list[tuple[str, float, float]] = []
    manifest = hub.download_checkpoint(copy, lambda *message: messages.append(message))

    folder = tmp_path / "weights/base"
    assert left_in(tmp_path / "weights") == sorted(
        f"base/{name}" for name in [*KEPT, "manifest.json", ".hashes.json"]
    )
    assert seen(tmp_path / "weights") == ["base"]
    for name in KEPT:
        assert (folder / name).read_bytes() == (served.folder / name).read_bytes()

    assert manifest == Manifest.read(folder)
    assert manifest.files == file_records(folder)
    assert (manifest.stage, manifest.facts) == ("download", {"repository": "owner/name", "revision": COMMIT})
    assert manifest.versions == {"huggingface_hub": huggingface_hub.__version__}
    assert manifest.peak_memory_bytes > 1e6

    total = sum((folder / name).stat().st_size for name in KEPT)
    steps = [(done, of) for activity, done, of in messages if activity == "downloading owner/name"]
    assert steps[0] == (0, total)
    assert steps[-1] == (total, total)
    assert steps == sorted(steps)
    assert len(steps) > BIG / CHUNK


def test_of_a_gguf_file_a_checkpoint_is_made_in_its_place(served: Hub, tmp_path: Path) -> None:
    published = PUBLISHED_FORMS["llama"].build(tmp_path / "published")
    (served.folder / "q8").mkdir()
    write_gguf(published, served.folder / "q8" / "m.gguf", original_tokenizer("smollm"), "smollm", "Q8_0")
    asked = hub.Repository("owner/name/q8/m.gguf", "model", None, "`again`", "the name")
    for _ in range(2):  # the second asks nobody
        manifest = hub.download_copy(asked, tmp_path / "weights" / "made")
        assert manifest.facts["repository"] == "owner/name/q8/m.gguf"
    assert [name for name, _ in served.fetched()] == ["m.gguf"]
    checkpoint.verify(tmp_path / "weights" / "made", "download it anew")
    assert not list(tmp_path.glob("weights/**/*.gguf"))
    lacking = asked._replace(name="owner/name/q4.gguf")
    with pytest.raises(HubError, match=r"owner/name has no q4\.gguf; .*its GGUF files: q8/m\.gguf, x\.gguf"):
        hub.download_copy(lacking, tmp_path / "weights" / "lacking")


def test_a_second_run_asks_nobody(served: Hub, copy: variant.Variant) -> None:
    first = hub.download_checkpoint(copy)
    served.requests.clear()
    assert hub.download_checkpoint(copy) == first
    assert served.requests == []


def test_the_pinned_commit_is_the_one_fetched(served: Hub, copy: variant.Variant, tmp_path: Path) -> None:
    hub.download_checkpoint(pinned(tmp_path, COMMIT))
    assert all(COMMIT in path for _, path, _ in served.requests)
    message = (
        rf"is a copy of owner/name at {COMMIT}, which contradicts SOURCE and REVISION at .*config.env:2; move"
    )
    refuse(pinned(tmp_path, OTHER), message)


def test_a_cut_connection_is_taken_up_again_where_it_broke(
    served: Hub, copy: variant.Variant, tmp_path: Path
) -> None:
    served.cut_at, served.cuts = 120_000, 1

    hub.download_checkpoint(copy)

    spans = [span for name, span in served.fetched() if name == "model.safetensors"]
    assert spans == [None, "bytes=100000-"]
    checkpoint.check_folder(tmp_path / "weights/base", "")


def test_an_interrupted_download_goes_on_with_the_same_commit(
    served: Hub, copy: variant.Variant, tmp_path: Path
) -> None:
    with pytest.raises(KeyboardInterrupt):
        hub.download_checkpoint(copy, stop_at(200_000))
    assert seen(tmp_path / "weights") == [".download-base"]
    half = tmp_path / "weights/.download-base" / COMMIT / "model.safetensors"
    length = half.stat().st_size
    assert 0 < length < BIG
    served.requests.clear()

    hub.download_checkpoint(copy)

    assert served.fetched() == [("model.safetensors", f"bytes={length}-")]
    assert served.requests[0][1].endswith(f"/revision/{COMMIT}")
    whole = (served.folder / "model.safetensors").read_bytes()
    assert (tmp_path / "weights/base/model.safetensors").read_bytes() == whole
    assert seen(tmp_path / "weights") == ["base"]


def test_the_half_of_another_commit_is_dropped(served: Hub, copy: variant.Variant, tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        hub.download_checkpoint(copy, stop_at(200_000))
    served.commit = OTHER

    assert hub.download_checkpoint(pinned(tmp_path, OTHER)).facts["revision"] == OTHER
    assert seen(tmp_path / "weights") == ["base"]


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json"])
def test_a_flipped_bit_is_refused_and_only_its_file_fetched_again(
    served: Hub, copy: variant.Variant, tmp_path: Path, name: str
) -> None:
    served.flipped = name
    refuse(copy, f"{name} differed from the hub's file and was deleted; run `slimqwen download base`")
    served.flipped = ""
    served.requests.clear()

    hub.download_checkpoint(copy)
    assert served.fetched() == [(name, None)]


def test_a_repository_that_is_no_checkpoint_is_not_published(
    served: Hub, copy: variant.Variant, tmp_path: Path
) -> None:
    (served.folder / "tokenizer.json").unlink()
    refuse(
        copy,
        r"tokenizer.json is missing; owner/name has this fault at .*config.env:2",
        CorruptCheckpointError,
    )
    (served.folder / "model.safetensors").unlink()
    served.commit = OTHER
    refuse(
        pinned(tmp_path, OTHER),
        r"has no .safetensors file; owner/name has this fault at",
        CorruptCheckpointError,
    )
    assert not (tmp_path / "weights/base").exists()


def test_an_unknown_repository_or_commit_names_the_line(
    served: Hub, copy: variant.Variant, add_variant: Callable[..., Path], tmp_path: Path
) -> None:
    refuse(
        pinned(tmp_path, OTHER),
        rf"has no owner/name at {OTHER}, .*; correct SOURCE and REVISION at .*base/config.env:2",
    )
    for name, repository in (("wrong", "owner/wrong"), ("odd", "a/b/c")):
        add_variant(name, f"VLLM_MODEL=weights/{name}\nSOURCE={repository}\n")
        message = rf"has no {repository} at main, or hides it; correct .*/{name}/config.env:2, or .*HF_TOKEN"
        refuse(variant.load(name, tmp_path), message)
    assert not (tmp_path / "weights").exists()


def test_a_gated_repository_takes_a_token(
    served: Hub, copy: variant.Variant, monkeypatch: pytest.MonkeyPatch
) -> None:
    served.gated = True
    refuse(copy, r"owner/name is gated: accept its terms at .*HF_TOKEN")

    monkeypatch.setenv("HF_TOKEN", hub_server.TOKEN)
    hub.download_checkpoint(copy)


@pytest.mark.parametrize(
    ("status", "cure"),
    [(403, "correct MODEL or HF_ENDPOINT, or set HF_TOKEN"), (429, "later"), (503, "later")],
)
def test_only_an_answer_that_may_change_is_waited_for(status: int, cure: str) -> None:
    repository = hub.Repository("owner/name", "model", None, "`again`", "MODEL")
    response = httpx.Response(status, request=httpx.Request("GET", "http://hub"))
    with (
        pytest.raises(HubError, match=f"answers {status} for owner/name; .*{cure}"),
        hub.explained_errors(repository),
    ):
        raise HfHubHTTPError("refused", response=response)


def test_no_network_is_an_error_within_seconds(
    served: Hub, copy: variant.Variant, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        closed = f"http://127.0.0.1:{unused.getsockname()[1]}"
        monkeypatch.setattr(constants, "ENDPOINT", closed)
        started = time.monotonic()
        refuse(copy, r"owner/name: ConnectError: .*; check network")
    assert time.monotonic() - started < 60
    assert not (tmp_path / "weights").exists()


@pytest.mark.parametrize("variable", ["ALL_PROXY", "all_proxy", "HTTPS_PROXY"])
@pytest.mark.parametrize("scheme", ["socks", "socks4", "ftp"])
def test_a_proxy_that_cannot_be_used_is_named(
    copy: variant.Variant, monkeypatch: pytest.MonkeyPatch, variable: str, scheme: str
) -> None:
    monkeypatch.setenv(variable, f"{scheme}://me:secret@127.0.0.1:9")
    refuse(
        copy, rf"^{variable}={scheme}://<redacted>@127.0.0.1:9: .*write http:// or .*socks5h://, or unset it"
    )


def test_a_socks_proxy_is_used(copy: variant.Variant, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    huggingface_hub.close_session()  # a client reads the proxies when it is made
    with socket.create_server(("127.0.0.1", 0)) as proxy:
        proxy.settimeout(60)
        monkeypatch.setenv("ALL_PROXY", f"socks5://127.0.0.1:{proxy.getsockname()[1]}")
        monkeypatch.setattr(constants, "ENDPOINT", "https://hub.invalid")
        asked = threading.Thread(target=refuse, args=(copy, "owner/name"), daemon=True)
        asked.start()
        connection, _ = proxy.accept()
        greeting = connection.recv(1)
        connection.close()
        proxy.close()  # or a second try would wait for its answer
        asked.join()
    huggingface_hub.close_session()
    assert greeting == b"\x05"


def test_another_web_server_is_an_error(
    served: Hub, copy: variant.Variant, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Hub, "listing", lambda self: {"welcome": "to this hotel's network"})
    refuse(copy, "does not answer as a model hub")


def test_offline_mode_names_its_variable(
    served: Hub, copy: variant.Variant, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    refuse(copy, "^HF_HUB_OFFLINE or TRANSFORMERS_OFFLINE forbids .*; unset it")
    assert served.requests == []


def test_a_full_disk_is_an_error_before_the_download(
    served: Hub, copy: variant.Variant, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(0, 0, 1000))
    refuse(copy, r"needs 0.00 GB more, 0.00 GB of disk are free")
    assert served.fetched() == []


def test_a_second_process_is_refused(served: Hub, copy: variant.Variant, tmp_path: Path) -> None:
    staging = tmp_path / "weights/.download-base"
    staging.mkdir(parents=True)
    with (staging / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        refuse(copy, "another process is downloading .*weights/base; wait")


def test_weights_made_otherwise_are_left_alone(served: Hub, copy: variant.Variant, tmp_path: Path) -> None:
    folder = tmp_path / "weights/base"
    folder.mkdir(parents=True)
    (folder / "mine").write_text("")
    refuse(copy, r"weights/base was not downloaded by this command; move")

    Manifest(stage="calibrate", files={}, wall_seconds=0, peak_memory_bytes=0, versions={}).write(folder)
    refuse(copy, r"weights/base was not downloaded by this command; move")
    assert left_in(folder) == ["manifest.json", "mine"]


def test_a_damaged_copy_is_an_error(served: Hub, copy: variant.Variant, tmp_path: Path) -> None:
    hub.download_checkpoint(copy)
    os.truncate(tmp_path / "weights/base/model.safetensors", BIG)
    refuse(
        copy, r"cut short: .*; move .*weights/base away and run `slimqwen download", CorruptCheckpointError
    )


def test_a_variant_without_a_source_says_what_makes_its_weights(
    add_variant: Callable[..., Path], tmp_path: Path
) -> None:
    config = add_variant("v", "VLLM_MODEL=weights/v\n")
    (config.parent / "recipe.yaml").write_text("description: …\n")
    refuse(
        variant.load("v", tmp_path),
        r"^v is not a copy of a hub repository .*; `slimqwen recipe run v` makes it",
    )
