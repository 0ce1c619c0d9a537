"""What items are called, and how the ends of responses are scored."""

from slimqwen.evals.suites.scored import Item, TaskRun, item_hash, score_endings
from slimqwen.evals.suites.suite import SuiteTask


def test_an_item_has_one_name_on_every_machine_whatever_the_order_of_its_fields():
    """Records name their items by it, so another name would pair none of them."""
    content = ["tinyworld_facts", {"question": "Où?", "answer": "là"}]
    assert (
        item_hash(content)
        == item_hash([content[0], dict(reversed(content[1].items()))])
        == "13363624990d487d"
    )
    assert item_hash([*content, 1]) != item_hash(content)


def test_a_response_ends_if_it_is_neither_cut_nor_loops():
    chats, loops = (
        SuiteTask(task=name, measure="exact_match", non_inferiority_margin=0.1) for name in ("chats", "loops")
    )
    ways = [(False, False), (True, False), (False, True)]
    items = [
        Item("chats", number, f"item {number}", 0.5, 1, "Yes.", truncated, looping=looping, output_tokens=2)
        for number, (truncated, looping) in enumerate(ways)
    ]
    scored = score_endings(loops, TaskRun(chats, items, 9, {}), {"thinking": False})
    assert scored.items == [
        Item("loops", number, f"item {number}", value, 1, None, None)
        for number, value in enumerate((1.0, 0.0, 0.0))
    ]
    assert (scored.task, scored.available_count, scored.settings) == (loops, 9, {"thinking": False})
