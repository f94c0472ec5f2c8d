"""Triton kernels compiled before their first launch, many at a time.

Triton compiles a kernel where it is first launched, so that a start with empty caches compiles one after the
other. The count of memory (records/run/memory.py) goes through the same program first, with tensors that have
shapes and no memory. A compiler needs no more than types, sizes and where tensors start.
"""
import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from threading import Thread

MOST = 16       # threads; a tenth of what they do holds Python's lock

Launch = Callable[..., Callable]        # kernel[grid] becomes launch(kernel, grid)


def no_launch(kernel, grid) -> Callable:
    return lambda *args, **kwargs: None


def compile_only(kernel, grid) -> Callable:
    return lambda *args, **kwargs: kernel.run(*args, grid=grid, warmup=True, **kwargs)


def hash_triton() -> Thread:
    """Let a thread hash Triton's own files, which its cache asks for at the first launch: 0.4 s.

    Triton keeps the hash. A launch that comes earlier makes its own.
    """
    from triton.runtime.cache import triton_key
    thread = Thread(target=triton_key, daemon=True)
    thread.start()
    return thread


class Compilers(ThreadPoolExecutor):
    """Threads that compile kernels, and what launches them: in Triton 3.6 a C program for each signature."""

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
    """A form of launch that only compiles, beside the program. The end of the block waits for the last one.

    A kernel that cannot be compiled says so where it is launched.
    """
    import triton
    threads = min(MOST, len(os.sched_getaffinity(0)))
    with Compilers(threads, "compiler") as pool, triton.AsyncCompileMode(pool, ignore_errors=True):
        yield compile_only
