"""A lock between processes that ends with the process that holds it."""

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

if sys.platform != "win32":
    import fcntl


@contextlib.contextmanager
def locked(path: Path, busy: Callable[[], None]) -> Iterator[IO[bytes]]:
    """Keeps other processes from the same file, creating it; locks nothing on Windows.

    The operating system lifts the lock when its holder ends, however it ends. The holder may move
    or remove the file. Where a file system has no locks, there is none.

    Args:
      path: the file.
      busy: called if another process holds the lock. If it returns, the lock is waited for.

    Yields:
      The file, open to append and read.
    """
    while True:
        with open(path, "a+b") as file:
            if sys.platform == "win32":
                yield file
                return
            with contextlib.suppress(OSError):  # a file system without locks
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    busy()
                    fcntl.flock(file, fcntl.LOCK_EX)
            # The file locked may have been moved or removed while this process waited for it.
            try:
                current = os.path.samestat(os.fstat(file.fileno()), os.stat(path))
            except FileNotFoundError:
                current = False
            if current:
                yield file
                return
