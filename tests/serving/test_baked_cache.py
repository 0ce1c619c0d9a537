import io
import json
import tarfile
from concurrent.futures import ThreadPoolExecutor

import pytest

from slimqwen import host, variant
from slimqwen.identity.effects import decisive_flags
from slimqwen.serving import baked_cache
from slimqwen.serving.command import ServerCommand
from slimqwen.serving.errors import ServingError

MACHINE = {"platform": "cpu", "vllm": "1", "instruction set": "ab12"}
FLAGS = {"max-num-seqs": 4, "speculative-config": {"method": "mtp", "num_speculative_tokens": 4}}
GRAPHS = {
    "vllm/torch_compile_cache/torch_aot_compile/f00/rank_0_0/model": b"a graph",
    "vllm/torch_compile_cache/torch_aot_compile/f00/inductor_cache/ab/kernel.so": bytes(range(256)) * 64,
    "vllm/modelinfos/a-class.json": b"{}",
}


@pytest.fixture
def root(tmp_path):
    """A cache root as a start leaves it, with what is not to be packed."""
    root = tmp_path / "root"
    for name, content in {**GRAPHS, "vllm/assets/picture": b"no", "vllm.log": b"no"}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(content)
    return root


def pack(root, folder, **made_by):
    folder.mkdir(exist_ok=True)
    facts = {"machine": MACHINE, "flags": {}, "environment": {}, "graphs": {"backbone": 30.5}}
    return baked_cache.pack_cache(root, folder, **facts | made_by)


@pytest.fixture
def packed(root, tmp_path):
    folder = tmp_path / "checkpoint"
    environment = {"VLLM_CPU_KVCACHE_SPACE": "1"}
    return folder, pack(root, folder, flags=decisive_flags(FLAGS), environment=environment)


def contents(root):
    return {
        path.relative_to(root).as_posix(): path.read_bytes() for path in root.rglob("*") if path.is_file()
    }


def test_graphs_come_back_whole_in_another_place(packed, tmp_path):
    folder, baked = packed
    assert baked_cache.read_manifest(folder) == baked
    baked_cache.restore_cache(folder, baked, tmp_path / "caches" / "elsewhere")
    assert contents(tmp_path / "caches" / "elsewhere") == GRAPHS
    assert {path.name for path in (tmp_path / "caches").iterdir()} == {"elsewhere", ".elsewhere.lock"}


def test_a_whole_cache_is_left_alone_with_what_vllm_added(packed, tmp_path):
    folder, baked = packed
    place = tmp_path / "place"
    baked_cache.restore_cache(folder, baked, place)
    (place / "vllm" / "later").write_bytes(b"by vLLM")
    (folder / baked_cache.ARCHIVE).unlink()
    baked_cache.restore_cache(folder, baked, place)
    assert contents(place) == {**GRAPHS, "vllm/later": b"by vLLM"}


@pytest.mark.parametrize("name", list(GRAPHS))
def test_a_file_that_changed_is_restored(packed, tmp_path, name):
    folder, baked = packed
    place = tmp_path / "place"
    baked_cache.restore_cache(folder, baked, place)
    (place / name).write_bytes(b"compiled anew")
    baked_cache.restore_cache(folder, baked, place)
    assert contents(place) == GRAPHS


