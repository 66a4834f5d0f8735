"""The kernels on the GPU that is here: the ops tests' cases, two runs bit for bit, large tensors, several devices.

    make test-gpu            with the Python of an environment that has torch for the GPU, triton, pytest and hypothesis

Says "no GPU here" and ends well only if there is none.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def main() -> int:
    sys.path.insert(0, str(ROOT / "python"))
    import torch

    if not torch.cuda.is_available():
        print("no GPU here")
        return 0
    import pytest

    print(torch.cuda.get_device_name(0), "torch", torch.__version__)
    options = ["-o", "addopts=", "-q"]  # without those of the development environment and its plugins
    return int(pytest.main([str(ROOT / "tests/gpu"), *options]))


if __name__ == "__main__":
    sys.exit(main())
