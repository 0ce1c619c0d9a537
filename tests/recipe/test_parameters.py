"""What is said of a stage's parameters."""

from slimqwen.recipe.parameters import list_parameters
from slimqwen.recipe.registry import STAGES


def test_parameters_say_what_they_mean_and_allow():
    calibrate = {each.name: each for each in list_parameters(STAGES["calibrate"].parameters)}
    assert calibrate["group_size"].allowed == "32 | 64 | 128"
    assert calibrate["group_size"].value == 32
    assert (
        calibrate["group_size"].meaning
        == "number of weights of fewer than 8 bits in a row that share a scale"
    )
    assert calibrate["layer_error_ratio"].allowed == "more than 0"
    corpus = {each.name: each for each in calibrate["corpus"].parts}
    assert list(corpus) == ["path", "seed", "sequences", "length"]
    assert corpus["seed"].meaning == "seed of the order of the text's documents"
    depth = next(list_parameters(STAGES["redistill_mtp"].parameters))
    assert (depth.name, depth.allowed) == ("depth", "at least 1, at most 8")


def test_every_parameter_of_every_stage_has_a_meaning():
    def nameless(parameters):
        for each in parameters:
            yield from ([each.name] if not each.meaning else [])
            yield from nameless(each.parts)

    assert {name: [*nameless(list_parameters(stage.parameters))] for name, stage in STAGES.items()} == {
        name: [] for name in STAGES
    }
