import pytest

from tuner.errors import InputError
from tuner.precision import PRECISIONS, expand_precision, of_frontend


@pytest.mark.parametrize("name", ["bf16", "fp16", "fp32"])
def test_a_plain_precision_adds_no_fields(name):
    assert expand_precision(name, {"micro_batch_size": 2}) == (name, {"micro_batch_size": 2})


@pytest.mark.parametrize(
    ("short", "fields"),
    [
        ("fp8_cs", {"fp8": "hybrid", "fp8_recipe": "tensorwise", "first_last_layers_bf16": True}),
        ("fp8_ds", {"fp8": "hybrid", "fp8_recipe": "delayed", "fp8_amax_history_len": 1024}),
        ("mxfp8", {"fp8": "e4m3", "fp8_recipe": "mxfp8", "fp8_param_gather": True}),
        ("fp8_sc", {"fp8": "hybrid", "fp8_recipe": "blockwise"}),
        ("nvfp4", {"fp4": "e2m1", "fp4_recipe": "nvfp4"}),
    ],
)
def test_a_short_name_stands_for_a_recipe(short, fields):
    base, config = expand_precision(short, {})
    assert base == "bf16"
    assert fields.items() <= config.items()


def test_fields_of_the_config_win():
    _, config = expand_precision("fp8_cs", {"fp8_param_gather": False})
    assert config["fp8_param_gather"] is False
    assert config["fp8_recipe"] == "tensorwise"


def test_another_recipe_in_the_config_leaves_nothing_of_the_named_one():
    given = {"fp8": "e4m3", "fp8_recipe": "blockwise"}
    assert expand_precision("mxfp8", given) == ("bf16", given)
    assert expand_precision("fp8_cs", {"fp8": None}) == ("bf16", {"fp8": None})


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(InputError, match="mxfp8"):
        expand_precision("fp7", {})
    assert len(set(PRECISIONS)) == len(PRECISIONS)


def test_bridge_hands_its_recipe_to_a_precision_aware_optimizer() -> None:
    aware = {"use_precision_aware_optimizer": True}
    assert of_frontend("bridge", aware)["fp8_recipe"] == "tensorwise"
    assert of_frontend("bridge", {**aware, "fp8_recipe": "delayed"})["fp8_recipe"] == "delayed"
    assert of_frontend("mcore", aware) == of_frontend(None, aware) == aware
    assert of_frontend("bridge", {}) == {}
