"""Collectives as copies: their arithmetic on threads that stand for ranks, and on GPUs against NCCL's."""
import contextlib
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.distributed import _symmetric_memory

from kernels.ngrams.exchange import ColumnExchange
from kernels.ranks import collectives
from kernels.ranks import copies as by_copies
from kernels.ranks import world as worlds
from kernels.ranks.nodes import Nodes, groups
from kernels.streams import recorded

ROOT = Path(__file__).resolve().parent.parent


class Group:
    """One rank's view of a group of threads."""

    def __init__(self, rank: int, size: int, shared: SimpleNamespace):
        self.rank, self.size, self.shared = lambda: rank, lambda: size, shared


class Memory:
    """What a rendezvous returns."""

    def __init__(self, everyones: list[torch.Tensor], barrier: threading.Barrier):
        self.everyones, self.all, self.barriers = everyones, barrier, 0

    def barrier(self, timeout_ms: int) -> None:
        self.barriers += 1
        self.all.wait(min(timeout_ms / 1000, 30))

    def get_buffer(self, rank: int, shape: tuple, dtype: torch.dtype, first: int) -> torch.Tensor:
        whole = self.everyones[rank].view(-1)
        assert whole.dtype == dtype
        return whole[first:first + torch.Size(shape).numel()].view(shape)


def rendezvous(x: torch.Tensor, group: Group) -> Memory:
    shared = group.shared
    shared.given[group.rank()] = x
    shared.barrier.wait(timeout=30)
    everyones = [shared.given[rank] for rank in range(group.size())]
    shared.barrier.wait(timeout=30)
    return Memory(everyones, shared.barrier)


