"""Started by torchrun: copies against NCCL, eagerly and in a CUDA graph that is replayed on other numbers."""
import os

import torch
import torch.distributed as dist

from kernels.ranks.collectives import Collectives, wait
from kernels.ranks.copies import PeerCopies, can_copy

OPERATIONS = ("all_gather", "all_to_all", "reduce_scatter", "all_reduce")


def main() -> None:
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    assert can_copy(device)
    copies, nccl = PeerCopies(dist.group.WORLD), Collectives(size)
    torch.manual_seed(rank)
    for n in (8, 24_576, 1_179_648):
        for make in (copies.zeros, torch.zeros):  # memory that others can read, and memory that is staged
            if rank % 2:  # buffers that are made on first use are cleared only behind this
                torch.cuda._sleep(500_000_000)  # cycles, 0.3 s
            source = make(size * n, dtype=torch.bfloat16, device=device)
            lengths = {"all_gather": size * len(source), "all_to_all": len(source), "reduce_scatter": n,
                       "all_reduce": len(source)}
            mine, theirs = ({name: source.new_zeros(length) for name, length in lengths.items()}
                            for _ in range(2))

            def run(by: Collectives, out: dict[str, torch.Tensor]) -> None:
                out["all_reduce"].copy_(source)
                started = [by.all_gather(out["all_gather"], source), by.all_to_all(out["all_to_all"], source),
                           by.reduce_scatter(out["reduce_scatter"], source), by.all_reduce(out["all_reduce"])]
                for work in started:
                    wait(work)

            run(copies, mine)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                run(copies, mine)
            for again in range(4):
                source.normal_()
                graph.replay() if again else run(copies, mine)
                run(nccl, theirs)
                torch.cuda.synchronize()
                # NCCL rounds a sum at every rank; the copies round it once, so the sum is made here.
                theirs["all_reduce"] = torch.sum(theirs["all_gather"].view(size, -1), 0)
                theirs["reduce_scatter"] = torch.sum(theirs["all_to_all"].view(size, -1), 0)
                theirs["all_to_all"].chunk(size)[rank].zero_()  # The copies leave out what stays on its rank.
                for name in OPERATIONS:
                    if not torch.equal(mine[name], theirs[name]):
                        raise SystemExit(f"rank {rank}, {name} of {n}, {make.__module__}: not NCCL's")
    print("agrees", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
