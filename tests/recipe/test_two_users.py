"""Two users, whose files are their group's, run one recipe at once: it is made once, and who waits is told for whom."""

import re

from tests.two_users import USERS, folder, python, run_as  # noqa: F401  (fixtures)


def test_one_makes_the_output_and_the_other_waits_for_a_named_process_and_reuses_it(folder, python):  # noqa: F811
    slimqwen = [python, "-m", "slimqwen.cli"]
    new = "variant new --name mine --base tiny --stage quantise_lm_head"
    made = run_as(USERS[0], [*slimqwen, *new.split()], folder)
    assert made.wait(300) == 0, made.communicate()
    both = [run_as(user, [*slimqwen, "recipe", "run", "mine"], folder) for user in USERS]
    said = [process.communicate(timeout=300)[0] for process in both]
    assert [process.returncode for process in both] == [0, 0], said
    assert sorted(word for text in said for word in re.findall(r"quantise_lm_head +(done|reused)", text)) == [
        "done", "reused",
    ]  # fmt: skip
    (told,) = re.findall(r"another run is at work on quantise_lm_head \(process (\d+) of ", "".join(said))
    assert int(told) in [process.pid for process in both]
    assert (
        len([path for path in (folder / "ours" / "weights" / "store").iterdir() if path.name[0] != "."]) == 1
    )
    cleaned = run_as(USERS[1], [*slimqwen, "recipe", "clean"], folder)
    assert "freed 0.0 MB" in cleaned.communicate(timeout=120)[0]