@pytest.mark.parametrize("damage", ["flipped", "cut", "gone"])
def test_a_damaged_archive_is_refused_and_nothing_is_left(packed, tmp_path, damage):
    folder, baked = packed
    archive = folder / baked_cache.ARCHIVE
    content = bytearray(archive.read_bytes())
    if damage == "gone":
        archive.unlink()
    elif damage == "cut":
        archive.write_bytes(content[:-20])
    else:
        content[len(content) // 2] ^= 1
        archive.write_bytes(content)
    with pytest.raises(ServingError, match=r"compile_cache\.tar\.gz is missing or not what"):
        baked_cache.restore_cache(folder, baked, tmp_path / "caches" / "place")
    assert not (tmp_path / "caches").exists()


def test_an_archive_that_holds_something_else_than_it_lists_is_refused(packed, tmp_path):
    folder, baked = packed
    archive = folder / baked_cache.ARCHIVE
    (tmp_path / "other").write_bytes(b"other")
    with tarfile.open(archive, "w:gz") as packing:
        for name in GRAPHS:
            packing.add(tmp_path / "other", name)
    lying = baked.model_copy(update={"archive_sha256": baked_cache.sha256(archive)})
    with pytest.raises(ServingError, match="holds another"):
        baked_cache.restore_cache(folder, lying, tmp_path / "caches" / "place")
    assert [path.name for path in (tmp_path / "caches").iterdir()] == [".place.lock"]


def test_nothing_but_what_the_manifest_names_is_unpacked_and_that_lies_in_the_cache(packed, tmp_path):
    folder, baked = packed
    archive = folder / baked_cache.ARCHIVE
    with tarfile.open(archive) as packing:
        content = {name: packing.extractfile(name).read() for name in GRAPHS}
    with tarfile.open(archive, "w:gz") as packing:
        for name, data in (content | {"../../outside": b"x", "vllm/beside": b"x"}).items():
            entry = tarfile.TarInfo(name)
            entry.size = len(data)
            packing.addfile(entry, io.BytesIO(data))
    more = baked.model_copy(update={"archive_sha256": baked_cache.sha256(archive)})
    baked_cache.restore_cache(folder, more, tmp_path / "caches" / "place")
    assert contents(tmp_path / "caches" / "place") == GRAPHS
    assert not list(tmp_path.rglob("outside"))
    for name in ("../../outside", "/outside"):
        manifest = more.model_dump() | {"files": {name: "0"}}
        (folder / baked_cache.MANIFEST).write_text(json.dumps(manifest))
        with pytest.raises(ServingError, match=f"{name} lies outside the cache"):
            baked_cache.read_manifest(folder)


def test_starts_at_once_restore_once_and_never_take_a_file_from_each_other(packed, tmp_path):
    folder, baked = packed
    for attempt in range(20):
        place = tmp_path / "caches" / f"place-{attempt}"

        def restored(place=place):
            baked_cache.restore_cache(folder, baked, place)
            return contents(place)

        with ThreadPoolExecutor(4) as starts:
            assert [seen.result() for seen in [starts.submit(restored) for _ in range(4)]] == [GRAPHS] * 4


def test_a_start_that_saved_no_graph_is_not_packed(root, tmp_path):
    (root / next(iter(GRAPHS))).unlink()
    with pytest.raises(ServingError, match="saved no compiled graph"):
        pack(root, tmp_path)
    with pytest.raises(ServingError, match="saved no compiled graph"):
        pack(tmp_path / "empty", tmp_path, graphs={})
    assert not (tmp_path / baked_cache.MANIFEST).exists()


def test_the_same_machine_and_flags_differ_in_nothing(packed):
    _, baked = packed
    moved = FLAGS | {
        "model": "/elsewhere",
        "port": 9,
        "host": "::",
        "served-model-name": ["x"],
        "tool-call-parser": "hermes",
    }
    assert baked_cache.list_differences(baked, MACHINE, moved, {"VLLM_CPU_KVCACHE_SPACE": "1"}) == []


@pytest.mark.parametrize(
    ("machine", "flags", "environment", "said"),
    [
        ({"vllm": "2"}, {}, {}, "vllm was 1 and is 2"),
        ({"instruction set": "cd34"}, {}, {}, "instruction set was ab12 and is cd34"),
        ({}, {"max-num-seqs": 8}, {}, "--max-num-seqs was 4 and is 8"),
        ({}, {"dtype": "float16"}, {}, '--dtype was not set and is "float16"'),
        ({}, {}, {"VLLM_CPU_KVCACHE_SPACE": "2"}, "VLLM_CPU_KVCACHE_SPACE was 1 and is 2"),
        (
            {},
            {"speculative-config": {"method": "mtp", "num_speculative_tokens": 5}},
            {},
            '--speculative-config was {"method": "mtp", "num_speculative_tokens": 4} and is '
            '{"method": "mtp", "num_speculative_tokens": 5}',
        ),
    ],
)
def test_whatever_else_differs_is_said_in_words(packed, machine, flags, environment, said):
    _, baked = packed
    here = {"VLLM_CPU_KVCACHE_SPACE": "1"} | environment
    assert baked_cache.list_differences(baked, MACHINE | machine, FLAGS | flags, here) == [said]


def test_a_checkpoint_without_a_cache_has_none(tmp_path):
    assert baked_cache.read_manifest(tmp_path) is None
    assert baked_cache.read_manifest(tmp_path / "nowhere") is None


def test_a_manifest_that_is_none_is_refused(tmp_path):
    (tmp_path / baked_cache.MANIFEST).write_text('{"machine": {}}')
    with pytest.raises(ServingError, match="does not describe a compile cache"):
        baked_cache.read_manifest(tmp_path)


def test_this_machine_is_told_without_importing_torch():
    facts = baked_cache.describe_machine("cpu")
    assert facts["platform"] == "cpu"
    assert all(facts.values())
    assert facts["vllm"] != "none"


def test_a_cache_serves_any_number_of_cores(monkeypatch):
    facts = baked_cache.describe_machine("cpu")
    monkeypatch.setattr(host, "physical_cores", lambda: 64)
    assert baked_cache.describe_machine("cpu") == facts
    command = ServerCommand.resolve(variant.load("tiny-best"), platform="cpu")
    # What torch reads, so that no kernel has a number of threads in it.
    assert command.environment["TORCHINDUCTOR_CPP_DYNAMIC_THREADS"] == "1"
    assert command.environment["OMP_NUM_THREADS"] == "64"


def test_a_log_says_of_every_graph_how_it_was_come_by():
    log = (
        "(Worker pid=7) INFO 11-21 08:39:43 [compile_watch.py:95] Graph backbone loaded from the compile cache in "
        "0.41 s\n"
        "(Worker pid=7) INFO Loading weights took 0.01 seconds\n"
        "(Worker pid=7) INFO [compile_watch.py:95] Graph eagle_head compiled in 12.50 s (not in the cache)\n"
    )
    first, second = baked_cache.read_graphs(log)
    assert (first.name, first.loaded, first.seconds, first.why_compiled) == ("backbone", True, 0.41, "")
    assert (second.name, second.loaded, second.seconds) == ("eagle_head", False, 12.5)
    assert second.why_compiled == "not in the cache"
    assert baked_cache.read_graphs("vLLM said nothing of it") == []


def test_a_library_that_flashinfer_compiled_is_packed_where_a_start_looks_for_prebuilt_ones(root, tmp_path):
    compiled = root / ".cache/flashinfer/0.7.0/86/cached_ops/sampling/sampling.so"
    compiled.parent.mkdir(parents=True)
    compiled.write_bytes(b"a library")
    compiled.with_name("sampling.o").write_bytes(b"no")
    assert baked_cache.collect_libraries(root) == 1
    folder, place = tmp_path / "checkpoint", tmp_path / "place"
    baked = pack(root, folder)
    packed = {**GRAPHS, "flashinfer/sampling/sampling.so": b"a library"}
    for damaged in packed:
        baked_cache.restore_cache(folder, baked, place)
        assert contents(place) == packed
        (place / damaged).unlink()


def test_of_triton_s_kernels_what_a_start_reads_is_packed(root, tmp_path):
    for name in ("__grp__k.json", "k.json", "k.cubin", "k.ptx", "k.ttir"):
        (root / "triton" / "KEY" / name).parent.mkdir(parents=True, exist_ok=True)
        (root / "triton" / "KEY" / name).write_bytes(name.encode())
    baked = pack(root, tmp_path / "checkpoint")
    names = {name for name in baked.files if name.startswith("triton/")}
    assert names == {f"triton/KEY/{name}" for name in ("__grp__k.json", "k.json", "k.cubin")}


def test_an_archive_is_imported_by_its_own_hash_alone(packed, tmp_path):
    folder, baked = packed
    archive = folder / baked_cache.ARCHIVE
    with pytest.raises(ServingError, match=f"has the SHA-256 {baked.archive_sha256}, not {'0' * 64}"):
        baked_cache.import_archive(tmp_path, archive, "0" * 64)
    with pytest.raises(ServingError, match="is missing; copy"):
        baked_cache.import_archive(tmp_path, tmp_path / "nowhere", baked.archive_sha256)
    assert baked_cache.find_origin(tmp_path, baked) is None
    baked_cache.import_archive(tmp_path, archive, baked.archive_sha256)
    assert baked_cache.find_origin(tmp_path, baked) == "imported by its hash"


def test_a_manifest_cannot_name_a_file_of_its_own_as_its_trust(packed):
    folder, baked = packed
    manifest = {**baked.model_dump(), "archive_sha256": "../../../weights/v/config.json"}
    (folder / baked_cache.MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(ServingError, match="does not describe a compile cache"):
        baked_cache.read_manifest(folder)


def test_a_manifest_of_before_has_seconds_of_libraries_too(packed):
    folder, baked = packed
    file = folder / baked_cache.MANIFEST
    file.write_text(json.dumps({**json.loads(file.read_text()), "libraries": {}}))
    assert baked_cache.read_manifest(folder) == baked
