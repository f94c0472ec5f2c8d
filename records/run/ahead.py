"""Triton kernels compiled before their first launch, many at a time.

Triton compiles a kernel at its first launch, so a start with empty caches compiles kernels one by one. But
the count of memory (records/run/memory.py) runs the same program before, on tensors that have shapes and no
memory. Such tensors suffice to compile: a compiler needs only their types, their sizes and their alignment.
"""
import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from threading import Thread

MOST = 16       # threads; they hold Python's lock for a tenth of their work

Launch = Callable[..., Callable]        # kernel[grid] becomes launch(kernel, grid)


def no_launch(kernel, grid) -> Callable:
    return lambda *args, **kwargs: None


def compile_only(kernel, grid) -> Callable:
    return lambda *args, **kwargs: kernel.run(*args, grid=grid, warmup=True, **kwargs)


def hash_triton() -> Thread:
    """Hash Triton's own files in a thread, 0.4 s: Triton's cache needs the hash at the first launch.

    Triton keeps the hash. A launch that comes before the thread has ended computes the hash itself.
    """
    from triton.runtime.cache import triton_key
    thread = Thread(target=triton_key, daemon=True)
    thread.start()
    return thread


class Compilers(ThreadPoolExecutor):
    """Threads that compile kernels and their launchers, in Triton 3.6 a C program for each signature."""

    def submit(self, compile_: Callable) -> Future:
        return super().submit(self.with_launcher, compile_)

    @staticmethod
    def with_launcher(compile_: Callable):
        from triton.runtime.driver import driver
        kernel = compile_()
        driver.active.launcher_cls(kernel.src, kernel.metadata)     # goes to Triton's cache
        return kernel


@contextmanager
def compiling() -> Iterator[Launch]:
    """Give a `Launch` that only compiles, in threads. The end of the block waits for the last kernel.

    A kernel that cannot be compiled raises its error later, when the run launches it.
    """
    import triton
    threads = min(MOST, len(os.sched_getaffinity(0)))
    with Compilers(threads, "compiler") as pool, triton.AsyncCompileMode(pool, ignore_errors=True):
        yield compile_only
