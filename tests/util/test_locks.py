"""A lock that may be copied and pickled together with the object it guards."""

import copy
import pickle
import threading

import pytest

from token_recycling._util.locks import Lock


def is_free(lock):
    """Return whether another thread could enter immediately."""
    found = []
    thread = threading.Thread(target=lambda: found.append(lock.acquire(blocking=False)))
    thread.start()
    thread.join()
    return found[0]


def test_lock_is_exclusive_and_reentrant():
    lock = Lock()
    with lock, lock:
        assert not is_free(lock)
    assert is_free(lock)


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda lock: pickle.loads(pickle.dumps(lock))])
def test_copy_is_a_separate_free_lock(copied):
    lock = Lock()
    with lock:
        assert is_free(copied(lock))
