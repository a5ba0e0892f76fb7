"""Search spaces: conditional axes, composition, and errors that name the axis."""

from pathlib import Path
from random import Random

import pytest

from tuner.candidate import Candidate
from tuner.errors import InputError
from tuner.search.space import label_of, load_space, parse_space, shipped_folder

CONDITIONAL = {
    "axes": {
        "recompute_modules": {
            "subsets": ["core_attn", "mlp"],
            "when": {"recompute_granularity": "selective"},
        },
        "recompute_granularity": [None, "selective", "full"],
        "recompute_num_layers": {"values": [1, 2], "when": {"recompute_granularity": "full"}},
    },
    "fixed": {"recompute_method": "uniform"},
}


class Recorder:
    """Answers every question with the next choice in turn and notes what was asked."""

    def __init__(self, picks):
        self.picks, self.asked = picks, []

    def suggest_categorical(self, name, choices):
        self.asked.append(name)
        return self.picks.get(name, choices[0])


def test_an_axis_is_asked_for_only_under_its_condition():
    space = parse_space(CONDITIONAL, where="x")
    recorder = Recorder({"recompute_granularity": "full", "recompute_num_layers": "2"})
    flat = space.suggest(recorder)
    assert recorder.asked == ["recompute_granularity", "recompute_num_layers"]
    assert flat == {
        "recompute_method": "uniform",
        "recompute_granularity": "full",
        "recompute_num_layers": 2,
    }


def test_enumeration_lists_every_point_once():
    points = list(parse_space(CONDITIONAL, where="x").enumerate())
    assert len(points) == 1 + 4 + 2
    assert len({repr(sorted(p.items())) for p in points}) == len(points)


def test_points_are_counted_as_they_are_listed_also_under_conditions_on_mappings():
    space = parse_space(
        {
            "axes": {
                "env": [{"A": "1"}, {}],
                "micro_batch_size": {"values": [1, 2], "when": {"env": [{"A": "1"}]}},
                "sequence_parallel": [True, False],
            }
        },
        where="x",
    )
    assert space.combinations() == len(list(space.enumerate()))


def test_points_are_all_points_shuffled_or_as_many_random_draws():
    space = parse_space(CONDITIONAL, where="x")
    everything = list(space.points(100, Random(1)))
    assert sorted(map(repr, everything)) == sorted(map(repr, space.enumerate()))
    drawn = list(space.points(3, Random(1)))
    assert len(drawn) == 3
    assert drawn == list(space.points(3, Random(1)))
    assert all(point in everything for point in drawn)


def test_labels_undo_suggest_for_every_point_of_the_shipped_cpu_space():
    space = load_space("cpu")
    for flat in space.enumerate():
        labels = space.labels(flat)
        assert space.suggest(Recorder(labels)) == flat


def test_labels_survive_the_canonical_form_of_a_candidate():
    space = load_space("cpu")
    for flat in space.enumerate():
        canonical = Candidate.from_flat(flat).to_flat()
        assert Candidate.from_flat(space.suggest(Recorder(space.labels(canonical)))).key == (
            Candidate.from_flat(flat).key
        )


def test_a_candidate_that_leaves_fields_out_has_their_defaults_there():
    space = load_space("dense")
    labels = space.labels({"tensor_model_parallel_size": 2, "sequence_parallel": True})
    assert labels["cuda_graph_impl"] == "none"
    assert labels["cpu_offloading"] == "false"
    assert labels["micro_batch_size"] == "1"
    assert labels["env.PYTORCH_CUDA_ALLOC_CONF"] == label_of(None)


def test_environment_variables_are_axes_of_their_own():
    space = parse_space({"axes": {"env.A": [None, "1"], "env.B": ["x"]}}, where="x")
    assert list(space.enumerate()) == [{"env": {"B": "x"}}, {"env": {"A": "1", "B": "x"}}]
    assert space.labels({"env": {"A": "1", "B": "x"}}) == {"env.A": "1", "env.B": "x"}