@pytest.fixture
def on_threads(monkeypatch):
    """A function that runs one of (rank, its PeerCopies) on so many ranks at once; for the results of all."""
    stream = SimpleNamespace(wait_stream=lambda _: None, record_event=lambda: None, wait_event=lambda _: None)
    monkeypatch.setattr(by_copies, "side_stream", lambda *_, **__: stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    here = threading.local()

    def empty(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        assert here.together, "a rank would wait here with Python's lock, which stops its watchdog"
        here.done = here.together = False
        return torch.empty(shape, dtype=dtype)

    def meet(x: torch.Tensor, group: Group) -> Memory:
        assert here.done, "the device may clear the signals after another rank's first one"
        here.done = False
        return rendezvous(x, group)

    def wait_for_all(group: Group) -> None:
        assert here.done, "the device may still wait for a rank in an earlier collective"
        here.together = group.shared.barrier.wait(timeout=30) >= 0

    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: setattr(here, "done", True))
    monkeypatch.setattr(collectives.dist, "barrier", wait_for_all)
    monkeypatch.setattr(by_copies, "shared_memory", empty)
    monkeypatch.setattr(_symmetric_memory, "rendezvous", meet)

    def run(size: int, work) -> list:
        shared = SimpleNamespace(given={}, barrier=threading.Barrier(size))
        with ThreadPoolExecutor(size) as threads:
            def of_rank(rank: int):
                copies = by_copies.PeerCopies(Group(rank, size, shared))
                assert here.done and copies.memories.popitem()[1].barriers, "no kernel is loaded yet"
                return work(rank, copies)
            return [x.result() for x in [threads.submit(of_rank, rank) for rank in range(size)]]
    return run


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("readable", [True, False])
@pytest.mark.parametrize("apart", [True, False])
def test_copies_do_what_the_collectives_say(on_threads, size, readable, apart):
    """From memory that others can read and from staged memory; slices of it; again into the same places."""
    torch.manual_seed(size)
    n, rounds = 3, 3
    sources = torch.randn(rounds, size, 2, size * n, 5).bfloat16()
    scalars = torch.randn(rounds, size)

    def work(rank: int, copies: by_copies.PeerCopies) -> list:
        device, found = torch.device("cpu"), []
        if apart:
            copies, others = copies.apart, copies
            assert copies is others.apart and not copies.memories.keys() & others.memories.keys()
        make = copies.zeros if readable else torch.zeros
        whole = make(2, size * n, 5, dtype=torch.bfloat16, device=device)
        for i in range(rounds):
            whole.copy_(sources[i, rank])
            lengths = size * size * n, size * n, n
            gathered, received, summed = (torch.zeros(length, 5).bfloat16() for length in lengths)
            scalar = scalars[i, rank].clone()
            for started in (copies.all_gather(gathered, whole[1]), copies.all_to_all(received, whole[1]),
                            copies.reduce_scatter(summed, whole[1]), copies.all_reduce(scalar)):
                collectives.wait(started)
            whole.fill_(torch.nan)  # every rank has read it
            found.append((gathered, received, summed, scalar))
        return found

    for rank, found in enumerate(on_threads(size, work)):
        for i, (gathered, received, summed, scalar) in enumerate(found):
            given = sources[i, :, 1].unflatten(1, (size, n))  # from, to, n, 5
            assert torch.equal(gathered, given.flatten(0, 2))
            wanted = given[:, rank].clone()
            wanted[rank] = 0  # What a rank sends to itself stays where it is.
            assert torch.equal(received, wanted.flatten(0, 1))
            assert torch.equal(summed, given[:, rank].float().sum(0).bfloat16())
            assert scalar == scalars[i].sum()


class Taken(torch.autograd.Function):
    """table[index] in memory that `empty` makes, as `embedding.lookup` writes it."""

    @staticmethod
    def forward(ctx, table: torch.Tensor, index: torch.Tensor, empty) -> torch.Tensor:
        ctx.save_for_backward(table, index)
        form = dict(dtype=table.dtype, device=table.device)
        return empty(len(index), table.shape[1], **form).copy_(table[index]).detach()

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        table, index = ctx.saved_tensors
        return torch.zeros_like(table).index_add_(0, index, grad), None, None


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("readable", [True, False])
def test_columns_of_a_table_travel_as_copies(on_threads, size, readable):
    """Twice in the same memory: the second exchange writes what it sends where the first one did."""
    torch.manual_seed(size)
    n, c, table = 5, 4, torch.randn(7, size * 4)
    index, grads = torch.randint(7, (2, size * n)), torch.randn(2, size * n, size * c)

    def work(rank: int, copies: by_copies.PeerCopies) -> list:
        mine, found = table.chunk(size, 1)[rank].contiguous().requires_grad_(), []
        for i in range(2):
            exchange = ColumnExchange(copies)
            exchange.send(Taken.apply(mine, index[i], copies.outgoing if readable else torch.empty))
            rows = exchange.receive()
            rows.backward(grads[i].chunk(size)[rank])
            found.append(rows.detach())
        assert len(copies.memories) == 1, "what is sent has one buffer"
        return [found, mine.grad]

    wanted = sum(torch.zeros_like(table).index_add_(0, index[i], grads[i]) for i in range(2))
    for rank, (found, grad) in enumerate(on_threads(size, work)):
        for i in range(2):
            assert torch.equal(found[i], table[index[i]].chunk(size)[rank])
        torch.testing.assert_close(grad, wanted.chunk(size, 1)[rank])


def test_a_source_that_others_cannot_read_is_staged_in_one_buffer_a_length(on_threads):
    def work(rank: int, copies: by_copies.PeerCopies) -> int:
        for n in (4, 8, 4, 8, 4):
            copies.all_reduce(torch.ones(n))
        copies.all_reduce(torch.ones(8, dtype=torch.float64))
        return len(copies.memories)
    assert on_threads(2, work) == [3, 3]


def test_shared_memory_is_made_without_sympy():
    """By torch's own function, but for the allocation itself, which needs several GPUs."""
    script = """if True:
        import sys
        from types import SimpleNamespace
        import torch
        from torch.distributed import _symmetric_memory
        from kernels.ranks.copies import shared_memory
        wanted = torch.empty(3, 0, 4)
        before = torch._prims_common.make_contiguous_strides_for
        _symmetric_memory._SymmetricMemory = SimpleNamespace(
            empty_strided_p2p=lambda size, stride, dtype, device: wanted.new_empty_strided(size, stride))
        made = shared_memory((3, 0, 4), torch.float32, torch.device("cpu"))
        assert "sympy" not in sys.modules
        assert made.shape == wanted.shape and made.stride() == wanted.stride() == before((3, 0, 4))
        assert before is torch._prims_common.make_contiguous_strides_for
        """
    subprocess.run([sys.executable, "-c", script], cwd=ROOT, check=True, timeout=120)


def test_one_rank_starts_nothing():
    alone, x = collectives.Collectives(1), torch.ones(4)
    assert alone.all_reduce(x) is alone.all_gather(x, x) is None
    assert alone.reduce_scatter(x, x) is alone.all_to_all(x, x) is None
    collectives.wait(None)
    assert alone.all_gathered(x) is x
    assert not by_copies.can_copy(torch.device("cpu"))


@pytest.mark.parametrize(("count", "each"), [(2, 2), (2, 3), (3, 1), (1, 2)])
def test_nodes_do_what_the_collectives_say(on_threads, count, each):
    """Sums and gathers in two halves, inside a node and between nodes; again into the same places."""
    size, n = count * each, 3
    given = torch.randn(2, size, size * n, 5).bfloat16()
    inside, between = ([SimpleNamespace(given={}, barrier=threading.Barrier(ranks)) for _ in range(groups)]
                       for groups, ranks in ((count, each), (each, count)))

    def work(rank: int, _) -> list:
        node, place = divmod(rank, each)
        halves = [by_copies.PeerCopies(Group(place, each, inside[node])),
                  by_copies.PeerCopies(Group(node, count, between[place]))]
        both, found = Nodes(*halves, halves[0].stream), []
        for source in given:
            summed, gathered = torch.zeros(n, 5).bfloat16(), torch.zeros(size * n, 5).bfloat16()
            collectives.wait(both.reduce_scatter(summed, source[rank].clone()))
            collectives.wait(both.all_gather(gathered, source[rank][:n].clone()))
            found.append((summed, gathered))
        return found

    for rank, found in enumerate(on_threads(size, work)):
        for source, (summed, gathered) in zip(given, found):
            assert torch.equal(gathered, source[:, :n].flatten(0, 1))
            wanted = source[:, rank * n:(rank + 1) * n].float().sum(0)
            torch.testing.assert_close(summed.float(), wanted, rtol=0.02, atol=0.02)


def of_four(rank: int, store: str) -> None:
    """One of four processes, as the second of two nodes of two would be, or the first."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=4)
    halves = [collectives.Collectives(2, group) for group in groups(2)]
    for x in (torch.arange(24.0).view(8, 3) * (rank + 1), torch.arange(4) + 2 ** rank):
        found = []
        for by in (collectives.Collectives(4), Nodes(*halves)):
            part, whole = torch.zeros_like(x[:len(x) // 4]), torch.zeros_like(x)
            collectives.wait(by.reduce_scatter(part, x.clone()))
            collectives.wait(by.all_gather(whole, part + rank))
            collectives.wait(by.all_reduce(part))
            found.append((part, whole, by.all_gathered(part)))
        assert all(map(torch.equal, *found))


def test_nodes_agree_with_gloo(tmp_path):
    torch.multiprocessing.start_processes(of_four, (str(tmp_path / "store"),), 4, start_method="fork")


@pytest.mark.parametrize(("size", "here", "rank", "local", "chosen"), [
    (4, 2, 3, 1, "Nodes"), (2, 2, 1, 1, "PeerCopies"), (2, 1, 1, 0, "Collectives"),
    (6, 4, 5, 1, "Collectives"), (4, 2, 2, 1, "Collectives")])
def test_what_ranks_choose(monkeypatch, size, here, rank, local, chosen):
    """Copies inside machines that are alike, whose ranks are in order; and torch.distributed elsewhere."""
    for name, value in (("LOCAL_WORLD_SIZE", here), ("LOCAL_RANK", local)):
        monkeypatch.setenv(name, str(value))
    world = object.__new__(worlds.World)
    vars(world).update(rank=rank, size=size, device=torch.device("cuda", local), least=lambda x: int(x))
    node, between = (SimpleNamespace(size=lambda n=n: n, rank=lambda: 0) for n in (here, size // here))
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda *_: True)
    monkeypatch.setattr(worlds, "groups", lambda inside: (node, between))
    monkeypatch.setattr(worlds.dist, "group", SimpleNamespace(WORLD=node))
    monkeypatch.setattr(by_copies, "side_stream", lambda *_, **__: None)
    for method in ("zeros", "all_reduce"):
        monkeypatch.setattr(by_copies.PeerCopies, method, lambda *_, **__: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: local)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: None)
    world.choose_collectives(copies=True)
    assert type(world.collectives).__name__ == chosen and world.collectives.size == size
    world.choose_collectives(copies=False)
    assert type(world.collectives).__name__ == "Collectives"


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_copies_agree_with_nccl():
    """Eagerly and in CUDA graphs: gathers and exchanges bit for bit, sums as nearly as bfloat16 can say."""
    ranks = 4 if torch.cuda.device_count() >= 4 else 2
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}",
               ROOT / "tests" / "collectives_worker.py"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=200,
                            env=os.environ | {"PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"})
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-2000:]
    assert result.stdout.count("agrees") == ranks


@pytest.mark.parametrize("failure", [torch.OutOfMemoryError("out of memory"), ValueError("a mistake"), None])
def test_what_fails_while_a_graph_is_recorded_is_what_is_raised(monkeypatch, failure):
    """The end of such a recording fails too, as a stream was left behind; alone, its error is the one."""
    class Recording:
        def __enter__(self):
            pass

        def __exit__(self, *error):
            raise RuntimeError("capturing stream has unjoined work")

    monkeypatch.setattr(torch.cuda, "CUDAGraph", object)
    monkeypatch.setattr(torch.cuda, "graph", lambda *_, **__: Recording())
    with pytest.raises(type(failure) if failure else RuntimeError) as raised, recorded((0, 0)):
        if failure:
            raise failure
    assert raised.value is failure or "unjoined" in str(raised.value)
