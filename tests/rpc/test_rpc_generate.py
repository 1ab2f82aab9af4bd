"""The committed generated code is what `rpc.generate` writes, and the check can fail."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from rpc.generate import PACKAGE, ROOT, main


def test_the_committed_code_is_fresh(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--check"]) == 0, capsys.readouterr().err


def test_stale_code_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    committed = tmp_path / "v1"
    shutil.copytree(ROOT / PACKAGE, committed)
    (committed / "worker_pb2.pyi").write_text("# older\n")
    (committed / "worker_pb2_grpc.py").unlink()
    (committed / "removed_pb2.py").write_text("")
    assert main(["--check"], committed) == 1
    line = capsys.readouterr().err.strip()
    assert line.startswith("stale: removed_pb2.py, worker_pb2.pyi, worker_pb2_grpc.py in rpc/v1; run python -m rpc.gen")
    assert "\n" not in line
    assert main([], committed) == 0
    assert main(["--check"], committed) == 0
    assert (committed / "__init__.py").exists()