def test_a_job_replaces_removes_and_fixes_included_axes():
    space = parse_space(
        {
            "includes": ["cpu"],
            "axes": {
                "micro_batch_size": [2],
                "recompute_num_layers": None,
                "tp_comm_overlap": [True],
            },
            "fixed": {"recompute_method": "block"},
        },
        where="job",
    )
    fields = {axis.field: axis.values for axis in space.axes}
    assert fields["micro_batch_size"] == (2,)
    assert fields["tp_comm_overlap"] == (True,)
    assert "recompute_num_layers" not in fields
    assert "recompute_method" not in fields
    assert space.fixed["recompute_method"] == "block"


@pytest.mark.parametrize("name", sorted(p.stem for p in shipped_folder().glob("*.yaml")))
def test_every_shipped_space_loads_and_says_what_it_is_for(name):
    space = load_space(name)
    assert space.axes
    assert space.description


def test_a_space_file_includes_its_neighbours(tmp_path: Path):
    (tmp_path / "a.yaml").write_text("axes: {micro_batch_size: [1, 2]}\n")
    (tmp_path / "b.yaml").write_text("includes: [a.yaml]\nfixed: {context_parallel_size: 1}\n")
    space = load_space("b.yaml", base_folder=tmp_path)
    assert [axis.field for axis in space.axes] == ["micro_batch_size"]


@pytest.mark.parametrize(
    ("document", "words"),
    [
        ({"axis": {}}, ["unknown key 'axis'", "did you mean 'axes'"]),
        ({"axes": {"a": 3}}, ["axes.a", "3 is not a list"]),
        ({"axes": {"a": []}}, ["axes.a"]),
        ({"axes": {"a": [1, 1]}}, ["axes.a", "twice"]),
        ({"axes": {"a": {"valeus": [1]}}}, ["axes.a", "did you mean 'values'"]),
        ({"axes": {"a": {"values": [1], "when": {"bb": 1}}, "b": [1]}}, ["axes.a.when", "'bb'"]),
        ({"axes": {"a": {"values": [1], "when": {"a": 1}}}}, ["axes.a.when"]),
        ({"axes": [1]}, ["axes", "not a mapping"]),
        ({"includes": ["dens"]}, ["no search space 'dens'", "dense"]),
        ({"includes": ["nowhere.yaml"]}, ["nowhere.yaml", "no such file"]),
        ({"axes": {"a": {"subsets": ["x"], "max_modules": -1}}}, ["max_modules"]),
        ({"axes": {"a": {"subsets": ["x"], "min_modules": "1"}}}, ["min_modules"]),
        ({"axes": {"a": {"subsets": ["x"], "min_modules": 2}}}, ["axes.a", "no subset"]),
        ({"axes": {"a": {"subsets": ["x"], "min_modules": True}}}, ["min_modules"]),
        ({"fixed": {"env": 3}}, ["fixed.env", "not a mapping"]),
        ({"axes": {"env": [1, 2]}}, ["axes.env", "not a mapping"]),
        ({"axes": {"a": {"values": [1], "min_modules": 1}}}, ["min_modules", "subsets"]),
    ],
)
def test_a_bad_space_names_the_place_and_the_fix(document, words):
    with pytest.raises(InputError) as error:
        parse_space(document, where="space.yaml")
    assert all(word in str(error.value) for word in words), str(error.value)


def test_a_space_that_includes_itself_is_refused(tmp_path: Path):
    (tmp_path / "a.yaml").write_text("includes: [a.yaml]\n")
    with pytest.raises(InputError, match="includes itself"):
        load_space("a.yaml", base_folder=tmp_path)


def test_labels_tell_values_of_different_kinds_apart():
    values = [None, True, 1, "selective", ("core_attn",), ()]
    assert len({label_of(value) for value in values}) == len(values)
