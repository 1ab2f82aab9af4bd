"""What the build files promise."""

from __future__ import annotations

import re
import subprocess
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_make_without_a_target_lists_every_target() -> None:
    shown = subprocess.run(["make", "-s"], cwd=ROOT, capture_output=True, text=True, timeout=20, check=True).stdout
    declared = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
    assert [line.split()[0] for line in shown.splitlines()] == declared


def test_every_package_with_code_is_in_the_wheel() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    listed = project["tool"]["setuptools"]["packages"]
    tops = {name.split(".")[0] for name in listed}
    found = [
        str(path.parent.relative_to(ROOT)).replace("/", ".")
        for top in sorted(tops)
        for path in sorted((ROOT / top).rglob("__init__.py"))
    ]
    assert sorted(listed) == sorted(found)


def test_every_dependency_has_an_exact_pin_and_no_pin_names_a_place() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    assert all(re.fullmatch(r"[A-Za-z0-9_.-]+==[0-9][A-Za-z0-9.]*", line) for line in lines)
    pinned = {_normal(line.split("==")[0]) for line in lines}
    wanted = project["dependencies"] + project["optional-dependencies"]["dev"]
    assert {_normal(re.split(r"[^A-Za-z0-9_.-]", need)[0]) for need in wanted} <= pinned


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
