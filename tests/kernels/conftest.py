"""The kernels' own gates. They need triton, and each its own process: `make kernels-check` runs them.

`test_interpreted.py` runs with TRITON_INTERPRET=1, `test_binaries.py` without; a plain run of the tests leaves both out.
"""

import importlib.util
import os

interpreted = os.environ.get("TRITON_INTERPRET") == "1"
if importlib.util.find_spec("triton") is None:
    collect_ignore = ["test_interpreted.py", "test_binaries.py"]
else:
    collect_ignore = ["test_binaries.py"] if interpreted else ["test_interpreted.py"]
