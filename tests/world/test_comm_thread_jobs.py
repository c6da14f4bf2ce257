"""The communication thread: what it does when a job raises."""

import threading

import pytest

from halocline.world import CommThread


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_job_that_raises_does_not_stop_those_after_it() -> None:
    thread, done = CommThread("test"), threading.Event()

    def fail() -> None:
        raise OSError("a job's own error")

    thread.submit(fail)
    for _ in range(100):
        if not thread.alive:
            break
        threading.Event().wait(0.05)
    thread.submit(done.set)
    assert done.wait(10)
    thread.stop(5)
