"""A run's parts where the config wants them: in this process (parts.py), or in Ray actors (on_ray.py).

The classes inside the actors are those of the one-process run. Actors are made by engine/workers; weights travel in
engine/weight_sync.
"""
