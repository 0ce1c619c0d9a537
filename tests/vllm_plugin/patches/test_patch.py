"""A row of the table of patches."""

from slimqwen.vllm_plugin.patches.patch import Patch


def test_a_digest_is_that_of_the_version():
    patch = Patch("m", "", "", {"m:same": "a", "m:changed": {"0.32.0": "b", "0.33.0": "c"}})
    assert patch.digests("0.32.0") == {"m:same": "a", "m:changed": "b"}
    assert patch.digests("0.33.0") == {"m:same": "a", "m:changed": "c"}
