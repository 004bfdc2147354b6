"""What all tests share. It also puts this folder on the path, so that
they can import `federations`.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest
import torch

# A shell that starts the tests in the background has them ignore Ctrl-C, and so
# would all that they start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Threads are slow on networks of this size, and on busy machines very slow."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def small_stacks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stacks with room for some hundred images on a CPU, and not for a GiB of them;
    tolerances of `stacks.thin`.
    """
    from exchanges import TOLERANCES
    from stacks import CLOSE

    monkeypatch.setitem(TOLERANCES, "fp32", CLOSE)
    if not torch.cuda.is_available():
        monkeypatch.setattr("fednoro.engine.cuda.stacked.client_stack.PREPARED_BYTES", 2**22)
