"""What items are called, and how the ends of responses are scored."""

from slimqwen.evals.suites.scored import item_hash


def test_an_item_has_one_name_on_every_machine_whatever_the_order_of_its_fields():
    """Records name their items by it, so another name would pair none of them."""
    content = ["tinyworld_facts", {"question": "Où?", "answer": "là"}]
    assert (
        item_hash(content)
        == item_hash([content[0], dict(reversed(content[1].items()))])
        == "13363624990d487d"
    )
    assert item_hash([*content, 1]) != item_hash(content)
