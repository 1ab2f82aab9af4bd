"""A process of its own that imports what Baton needs and says how that went, one JSON line per package.

Its own because imports are what is in doubt: one may crash, hang, or set up threads for good. Run by
`cluster/machine_facts.py`; the distributions are its arguments. The last line is about torch.
"""

from __future__ import annotations

import importlib
import json
import sys
from importlib import metadata
from pathlib import PurePosixPath
from typing import Any

from engine.numerics import check_batch_invariance, prepare_environment

TRIED_SHAPES = ((576, 576), (1536, 576), (576, 1536))
"""Of weights, when batch-invariant results are tried. Each worker tries its own model's again."""

NO_MODULE = "no module of its own"


def modules_of(distribution: metadata.Distribution) -> list[str]:
    """The top-level modules that a distribution brings, without private ones."""
    if listed := distribution.read_text("top_level.txt"):
        names = listed.split()
    else:
        paths = [PurePosixPath(str(file)) for file in distribution.files or ()]
        names = sorted({path.parts[0].split(".")[0] for path in paths if path.suffix in (".py", ".so")})
    names = [name for name in names if name.isidentifier() and not name.startswith("_")]
    own = distribution.name.replace("-", "_").lower()
    return [name for name in names if name.lower() == own] or names


def probe(name: str) -> str:
    """Why distribution ``name`` cannot be imported; "" when it can."""
    try:
        for module in modules_of(metadata.distribution(name)):
            importlib.import_module(module)
    except Exception as error:  # whatever a broken package raises is the finding
        return f"{type(error).__name__}: {error}"
    return ""


def torch_facts() -> dict[str, Any]:
    torch = importlib.import_module("torch")
    cuda = torch.cuda.is_available()
    return {
        "version": torch.__version__,
        "cuda_build": torch.version.cuda,
        "cuda_devices": [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
        if cuda
        else [],
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "invariance_error": _invariance_error(torch),
    }


def _invariance_error(torch: Any) -> str:
    try:
        check_batch_invariance([torch.randn(*shape) for shape in TRIED_SHAPES], head_dim=64)
    except Exception as error:  # as above: it is the finding
        return f"{type(error).__name__}: {error}"
    return ""


def main() -> None:
    prepare_environment()
    for name in sys.argv[1:]:
        _tell({"package": name, "error": probe(name)})
    try:
        _tell({"torch": torch_facts()})
    except ImportError:
        _tell({"torch": None})


def _tell(line: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
