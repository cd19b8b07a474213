"""Executors of two clouds: NVIDIA Run:ai, which schedules DGX Cloud, and SkyPilot."""
