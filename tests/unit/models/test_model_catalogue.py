import re
import subprocess
import sys

import pytest

from tuner.models import ModelSpec, ModelSpecError, count_parameters, get_model, model_names
from tuner.models.catalogue import read_entry

REQUIRED = [
    "llama3-8b",
    "llama3-70b",
    "llama3.1-405b",
    "qwen3-8b",
    "qwen3-30b-a3b",
    "qwen3-235b-a22b",
    "mixtral-8x7b",
    "deepseek-v2-lite",
    "deepseek-v3",
    "gpt-oss-20b",
    "gpt-oss-120b",
    "nemotron4-15b",
    "nemotron4-340b",
    "nemotron-h-8b",
    "nemotron-h-56b",
    "nemotron-3-nano-30b-a3b",
    "qwen3-next-80b-a3b",
    "gpt3-175b",
    "tiny-dense",
    "tiny-gqa",
    "tiny-moe",
    "tiny-mla-moe",
    "quickstart-gpt",
]
OWN = {name for name in REQUIRED if name.startswith("tiny-")} | {"quickstart-gpt"}
COARSE = {
    "nemotron4-15b": 0.004,  # 12.5 billion
    "nemotron-h-8b": 0.0625,
    "nemotron-h-56b": 0.009,
    "nemotron-nano-v2-9b": 0.056,
    "nemotron-nano-v2-12b": 0.042,
}
"""Half a unit of the last digit of totals that are published more coarsely than to 0.1 %."""
PUBLISHED = [name for name in model_names() if name not in OWN]


def test_the_catalogue_holds_the_models_people_tune():
    assert set(REQUIRED) <= set(model_names())


@pytest.mark.parametrize("name", model_names())
def test_every_entry_has_a_plain_name_a_source_and_known_keys(name):
    assert re.fullmatch(r"[a-z0-9.]+(-[a-z0-9.]+)*", name)
    entry = read_entry(name)
    assert set(entry) <= {"model", "source", "published_parameters", "aliases"}
    assert len(entry["source"]) > 20
    assert get_model(name).name == name


def published_count(name: str, kind: str) -> int:
    """The part of our count that the publisher's figure speaks of."""
    counts = count_parameters(get_model(name))
    return {
        "total": counts.total,
        "without_prediction": counts.total - counts.prediction,
        "without_embedding": counts.total - counts.embedding - counts.output_layer,
        "with_prediction_copies": counts.total + counts.embedding + counts.output_layer,
    }[kind]


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_count_matches_the_published_total(name):
    """To 0.1 %, and to half a digit where a publisher gives fewer.

    What a figure includes stands in the entry's `definition`.
    """
    published = read_entry(name)["published_parameters"]
    assert published["source"]
    assert published["definition"]
    tolerance = published["relative_tolerance"]
    assert tolerance == COARSE.get(name, 0.001)
    count = published_count(name, published.get("counts", "total"))
    assert count == pytest.approx(published["total"], rel=tolerance)


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_total_published_to_the_last_digit_is_met_but_for_buffers(name):
    """Checkpoints also hold balancing biases and rotary frequencies: at most some thousands."""
    published = read_entry(name)["published_parameters"]
    if published["total"] % 1_000_000 == 0:
        pytest.skip("published rounded")
    missing = published["total"] - published_count(name, published.get("counts", "total"))
    spec = get_model(name)
    layers = sum(spec.moe_layer_pattern) + (spec.mtp_num_layers or 0)
    if name == "deepseek-v3":
        layers -= 1  # its figure leaves multi-token prediction out
    biases = layers * (spec.num_moe_experts or 0) if spec.moe_router_enable_expert_bias else 0
    frequencies = 27 * 64 if name == "moonlight-16b-a3b" else 0
    assert missing == biases + frequencies


@pytest.mark.parametrize(
    ("name", "active"),
    [
        # Table 1 of the Qwen3 technical report, https://arxiv.org/abs/2505.09388: 3.3B and 22B
        ("qwen3-30b-a3b", 3.3e9),
        ("qwen3-235b-a22b", 22e9),
        # Mixtral of Experts, https://arxiv.org/abs/2401.04088: 13B
        ("mixtral-8x7b", 13e9),
        # DeepSeek-V2, https://arxiv.org/abs/2405.04434: 21B; DeepSeek-V3, 2412.19437: 37B
        ("deepseek-v2", 21e9),
    ],
)
def test_active_parameters_are_near_the_published_figures(name, active):
    assert count_parameters(get_model(name)).active == pytest.approx(active, rel=0.03)


def test_gpt_oss_active_parameters_leave_only_the_embedding_out():
    """Table 1 of the gpt-oss model card, https://arxiv.org/abs/2508.10925: 5.13B and 3.61B."""
    for name, published in (("gpt-oss-120b", 5.13e9), ("gpt-oss-20b", 3.61e9)):
        counts = count_parameters(get_model(name))
        assert counts.active - counts.embedding == pytest.approx(published, abs=0.005e9)


@pytest.mark.parametrize(
    ("spelling", "name"),
    [
        ("Llama-3-8B", "llama3-8b"),
        ("LLAMA3_8B", "llama3-8b"),
        ("meta-llama/Meta-Llama-3-8B", "llama3-8b"),
        ("meta-llama/Meta-Llama-3-8B-Instruct", "llama3-8b"),
        ("meta-llama/Llama-2-7b-hf", "llama2-7b"),
        ("meta-llama/Llama-3.1-405B", "llama3.1-405b"),
        ("Qwen/Qwen3-30B-A3B", "qwen3-30b-a3b"),
        ("Qwen3_235B_a22B", "qwen3-235b-a22b"),
        ("mistralai/Mixtral-8x7B-v0.1", "mixtral-8x7b"),
        ("deepseek-ai/DeepSeek-V2-Lite", "deepseek-v2-lite"),
        ("deepseek_v3", "deepseek-v3"),
        ("openai/gpt-oss-120b", "gpt-oss-120b"),
        ("Nemotron-4-340B", "nemotron4-340b"),
        ("GPT3-175B", "gpt3-175b"),
    ],
)
def test_common_spellings_find_the_model(spelling, name):
    assert get_model(spelling).name == name


def test_no_spelling_leads_to_two_models():
    from tuner.models.catalogue import _normalise

    owners: dict[str, str] = {}
    for name in model_names():
        for spelling in {name, *read_entry(name).get("aliases", ())}:
            assert owners.setdefault(_normalise(spelling), name) == name


@pytest.mark.parametrize(
    ("wrong", "near"),
    [("lama3-8b", "llama3-8b"), ("qwen3-30b", "qwen3-30b-a3b"), ("", "the nearest are")],
)
def test_an_unknown_name_lists_near_ones(wrong, near):
    with pytest.raises(ModelSpecError, match=re.escape(near)) as caught:
        get_model(wrong)
    assert "\n" not in str(caught.value)


def test_a_mapping_describes_a_model_of_its_own():
    flat = get_model("tiny-moe").to_flat()
    assert get_model(flat) == ModelSpec.from_flat(flat, name="custom")
    assert get_model({**flat, "name": "mine"}).name == "mine"


@pytest.mark.parametrize("wrong", [None, 3, ["llama3-8b"], {"name": 3}])
def test_anything_else_is_refused(wrong):
    with pytest.raises(ModelSpecError, match="model"):
        get_model(wrong)


def test_reading_a_model_imports_nothing_heavy():
    code = (
        "import sys; from tuner.models import get_model; get_model('gpt-oss-120b');"
        "print([m for m in ('torch', 'numpy', 'ray', 'mlflow', 'megatron') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
