"""A lock that may be copied and pickled with what it guards."""

import copy
import pickle
import threading

import pytest

from token_recycling._util.locks import Lock


def is_free(lock):
    """Whether another thread could enter at once."""
    found = []
    thread = threading.Thread(target=lambda: found.append(lock.acquire(blocking=False)))
    thread.start()
    thread.join()
    return found[0]


def test_one_thread_at_a_time_which_may_enter_again():
    lock = Lock()
    with lock, lock:
        assert not is_free(lock)
    assert is_free(lock)


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda lock: pickle.loads(pickle.dumps(lock))])
def test_a_copy_is_a_free_lock_of_its_own(copied):
    lock = Lock()
    with lock:
        assert is_free(copied(lock))
