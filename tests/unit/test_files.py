"""Files that users give: what is refused, in one line that names the place."""

from __future__ import annotations

from pathlib import Path

import pytest

from tuner.errors import InputError
from tuner.files import MAX_BYTES, parse_yaml_mapping, read_text
from tuner.formats.shell import read_script

BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{new}: &{new} [{', '.join(9 * [f'*{old}'])}]\n"
    for old, new in zip("abcdefg", "bcdefgh", strict=True)
)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("a: &a {b: *a}", "contains itself"),
        (BOMB, "too large"),
        ("a: 1\nb: 2\na: 3", "'a' is given twice"),
    ],
)
def test_what_is_no_plain_tree_is_refused_with_its_line(text, reason) -> None:
    with pytest.raises(InputError, match=f"job.yaml: line .*{reason}"):
        parse_yaml_mapping(text, where="job.yaml")


def test_aliases_and_merges_are_read() -> None:
    text = "base: &base {x: 1}\nmore: {<<: *base, y: 2}\nsame: *base"
    assert parse_yaml_mapping(text, where="") == {
        "base": {"x": 1},
        "more": {"x": 1, "y": 2},
        "same": {"x": 1},
    }


def test_a_file_without_end_is_not_read_to_its_end() -> None:
    with pytest.raises(InputError, match=f"larger than {MAX_BYTES >> 20} MiB"):
        read_text(Path("/dev/zero"))


def test_variables_of_a_script_do_not_grow_without_measure() -> None:
    lines = ["A=aaaaaaaaaa", *["A=" + 12 * "$A"] * 8, "python train.py --num-layers $A"]
    with pytest.raises(ValueError, match="variable A"):
        read_script("\n".join(lines))
