"""How weights get from policy ranks to generators in other processes; the tensors never pass through the driver.

plan.py agrees on places in buckets once; shared_memory.py and streams.py carry them; endpoints.py are the two ends
inside the workers, and transfer.py is the driver's side.
"""
