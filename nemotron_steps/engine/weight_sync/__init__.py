"""How weights get from policy ranks to generators in other processes; the tensors never pass through the driver.

streams.py carries them, and transfer.py is the driver's side.
"""
