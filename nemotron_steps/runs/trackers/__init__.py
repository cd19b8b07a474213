"""Mirrors of a run in experiment trackers; one that cannot write never stops a run. Another package adds one under the
entry-point group `nemotron_steps.trackers`: name of its table → subclass of `base.ExperimentTracker`."""
