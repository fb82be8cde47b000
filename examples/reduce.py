"""All-reduce alone: average tensors of several processes, encrypted, and survive the death of any of them.

python examples/reduce.py                 # founds a group of three and prints a ticket
python examples/reduce.py ATOLL1:…        # twice, in other terminals
ATOLL_LISTEN=/ip4/0.0.0.0/tcp/7071 before each of them where they are on several computers
"""

import sys
import time

import torch

import atoll.reduce

group = atoll.reduce.join(sys.argv[1]) if len(sys.argv) > 1 else atoll.reduce.found(peers=3, codec="int8")
with group:
    print(
        f"I am {group.me[-6:]}.",
        "" if len(sys.argv) > 1 else f"The others: python examples/reduce.py {group.ticket}",
        flush=True,
    )
    gradients = [torch.empty(1000, 1000), torch.empty(1000)]
    for step in range(10):
        for tensor in gradients:
            tensor.normal_()
        begin = time.perf_counter()
        done = group.all_reduce(gradients)  # the mean, in place, the same bits at every member
        took = time.perf_counter() - begin
        names = ", ".join(peer[-6:] for peer in done.contributors)
        print(f"step {step}: mean over {names} in {took * 1000:.0f} ms" + ("" if done.complete else ", in parts"))
        time.sleep(0.2)  # here your own work would be
