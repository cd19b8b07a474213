"""How weights get from policy ranks to generators in other processes.

    plan.py              names, shapes and places in buckets: agreed once
    shared_memory.py     CPU, one machine: one segment, mapped read-only by every generator
    streams.py           CUDA IPC (same GPU), NCCL (another GPU), gloo (another machine's CPU), all ends at once
    ray_transport.py     tensors that are in no policy: buckets in Ray's object store
    transport_handle.py  what a receiver must know of a sender
    endpoints.py         the two ends, inside the workers; adapters, whose frozen weights are sent once
    transfer.py          the driver's side: chooses the transport of each generator by device and machine

The tensors never pass through the driver. In one process there is nothing to transfer: the generator reads the
policy's tensors.
"""
