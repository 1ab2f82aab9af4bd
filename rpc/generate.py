"""Generates ``rpc/v1`` from ``proto/rpc/v1``.

    python -m rpc.generate            writes the generated code
    python -m rpc.generate --check    exits 1 when the committed code is not what would be written

Both need the extra ``[dev]`` (grpcio-tools, mypy-protobuf); running Baton does not. The output depends on
the versions of these two, which is why the constraints file pins them.
"""

from __future__ import annotations

import argparse
import importlib.util
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from common.errors import ConfigError

ROOT = Path(__file__).resolve().parent.parent
PROTO = ROOT / "proto"
PACKAGE = Path("rpc/v1")
HANDWRITTEN = ("__init__.py",)
PLUGINS = ("protoc-gen-mypy", "protoc-gen-mypy_grpc")


def generate(output: Path) -> None:
    """Runs protoc on every file of ``proto/rpc/v1``; the code appears in ``output/rpc/v1``.

    Raises ConfigError when a tool is missing or a .proto file is wrong (protoc says where on stderr).
    """
    if importlib.util.find_spec("grpc_tools") is None:
        raise ConfigError("grpcio-tools is not installed; pip install 'baton[dev]'")
    sources = sorted(path.relative_to(PROTO).as_posix() for path in (PROTO / PACKAGE).glob("*.proto"))
    command = [
        *(sys.executable, "-m", "grpc_tools.protoc"),
        f"--proto_path={PROTO}",
        *(f"--plugin={name}={_plugin(name)}" for name in PLUGINS),
        f"--python_out={output}",
        f"--grpc_python_out={output}",
        f"--mypy_out=quiet:{output}",
        f"--mypy_grpc_out=quiet,only_async:{output}",
        *sources,
    ]
    # A process of its own: protoc forks for its plugins, which this one's gRPC threads would not like.
    if subprocess.run(command, check=False).returncode != 0:
        raise ConfigError(f"protoc refused {', '.join(sources)}")


def stale_files(fresh: Path, committed: Path) -> list[str]:
    """Names of files that differ between two folders, or are in only one of them."""
    names = {path.name for folder in (fresh, committed) for path in folder.glob("*.py*") if path.is_file()}
    return [
        name
        for name in sorted(names.difference(HANDWRITTEN))
        if not (fresh / name).is_file()
        or not (committed / name).is_file()
        or (fresh / name).read_bytes() != (committed / name).read_bytes()
    ]


def _plugin(name: str) -> str:
    # Beside the interpreter first: an environment that is not activated is not on the PATH.
    beside = Path(sys.executable).parent / name
    found = str(beside) if beside.exists() else shutil.which(name)
    if found is None:
        raise ConfigError(f"{name} is not installed; pip install 'baton[dev]'")
    return found


def main(arguments: list[str] | None = None, committed: Path = ROOT / PACKAGE) -> int:
    parser = argparse.ArgumentParser(prog="python -m rpc.generate", description="Generates rpc/v1 from proto/rpc/v1.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 when rpc/v1 is stale")
    check = parser.parse_args(arguments).check
    with tempfile.TemporaryDirectory() as scratch:
        try:
            generate(Path(scratch))
        except ConfigError as error:
            print(error, file=sys.stderr)  # noqa: T201
            return 2
        fresh = Path(scratch) / PACKAGE
        stale = stale_files(fresh, committed)
        if check and stale:
            print(f"stale: {', '.join(stale)} in {PACKAGE}; run python -m rpc.generate", file=sys.stderr)  # noqa: T201
            return 1
        if not check:
            for name in stale:
                (committed / name).unlink(missing_ok=True)
                if (fresh / name).exists():
                    shutil.copyfile(fresh / name, committed / name)
    return 0


if __name__ == "__main__":
    sys.exit(main())
