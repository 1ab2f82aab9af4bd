"""Everything that takes CUDA devices to check, in a few minutes: `python tests/gpu/nccl_check.py [pytest arguments]`.

Ends with pytest's own status, and with 2 where there are not two devices: nothing is then shown.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

MINUTES = 5
REPOSITORY = Path(__file__).parents[2]


def main() -> int:
    num_devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    names = ", ".join(torch.cuda.get_device_name(number) for number in range(num_devices))
    sys.stdout.write(f"torch {torch.__version__}, {num_devices} CUDA devices {names}\n")
    if num_devices < 2:
        sys.stderr.write(f"an NCCL group needs two CUDA devices, here are {num_devices}\n")
        return 2
    sys.path.insert(0, str(REPOSITORY))
    limit = ["-o", f"timeout={MINUTES * 60 // 4}"]
    return int(pytest.main(["-v", "-m", "gpu", "--durations=5", *limit, str(Path(__file__).parent), *sys.argv[1:]]))


if __name__ == "__main__":
    sys.exit(main())
