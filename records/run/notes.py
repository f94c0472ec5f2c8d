"""What one start works out for the next: answers to questions, kept beside Triton's compiled kernels.

So one folder, and one file of `./run.sh caches`, holds all that makes the next start short.
"""
import hashlib
import json
import sys
from pathlib import Path

import torch

from records.run.machine import device_name, version
from records.run.sources import hash_sources, project_sources

FILE = "notes.json"


class Notes:
    """Answers for these sources, these versions and this kind of GPU. An unreadable one counts as missing.

    Triton's cache may be a folder or, by the user's choice, another store, whose errors may be of any type.
    """

    def __init__(self, device: torch.device):
        sources = hash_sources(project_sources())
        self.about = sources, sys.version, torch.__version__, version("triton"), device_name(device)
        self.new: list[tuple[object, object]] = []

    def place(self, question: object):
        """Where Triton's cache keeps the answer to a question. Questions differ if their `repr` differs."""
        from triton.runtime.cache import get_cache_manager
        return get_cache_manager(hashlib.sha256(repr((self.about, question)).encode()).hexdigest())

    def find(self, question: object) -> object:
        """The answer as JSON has it, or None."""
        try:
            path = self.place(question).get_file(FILE)
            return json.loads(Path(path).read_text()) if path else None
        except Exception:
            return None

    def add(self, question: object, answer: object) -> None:
        """For `keep` to write."""
        self.new.append((question, answer))

    def keep(self) -> None:
        """Write all answers that were added. The next start asks again for what the cache refuses."""
        for question, answer in self.new:
            try:
                self.place(question).put(json.dumps(answer), FILE, binary=False)
            except Exception:
                pass
