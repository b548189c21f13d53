"""What all tests of the numerics share."""

import sys
from pathlib import Path

import pytest
from threadpoolctl import threadpool_limits

# For `import partition_literal`: under pytest's importlib mode a test's folder is not on the path.
sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(autouse=True, scope="package")
def one_thread():
    """One BLAS thread: these matrices are small, and waiting for a second busy core is not."""
    with threadpool_limits(limits=1):
        yield
