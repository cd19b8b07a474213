"""Environments whose answers call tools."""
