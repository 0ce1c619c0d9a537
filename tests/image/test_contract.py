"""What an image must hold is checked against root filesystems made by hand: a right one, and one of each fault."""

import dataclasses

import pytest

from slimqwen.image import contract
from tests.image.conftest import USER, as_json, faults


@pytest.fixture
def look(archive, settings, description):
    """Read an archive with planted faults and check it; returns what does not hold."""

    def look_into(expected=description, settings=settings, **planted):
        result = contract.read(archive(**planted), description.root, settings.user)
        return faults(contract.check(result, settings, expected))

    return look_into


def test_a_right_image_has_no_fault(look):
    assert look() == {}


def test_the_parts_are_counted_and_world_writable_folders_with_the_sticky_bit_are_fine(
    archive, settings, description
):
    result = contract.read(archive(), description.root, settings.user)
    assert result.bytes_by_part["system"] == 4
    assert result.bytes_by_part["checkpoint"] > 1e6
    assert result.bytes_by_part["library"] > 1e5
    assert result.world_writable == []


@pytest.mark.parametrize(
    ("name", "data", "kind"),
    [
        ("home/one/.netrc", b"machine x login y password z", "is a file of credentials"),
        ("root/.ssh/id_ed25519", b"x", "is a file of credentials"),
        ("etc/pip.conf", b"[global]", "is a file of credentials"),
        ("opt/slimqwen/.cache/huggingface/token", b"x", "is a file of credentials"),
        ("opt/notes.txt", b"token: hf_" + b"a" * 34, "a Hugging Face token"),
        ("srv/x.sh", b"export OPENAI_API_KEY=sk-proj-" + b"Ab1" * 12, "an API key"),
        ("srv/key", b"-----BEGIN " + b"OPENSSH PRIVATE KEY-----\nb3BlbnNz", "a private key"),
        ("usr/lib/x/sources.list", b"deb https://me:" + b"pass1@host.example/ x", "an address with a password"),
    ],
)  # fmt: skip
def test_secrets_are_found_wherever_they_lie(look, name, data, kind):
    result = look(added={f"./{name}": data})
    assert kind in result["no secrets"][0]
    assert name in result["no secrets"][0]


def test_what_a_package_brought_itself_is_no_secret_and_what_was_put_there_is(look):
    import base64
    import hashlib

    key = b"-----BEGIN " + b"PRIVATE KEY-----\nMIIE"
    digest = base64.urlsafe_b64encode(hashlib.sha256(key).digest()).rstrip(b"=")
    packages = "./opt/slimqwen/.venv/lib/python3.11/site-packages"
    record = {f"{packages}/web-1.dist-info/RECORD": b"web/test.key,sha256=" + digest + b",40\n"}
    assert look(added={f"{packages}/web/test.key": key, **record}) == {}
    assert "no secrets" in look(added={f"{packages}/web/other.key": key, **record})


def test_a_secret_among_variables_labels_or_steps_is_found(look, settings):
    token = "hf_" + "b" * 34
    variables = dataclasses.replace(settings, environment={**settings.environment, "VLLM_API_KEY": "x"})
    assert look(settings=variables) == {"no secrets": ("the variable VLLM_API_KEY is set",)}
    steps = dataclasses.replace(settings, history=(f"RUN curl -H {token}",))
    assert "a Hugging Face token" in look(settings=steps)["no secrets"][0]
    assert token not in str(look(settings=steps))


def test_a_changed_flag_is_found_in_the_file_and_in_the_resolved_command(look, description):
    name = "experiments/child/config.env"
    assert look(replaced={name: b"VLLM_MODEL=weights/child\n"})["files"] == (
        f"{name} is not the file that image.json lists",
    )
    argv = [*description.command.argv, "--max-num-seqs", "64"]
    other = description.model_copy(
        update={"command": description.command.model_copy(update={"argv": tuple(argv)})}
    )
    result = look(replaced={"image.json": other.model_dump_json().encode()})
    assert result == {"same flags as here": ("only the image has --max-num-seqs 64",)}


def test_another_checkpoint_library_or_a_file_that_nobody_listed_is_found(look, description):
    weights = "weights/child/model.safetensors"
    library = "slimqwen/serving/server.py"
    expected = description.model_copy(
        update={"files": description.files | {library: "0" * 64}, "checkpoint": "1" * 64}
    )
    result = look(expected=expected, replaced={weights: None}, added={"./opt/slimqwen/extra.py": b"1"})
    assert result["files"] == (f"{weights} is missing", "extra.py is not in image.json")
    assert result["same variant, code and checkpoint as here"] == (
        f"checkpoint is {description.checkpoint}, here it is {'1' * 64}",
        f"{library} is not what it is here",
    )


