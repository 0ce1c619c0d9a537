from tinyworld.world import HOP_QUESTIONS, World


def test_one_seed_gives_one_world_and_another_seed_another():
    assert World(3).facts == World(3).facts
    assert World(3).facts != World(4).facts


def test_names_are_unique_across_people_towns_islands_and_rare_words(world):
    names = [name.lower() for name in (*world.people, *world.towns, *world.islands, *world.rare_words)]
    assert len(names) == len(set(names))


def test_the_world_has_enough_facts_and_held_out_questions(world):
    assert len(world.facts) >= 700
    assert len(world.two_hops(held_out=True)) == 4 * len(world.people)


def test_a_held_out_question_is_never_also_a_training_question(world):
    held = {hop.question for hop in world.two_hops(held_out=True)}
    trained = {hop.question for hop in world.two_hops(held_out=False)}
    assert held.isdisjoint(trained)
    assert len(held | trained) == len(world.people) * len(HOP_QUESTIONS)


def test_every_person_keeps_a_trained_question_by_home_and_by_teacher(world):
    for person in world.people:
        trained = {
            hop.first.attribute for hop in world.two_hops(held_out=False) if hop.first.entity == person
        }
        assert trained == {"home", "mentor"}


def test_a_two_hop_answer_follows_both_facts(world):
    for hop in world.two_hops(held_out=True)[:50]:
        middle = world.value(hop.first.entity, hop.first.attribute)
        assert hop.answer == world.value(middle, hop.second.attribute)
        assert hop.first.entity in hop.question
        assert middle not in hop.question
