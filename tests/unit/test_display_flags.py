"""`--quiet` and `--no-color` anywhere on the command line."""

import os

import pytest

from tuner.commands.output import coloured, console, take_display_flags


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    for name in ("TUNER_QUIET", "NO_COLOR"):
        monkeypatch.setenv(name, "")


def test_the_flags_are_taken_wherever_they_stand():
    kept = take_display_flags(["check", "--quiet", "a.yaml", "--no-color", "--", "--quiet"])
    assert kept == ["check", "a.yaml", "--", "--quiet"]
    assert os.environ["NO_COLOR"] == "1"
    assert console(stderr=True).quiet
    assert not console().quiet


def test_without_them_nothing_changes():
    assert take_display_flags(["check", "a.yaml"]) == ["check", "a.yaml"]
    assert not console(stderr=True).quiet


def test_text_is_printed_as_it_stands_and_coloured_parts_too(capsys):
    out = console()
    out.print("modules [layernorm] and [/usr/bin]")
    out.print(coloured("a [b]: ", ("no [c]", "red"), " [/d]"))
    assert capsys.readouterr().out == "modules [layernorm] and [/usr/bin]\na [b]: no [c] [/d]\n"
