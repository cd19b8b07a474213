"""GRPO: `loop.py` is the synchronous loop, `async_loop.py` the asynchronous one, `step.py` what both do once a step's
groups are there. The rest is what they call: rewards, penalties, advantages, dynamic sampling, the buffer."""
