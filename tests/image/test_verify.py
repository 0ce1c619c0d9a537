"""What an image says that it would run, held against `make serve`."""

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
