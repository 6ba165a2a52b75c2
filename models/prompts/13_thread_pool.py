import logging
import queue
import threading

logger = logging.getLogger(__name__)


class Worker(threading.Thread):
    """A thread that takes tasks from a queue until it meets None."""

    def __init__(self, tasks, results):
        super().__init__(daemon=True)
        self.tasks = tasks
        self.results = results

    def run(self):
        while True:
            task = self.tasks.get()
            if task is None:
                self.tasks.task_done()
                break
            index, function, args, kwargs = task
            try:
                result = function(*args, **kwargs)
            except Exception as exc:
                logger.exception("task %d failed", index)
                self.results.put((index, None, exc))
            else:
                self.results.put((index, result, None))
            finally:
                self.tasks.task_done()


class ThreadPool:
    """A fixed number of worker threads with a shared queue."""

    def __init__(self, num_threads):
        self.tasks = queue.Queue()
        self.results = queue.Queue()
        self.workers = []
        for _ in range(num_threads):