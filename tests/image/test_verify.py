"""Faults are found in root filesystems made by hand, in settings and starts; a right image has none."""

import dataclasses

import pytest

from slimqwen.image import verify
from tests.image.conftest import USER


@pytest.fixture
def look(archive, content):
    """Read an archive with planted faults: files, secrets and writable paths that are wrong."""

    def look_into(**planted):
        found = verify.read_contents(archive(**planted), content.root, str(USER))
        return verify._file_faults(found.files, content.digests()), found.secrets, found.writable

    return look_into


def test_a_right_image_has_no_fault(look, image, content):
    assert look() == ([], [], [])
    assert list(verify._setting_faults(image, content)) == []


def test_changed_missing_and_unlisted_files_are_found(look, content):
    planted = {
        "experiments/child/config.env": b"VLLM_MODEL=weights/child\n",
        "weights/child/model.safetensors": None,
    }
    files, secrets, writable = look(replaced=planted, added={"./opt/slimqwen/extra.py": b"1"})
    assert files == [
        "experiments/child/config.env is not as in this checkout",
        "extra.py is not in this checkout",
        "weights/child/model.safetensors is missing",
    ]
    assert (secrets, writable) == ([], [])
    elsewhere = {
        f"./opt/slimqwen/{name}": b""
        for name in (
            "experiments/child/plan_2026-01-01T000000Z.json",
            "weights/child/compile_cache.json",
            f"weights/store/.compile_caches/{'ab' * 32}",
        )
    }
    assert look(added=elsewhere | {"./opt/slimqwen/.cache/x": b"", "./opt/slimqwen/.venv/x.py": b""}) == (
        [],
        [],
        [],
    )


@pytest.mark.parametrize(
    "name",
    [
        "home/one/.netrc",
        "root/.ssh/id_ed25519",
        "etc/pip.conf",
        "opt/slimqwen/.cache/huggingface/token",
        "x/.env",
    ],
)
def test_files_of_credentials_are_found_wherever_they_lie(look, name):
    assert look(added={f"./{name}": b"x"})[1] == [f"{name} is a file of credentials"]


def test_what_may_be_written_is_found(look):
    assert look(added={"./usr/local/x": b""}, mode=0o666)[2] == [
        "usr/local/x has mode 666 and belongs to uid 0"
    ]
    own = look(added={"./opt/slimqwen/.venv/bin/x": b""}, uid=USER)[2]
    assert own == ["opt/slimqwen/.venv/bin/x has mode 644 and belongs to uid 10001"]
    assert look(added={"./opt/slimqwen/.cache/x": b""}, uid=USER)[2] == []


@pytest.mark.parametrize(
    ("changed", "fault"),
    [
        ({"User": ""}, "it runs as root"),
        ({"User": "root"}, "it runs as root"),
        ({"User": "0:0"}, "it runs as 0"),
        ({"User": "serve"}, "it runs as serve"),
        ({"Env": []}, "SLIMQWEN_VARIANT is not set, not child"),
        ({"Healthcheck": None}, "no HEALTHCHECK asks /ping"),
        ({"Entrypoint": ["vllm", "serve"]}, 'the entry point is ["vllm", "serve"]'),
    ],
)
def test_settings_that_are_wrong_are_found(image, content, changed, fault):
    other = dataclasses.replace(image, settings={**image.settings, **changed})
    assert next(verify._setting_faults(other, content)).startswith(fault)


SEEN = {"answers_of_ping": [0, 503, 200], "message": {"content": "I am"}, "exit_code": 0}
LOADED = "INFO [compile_watch.py:118] Graph backbone loaded from the compile cache in 0.41 s\n"
COMPILED = "INFO [compile_watch.py:118] Graph eagle_head compiled in 12.50 s (no such key)\n"


@pytest.mark.parametrize(
    ("changed", "log", "has_cache", "faults"),
    [
        ({}, "", False, []),
        ({}, LOADED, True, []),
        (
            {"answers_of_ping": [0], "exit_code": 1},
            "",
            False,
            ["it was never ready (responses of /ping: [0], exit code 1)"],
        ),
        (
            {"answers_of_ping": [0, 200]},
            "",
            False,
            ["it was ready before its warm-up: /ping never returned 503"],
        ),
        ({"message": {"content": None}}, "", False, ["it did not respond to a chat"]),
        ({"message": {"reasoning": "hm"}}, "", False, []),
        ({"exit_code": -9}, "", False, ["after SIGTERM it ended with exit code -9"]),
        ({}, "", True, ["it loaded no compiled graph"]),
        ({}, LOADED + COMPILED, True, ["it compiled eagle_head in 12.5 s (no such key)"]),
    ],
)
def test_what_was_wrong_with_a_start_is_said(changed, log, has_cache, faults):
    assert list(verify.server_faults(SEEN | changed, log, has_cache=has_cache)) == faults
