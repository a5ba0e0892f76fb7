"""Job files: shipped ones load, and a wrong one is answered in a line that helps."""

import copy
from pathlib import Path

import jsonschema
import pytest
import yaml

from tuner.errors import InputError
from tuner.job import job_schema, load_job, parse_job

GOOD = {
    "name": "x",
    "model": "llama3-8b",
    "cluster": {"gpus_per_node": 8},
    "workload": {"seq_length": 4096, "global_batch_size": 64},
    "space": {"includes": ["dense"]},
}


def changed(path, value):
    document = copy.deepcopy(GOOD)
    *parents, last = path.split(".")
    section = document
    for name in parents:
        section = section.setdefault(name, {})
    section[last] = value
    return document


def test_the_quickstart_job_loads_by_name_and_by_path():
    by_name = load_job(Path("cpu_quickstart"))
    import search_spaces

    path = Path(search_spaces.__file__).parent / "jobs" / "cpu_quickstart.yaml"
    assert load_job(path) == by_name
    assert by_name.cluster.device == "cpu"
    assert by_name.cluster.memory_limit_gib is not None


def test_the_json_schema_accepts_the_shipped_jobs_and_documents_every_field():
    import search_spaces

    schema = job_schema()
    jobs = list((Path(search_spaces.__file__).parent / "jobs").glob("*.yaml"))
    assert jobs
    for path in jobs:
        jsonschema.validate(yaml.safe_load(path.read_text()), schema)
    sections = [schema, *schema["$defs"].values()]
    undocumented = [
        name
        for section in sections
        for name, field in section["properties"].items()
        if "description" not in field and "$ref" not in str(field)
    ]
    assert undocumented == []


@pytest.mark.parametrize(
    ("document", "words"),
    [
        (changed("cluster.gpus_per_nod", 8), ["cluster", "'gpus_per_nod'", "'gpus_per_node'"]),
        (changed("modle", "x"), ["'modle'", "'model'"]),
        (changed("cluster.gpus_per_node", 0), ["cluster.gpus_per_node", "0"]),
        (changed("cluster.gpus_per_node", "eight"), ["cluster.gpus_per_node", "eight"]),
        (changed("cluster.memory_limit_gib", float("nan")), ["cluster.memory_limit_gib"]),
        (changed("workload", {"seq_length": 1}), ["workload.global_batch_size", "required"]),
        (changed("name", "../up"), ["name"]),
        (changed("search.sampler", "magic"), ["search.sampler", "magic"]),
        (changed("model", 7), ["model"]),
        ({}, ["required"]),
    ],
)
def test_a_bad_job_names_the_field_in_one_line(document, words):
    with pytest.raises(InputError) as error:
        parse_job(document, where="job.yaml")
    message = str(error.value)
    assert "\n" not in message
    assert message.startswith("job.yaml")
    assert all(word in message for word in words), message


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[1, 2]", "not a mapping"),
        ("", "empty"),
        ("a: [", "not YAML"),
        ("a: !!python/object/apply:os.system [echo]", "not YAML"),
        ("1: 2", "not a name"),
        ("\x00", "not YAML"),
    ],
)
def test_a_file_that_is_no_mapping_is_named(tmp_path: Path, text, words):
    path = tmp_path / "job.yaml"
    path.write_text(text)
    with pytest.raises(InputError, match=words) as error:
        load_job(path)
    assert str(path) in str(error.value)


def test_missing_files_and_folders_are_named(tmp_path: Path):
    with pytest.raises(InputError, match="no such file"):
        load_job(tmp_path / "none.yaml")
    with pytest.raises(InputError, match="directory"):
        load_job(tmp_path)
    (tmp_path / "latin.yaml").write_bytes(b"name: \xff\xfe")
    with pytest.raises(InputError, match="UTF-8"):
        load_job(tmp_path / "latin.yaml")
