"""Nothing that goes to MLflow carries a credential that was planted in it."""

from __future__ import annotations

from pathlib import Path

from tuner.redaction import MARK
from tuner.tracking.artifacts import clean_copy

SECRET = "planted-secret-0123456789"


def test_copies_of_artifacts_carry_no_credentials(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", SECRET)
    source, target = tmp_path / "0001", tmp_path / "copies"
    (source / "logs").mkdir(parents=True)
    target.mkdir()
    (source / "logs" / "stderr.log").write_text(f"login {SECRET} ok\nstep 1\n")
    (source / "job.yaml").write_text("tracking: {uri: 'http://me:pass-word@mlflow:5000'}\n")
    (source / "picture.png").write_bytes(b"\x89PNG\x00\xff")
    copy = clean_copy(source, target)
    assert (copy / "logs" / "stderr.log").read_text() == f"login {MARK} ok\nstep 1\n"
    assert "pass-word" not in (copy / "job.yaml").read_text()
    assert (copy / "picture.png").read_bytes() == b"\x89PNG\x00\xff"
    assert SECRET in (source / "logs" / "stderr.log").read_text()  # the user's own file stays


def test_links_out_of_the_study_are_not_followed(tmp_path: Path) -> None:
    outside = tmp_path / "outside.txt"
    outside.write_text("private")
    source, target = tmp_path / "trial", tmp_path / "copies"
    source.mkdir()
    target.mkdir()
    (source / "link.txt").symlink_to(outside)
    (source / "own.txt").write_text("own")
    copy = clean_copy(source, target)
    assert [file.name for file in copy.iterdir()] == ["own.txt"]
