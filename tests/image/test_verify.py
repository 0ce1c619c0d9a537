"""What an image says that it would run, held against `make serve`, and what its server's log says of its graphs."""

from slimqwen.image import verify


def test_the_same_dry_run_at_another_path_has_no_difference(content):
    elsewhere = content.dry_run().replace(content.root, "/srv/x")
    assert verify.differences(elsewhere, "/srv/x", content) == []


def test_a_changed_flag_or_variable_is_told_on_both_sides(content):
    changed = (
        content.dry_run()
        .replace("--max-num-seqs 2", "--max-num-seqs 3")
        .replace("DO_NOT_TRACK=1", "DO_NOT_TRACK=0")
    )
    (told,) = [verify.differences(changed, content.root, content)]
    assert told == [
        "only the image has DO_NOT_TRACK=0 --max-num-seqs 3",
        "only here: DO_NOT_TRACK=1 --max-num-seqs 2",
    ]


def test_a_loopback_address_in_the_image_is_a_difference(content):
    deaf = content.dry_run().replace("--host 0.0.0.0", "--host 127.0.0.1")
    assert verify.differences(deaf, content.root, content) == [
        "only the image has --host 127.0.0.1",
        "only here: --host 0.0.0.0",
    ]


def test_an_image_with_a_compile_cache_has_every_graph_from_there(description):
    cached = description.model_copy(update={"cache": "0" * 64})
    loaded = "INFO [compile_watch.py:118] Graph backbone loaded from the compile cache in 0.41 s\n"
    compiled = "INFO [compile_watch.py:118] Graph eagle_head compiled in 12.50 s (no such key)\n"
    assert list(verify.compiled_anew(loaded, cached)) == []
    assert list(verify.compiled_anew(loaded + compiled, cached)) == [
        "eagle_head was compiled in 12.5 s: no such key"
    ]
    assert list(verify.compiled_anew("", cached)) == ["no graph was loaded"]
    assert list(verify.compiled_anew(compiled, description.model_copy(update={"cache": ""}))) == []
