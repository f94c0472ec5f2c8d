"""What one start works out for the next: answers to questions, kept beside Triton's compiled kernels.

So one folder, and one file of `./run.sh caches`, holds all that makes the next start short.
"""
import hashlib
import json

import torch

from records.run.machine import device_name, version
from records.run.sources import hash_sources, project_sources

FILE = "notes.json"


class Notes:
    """Answers for these sources, these versions and this kind of GPU. What cannot be read is not there."""

    def __init__(self, device: torch.device):
        sources = hash_sources(project_sources())
        self.about = sources, torch.__version__, version("triton"), device_name(device)
        self.new: list[tuple[object, object]] = []

    def place(self, question: object):
        """Where Triton's cache keeps the answer to a question, which its `repr` tells from all others."""
        from triton.runtime.cache import get_cache_manager
        return get_cache_manager(hashlib.sha256(repr((self.about, question)).encode()).hexdigest())

    def find(self, question: object) -> object:
        """The answer as JSON has it, or None."""
        try:
            with open(self.place(question).get_file(FILE) or "") as file:
                return json.load(file)
        except (OSError, ValueError):
            return None

    def add(self, question: object, answer: object) -> None:
        """For `keep` to write."""
        self.new.append((question, answer))

    def keep(self) -> None:
        """Write all that was added. A folder that cannot be written keeps nothing; nobody needs it to."""
        for question, answer in self.new:
            try:
                self.place(question).put(json.dumps(answer), FILE, binary=False)
            except OSError:
                pass
