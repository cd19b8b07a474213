"""How weights get from policy ranks to generators in other processes.

    plan.py            names, shapes and places in buckets: agreed once
    shared_memory.py   CPU, one machine: one segment, mapped read-only by every generator
    objects.py         CPU, several machines, or plain tensors: buckets in Ray's object store
    streams.py         GPU: buckets through CUDA IPC (same GPU) and NCCL (another GPU), sender and receiver at once
    transfer.py        the driver's side: chooses the way of each generator by device and machine

The tensors never pass through the driver. In one process there is nothing to transfer: the generator reads the
policy's tensors.
"""