def test_a_compile_cache_that_is_not_the_one_described_is_found(look, description):
    cache = {
        "machine": {"environment": "/elsewhere/.venv"},
        "device": "",
        "flags": {},
        "environment": {},
        "graphs": {},
        "files": {},
        "archive_sha256": "2" * 64,
    }
    files = {f"weights/child/compile_cache.{kind}": "2" * 64 for kind in ("json", "tar.gz")}
    other = description.model_copy(update={"cache": "2" * 64, "files": description.files | files})
    result = look(
        replaced={"image.json": other.model_dump_json().encode()},
        added={
            "./opt/slimqwen/weights/child/compile_cache.json": as_json(cache),
            "./opt/slimqwen/weights/child/compile_cache.tar.gz": b"not it",
        },
    )
    assert result["compile cache"] == (
        "compile_cache.json, image.json and compile_cache.tar.gz come from different bakings",
        "it was made with the environment /elsewhere/.venv, the image's is /opt/slimqwen/.venv",
    )


@pytest.mark.parametrize("user", ["", "root", "0", "0:0"])
def test_root_is_found(look, settings, user):
    assert "it runs as" in look(settings=dataclasses.replace(settings, user=user))["no root"][0]


def test_a_user_without_a_number_is_found(look, settings):
    assert (
        "only tell that a number" in look(settings=dataclasses.replace(settings, user="serve"))["no root"][0]
    )


def test_what_may_be_written_is_found(look):
    assert look(added={"./usr/local/x": b""}, mode=0o666)["nothing that anyone may write"] == (
        "usr/local/x has mode 666",
    )
    own = look(added={"./opt/slimqwen/.venv/bin/x": b""}, uid=USER)
    assert "belongs to uid 10001" in own["nothing of its own that its user may write"][0]
    assert look(added={"./opt/slimqwen/.cache/x": b""}, uid=USER) == {}


def test_labels_network_health_and_entry_point_are_held_to_what_they_should_be(look, settings):
    other = dataclasses.replace(
        settings,
        labels={**settings.labels, "slimqwen.checkpoint": "3" * 64},
        environment={"HOME": "/opt/slimqwen/.cache"},
        healthcheck=(),
        entrypoint=("vllm", "serve"),
    )
    result = look(settings=other)
    assert result["labels"][0].startswith(f"slimqwen.checkpoint is {'3' * 64}, image.json says")
    assert len(result["no network, health check, entry point"]) == 4


def test_an_image_that_this_did_not_build_is_told_so(look):
    assert look(replaced={"image.json": None})["description"] == (
        "there is no image.json; `slimqwen image build` builds one",
    )


NVCC = ".venv/lib/python3.11/site-packages/nvidia/cu13/bin/nvcc"


@pytest.mark.parametrize(
    ("tools", "mode", "path", "missing"),
    [
        ((NVCC, ".venv/bin/ninja"), 0o755, "{root}/.venv/bin:/usr/bin", ()),
        ((NVCC,), 0o755, "{root}/.venv/bin:/usr/bin", ("ninja is not",)),
        ((NVCC, ".venv/bin/ninja"), 0o644, "{root}/.venv/bin", ("ninja is not", "nvcc is not")),
        ((NVCC, ".venv/bin/ninja"), 0o755, "/usr/bin", ("PATH lacks",)),
    ],
)
def test_a_cuda_image_has_what_flashinfer_compiles_with(
    archive, settings, description, tools, mode, path, missing
):
    there = description.model_copy(update={"platform": "cuda"})
    path = path.format(root=there.root)
    settings = dataclasses.replace(settings, environment={**settings.environment, "PATH": path})
    base = there.root.strip("/")
    planted = archive(
        replaced={"image.json": there.model_dump_json().encode()},
        added={f"./{base}/{tool}": b"\x7fELF" for tool in tools},
        mode=mode,
    )
    result = contract.read(planted, there.root, settings.user)
    reasons = faults(contract.check(result, settings, there)).get("compilers of CUDA code", ())
    assert [fault.startswith(start) for fault, start in zip(reasons, missing, strict=True)] == [True] * len(
        missing
    )


def test_an_image_for_a_cpu_needs_no_compiler_of_cuda_code(look):
    assert "compilers of CUDA code" not in look()
